"""Chat completions over documents that were learned ahead: how much is reused, and whether the answers are as good.

    python bench/chat.py MODEL [--documents 50] [--requests 200] [--questions 40]
    python bench/chat.py small …       the small model that lmc ships, its documents and its questions

It starts `vllm serve MODEL` with lmc (the CPU build, one thread), learns passages of real texts from files with
`lmc learn`, and asks through the `openai` client, streaming or not, six passages at a time: single questions, and
conversations of three turns, each turn with six passages of its own. What is measured:

    reused      of as many tokens as all documents in all prompts have, the share that the store or the engine's own
                cache had (first requests too); the beginning of a prompt may stand in for a document that is short
    not found   documents in prompts that the store did not have, as the engine counts them
    strange     documents that the engine knows in the end and that were not given to it: texts of conversations
    right       share of answers to questions of the demo that begin with an accepted one: through chat, through
                completions with the same prompt as tokens, and through chat without reuse (`blend: false`)
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import closing_line, parser
from openai import OpenAI
from transformers import AutoTokenizer
from vllm_server import SMALL_TEMPLATE, Server

from lmc.blend.markers import Markers
from lmc.blend.segments import document_tokens, split
from lmc.commands.inspect import survey, tier_locations
from lmc.config.settings import Settings
from lmc.demo import REAL, SHIPPED
from lmc.demo.questions import TOP, Collection, Question, Retriever, read_collection
from lmc.demo.run import begins
from lmc.http.client import HttpClient
from lmc.keys import RecordKind, chunk_bounds, tokens_digest
from lmc.rag import SEPARATOR, messages

SEED, TURNS = 5, 3
INTRO = "Here are the documents."
SMALL = "small"


class Chat:
    """Asks a server, and compares what it reused with the documents' tokens."""

    def __init__(self, client: OpenAI, admin: HttpClient, tokenizer: Any, texts: dict[str, str]) -> None:
        self.client, self._admin = client, admin
        self._tokenizer, self._markers, self.texts = tokenizer, Markers.of(tokenizer, SEPARATOR), texts
        tokens = {name: self._tokens_of(text) for name, text in texts.items()}
        self.sizes = {name: len(found) for name, found in tokens.items()}
        self.digests = {tokens_digest(found) for found in tokens.values()}
        self.reused = self.wanted = self.requests = self.unknown = 0
        self.least = 1.0  # the lowest share of one request

    def ask(
        self,
        chat: list[dict[str, str]],
        names: list[str],
        *,
        stream: bool = False,
        lead: str = "",
        count: int = 8,
        blend: bool = True,
    ) -> str:
        """Return the answer, which begins with `lead`, to a chat in which the documents `names` stand."""
        wanted = sum(self.sizes[name] for name in names)
        asked: dict[str, Any] = {"model": "bench", "messages": chat, "temperature": 0, "max_tokens": count}
        if lead:
            asked["messages"] = [*chat, {"role": "assistant", "content": lead}]
            asked["extra_body"] = {"continue_final_message": True, "add_generation_prompt": False}
        if not blend:
            asked.setdefault("extra_body", {})["kv_transfer_params"] = {"lmc": {"blend": False}}
        if stream:
            chunks = self.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            parts = list(chunks)
            said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            usage, name = next(part.usage for part in reversed(parts) if part.usage), parts[0].id
        else:
            answer = self.client.chat.completions.create(**asked)
            said, usage, name = answer.choices[0].message.content or "", answer.usage, answer.id
        if not blend:
            return said
        self.unknown += int(self._admin.ask(f"/v1/requests/{name}").get("unknown_documents", 0))
        # The beginning of a prompt is reused too, so no more than the documents is counted.
        cached = min(wanted, usage.prompt_tokens_details.cached_tokens or 0)
        self.reused, self.wanted, self.requests = self.reused + cached, self.wanted + wanted, self.requests + 1
        self.least = min(self.least, cached / wanted)
        return said

    def prompt_of(self, chat: list[dict[str, str]], lead: str = "") -> list[int]:
        """Return a chat as tokens, up to the answer, which begins with `lead`."""
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        found: list[int] = self._tokenizer.encode(text + lead, add_special_tokens=False)
        return found

    def _tokens_of(self, text: str) -> Sequence[int]:
        """Return the tokens that a document has in a prompt."""
        (found,) = document_tokens(self._tokenizer.encode, self._markers, SEPARATOR, text)
        return found

    def strange(self) -> int:
        """Return how many documents the engine knows that were not given to it."""
        listed = self._admin.ask(f"/v1/documents?limit={1 << 20}")["documents"]
        return sum(one["digest"] not in self.digests for one in listed)

    def documents_of(self, chat: list[dict[str, str]]) -> int:
        """Return how many documents a chat has."""
        return len(split(self.prompt_of(chat), self._markers).documents)


def talk(chat: Chat, names: list[str], system: str, questions: list[Question], requests: int) -> None:
    """Ask single questions, and conversations of several turns, in random orders, streaming and not."""
    draw = random.Random(SEED)
    while chat.requests < requests:
        said: list[dict[str, str]] = []
        behind: list[str] = []
        for turn in range(draw.choice([1, TURNS])):
            chosen = draw.sample(names, TOP)
            question = draw.choice(questions).question
            said += messages("" if turn else system, [chat.texts[name] for name in chosen], question, intro=INTRO)
            behind += chosen
            assert chat.documents_of(said) == len(behind), "a chat is cut wrongly"
            answer = chat.ask(said, behind, stream=draw.random() < 0.5)
            said.append({"role": "assistant", "content": answer})
            print(f"{chat.requests} requests, {chat.reused / chat.wanted:.2%} reused", flush=True)


def quality(chat: Chat, collection: Collection, asked: list[tuple[Question, list[str]]]) -> dict[str, float]:
    """Return which shares of the answers to questions over documents are right, by the way in which they are asked."""
    right = {"chat": 0, "completions": 0, "without reuse": 0}
    for question, found in asked:
        names = list(found)
        random.Random(f"{SEED} {question.question}").shuffle(names)
        texts = [collection.documents[name] for name in names]
        chatted = messages(collection.system, texts, f"Question: {question.question}", intro=INTRO)
        count, lead = collection.answer_tokens, question.lead
        prompt = chat.prompt_of(chatted, lead)
        completion = chat.client.completions.create(model="bench", prompt=prompt, temperature=0, max_tokens=count)
        answers = {
            "chat": chat.ask(chatted, names, lead=lead, count=count),
            "completions": completion.choices[0].text,
            "without reuse": chat.ask(chatted, names, lead=lead, count=count, blend=False),
        }
        for way, answer in answers.items():
            right[way] += begins(answer, question.answer, *question.accepted)
        print(f"{question.question} {answers}", flush=True)
    return {way: round(count / len(asked), 4) for way, count in right.items()}


def learn(folder: Path, url: str) -> dict[str, Any]:
    """Learn a directory as a user does, and return what `lmc learn` says."""
    words = ["learn", str(folder), "--url", url, "--json", "--manifest", str(folder.parent / "manifest.sqlite")]
    done = subprocess.run([sys.executable, "-m", "lmc", *words], stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def stored_documents(disk: Path) -> int:
    """Return how many chunks of documents are on a disk."""
    (place,) = tier_locations(disk)
    return sum(meta.kind is RecordKind.DOCUMENT for held in survey(place)[0].values() for _, meta in held)


def measure(model: str, documents: int, requests: int, questions: int) -> dict[str, Any]:
    """Return what is measured; see above."""
    small = model == SMALL
    source = SHIPPED if small else REAL
    collection = read_collection(source / "documents", source / "questions.json")
    draw = random.Random(SEED)
    texts = dict(draw.sample(sorted(collection.documents.items()), min(documents, len(collection.documents))))
    retriever = Retriever(collection.documents)
    wanted = [question for question in collection.questions if question.answer is not None]
    shown = sorted(wanted, key=lambda question: not question.shown)[:questions]  # the demo's first
    asked = [(question, retriever.top(question.question, TOP)) for question in shown]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = texts | {name: collection.documents[name] for _, names in asked for name in names}
        (folder / "texts").mkdir()
        for title, text in known.items():
            (folder / "texts" / f"{title}.txt").write_text(text)
        path, template = (str(SHIPPED / "model"), SMALL_TEMPLATE) if small else (model, None)
        with (
            Server(path, folder, template, local_disk=str(folder / "disk")) as server,
            OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        ):
            server.wait()
            learned = learn(folder / "texts", server.url)
            print(learned, flush=True)
            tokenizer = AutoTokenizer.from_pretrained(path)
            tokenizer.chat_template = template or tokenizer.chat_template
            chat = Chat(client, server.admin, tokenizer, known)
            talk(chat, sorted(texts), collection.system, collection.questions, requests)
            found = {
                "documents": len(known),
                "learned": learned["learned"],
                "learning seconds": round(learned["seconds"], 1),
                "requests": chat.requests,
                "reused": round(chat.reused / chat.wanted, 4),
                "least reused": round(chat.least, 4),
                "documents not found": chat.unknown,
                "strange documents": chat.strange(),
            }
            if asked:
                found["questions"], found["right"] = len(asked), quality(chat, collection, asked)
            size = Settings().chunk_size
            chunks = sum(len(chunk_bounds(tokens, size)) for tokens in chat.sizes.values())
        found["model"] = SMALL if small else Path(model).name
        return {**found, "chunks of documents": chunks, "chunks stored": stored_documents(folder / "disk")}


def main() -> None:
    arguments = parser(__doc__, "chat")
    arguments.add_argument("model")
    arguments.add_argument("--documents", type=int, default=50)
    arguments.add_argument("--requests", type=int, default=200)
    arguments.add_argument("--questions", type=int, default=40, help="of the demo, through chat and completions")
    options = arguments.parse_args()
    found = measure(options.model, options.documents, options.requests, options.questions)
    name = "chat_small" if options.model == SMALL else "chat"
    closing_line({"bench": name, **found}, name if options.keep else None)


if __name__ == "__main__":
    main()
