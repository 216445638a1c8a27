"""Chat completions over documents that were learned ahead: how much is reused, and whether the answers are as good.

    python bench/chat.py MODEL [--documents 50] [--requests 200] [--questions 40]
    python bench/chat.py small …       the small model that lmc ships, its documents and its questions

It starts `vllm serve MODEL` with lmc (the CPU build, one thread), learns passages of real texts from files with
`lmc learn`, and asks through the `openai` client, streaming or not, six passages at a time: single questions, and
conversations of three turns, each turn with six passages of its own. What is measured:

    reused      of the tokens of all documents in all prompts, the share that came from the store (first requests too)
    documents   how many documents the store holds in the end: no more than were learned, so none from a conversation
    right       share of answers to questions of the demo that begin with an accepted one, through chat, and through
                completions with the same prompt as tokens
"""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from common import closing_line, parser
from openai import OpenAI
from transformers import AutoTokenizer

from lmc.blend.markers import Markers
from lmc.blend.segments import document_tokens, split
from lmc.config import Settings
from lmc.demo import REAL, SHIPPED
from lmc.demo.questions import TOP, Collection, Question, Retriever, read_collection
from lmc.demo.run import begins
from lmc.inspect import places, survey
from lmc.keys import RecordKind, chunk_bounds
from lmc.rag import SEPARATOR, messages

SEED, TURNS, START_SECONDS = 5, 3, 300
INTRO = "Here are the documents."
SMALL = "small"
# Its token for the end of a text tells messages apart.
TEMPLATE = "{% for one in messages %}{{ one['content'] }}{% if not loop.last %}<|end|>{% endif %}{% endfor %}"


class Server:
    """`vllm serve` with lmc, which ends with the block."""

    def __init__(self, model: str, folder: Path, template: str | None = None, **settings: Any) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.url, self._log = f"http://localhost:{port}", folder / "server.log"
        given = {"enable_blending": True, "max_local_cpu_size": 2, "local_disk": str(folder / "disk"), **settings}
        connector = {
            "kv_connector": "LMCConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": given,
        }
        words = ["--model", model, "--served-model-name", "bench", "--port", str(port), "--dtype", "float32"]
        words += ["--enforce-eager", "--enable-prompt-tokens-details", "--shutdown-timeout", "20", "--block-size", "32"]
        words += ["--kv-transfer-config", json.dumps(connector)]
        if template is not None:
            (folder / "template.jinja").write_text(template)
            words += ["--chat-template", str(folder / "template.jinja")]
        threads = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
                stdout=log, stderr=log, env={**os.environ, **threads, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with urlopen(f"{self.url}/health", timeout=1):
                    return
            except (URLError, OSError):
                time.sleep(0.3)
        self._process.kill()
        raise RuntimeError(f"the server did not start:\n{self._log.read_text()[-3000:]}")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


class Chat:
    """Asks a server, and compares what it reused with the documents' tokens."""

    def __init__(self, client: OpenAI, tokenizer: Any, texts: dict[str, str]) -> None:
        self.client = client
        self._tokenizer, self._markers, self.texts = tokenizer, Markers.of(tokenizer, SEPARATOR), texts
        self.sizes = {name: self._sizes_of(text) for name, text in texts.items()}  # tokens of each document
        self.reused = self.wanted = self.requests = 0
        self.least = 1.0  # the lowest share of one request

    def ask(self, chat: list[dict[str, str]], names: list[str], *, stream: bool, lead: str = "", count: int = 8) -> str:
        """Return the answer, which begins with `lead`, to a chat in which the documents `names` stand."""
        wanted = sum(sum(self.sizes[name]) for name in names)
        asked: dict[str, Any] = {"model": "bench", "messages": chat, "temperature": 0, "max_tokens": count}
        if lead:
            asked["messages"] = [*chat, {"role": "assistant", "content": lead}]
            asked["extra_body"] = {"continue_final_message": True, "add_generation_prompt": False}
        if stream:
            chunks = self.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            parts = list(chunks)
            said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            usage = next(part.usage for part in reversed(parts) if part.usage)
        else:
            answer = self.client.chat.completions.create(**asked)
            said, usage = answer.choices[0].message.content or "", answer.usage
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

    def _sizes_of(self, text: str) -> list[int]:
        """Return how many tokens each document of a text has in a prompt."""
        return [len(one) for one in document_tokens(self._tokenizer.encode, self._markers, SEPARATOR, text)]

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
    """Return how many answers to questions over documents are right through chat, and through completions."""
    right = {"chat": 0, "completions": 0}
    for question, found in asked:
        names = list(found)
        random.Random(f"{SEED} {question.question}").shuffle(names)
        texts = [collection.documents[name] for name in names]
        chatted = messages(collection.system, texts, f"Question: {question.question}", intro=INTRO)
        count, lead = collection.answer_tokens, question.lead
        prompt = chat.prompt_of(chatted, lead)
        completion = chat.client.completions.create(model="bench", prompt=prompt, temperature=0, max_tokens=count)
        said = chat.ask(chatted, names, stream=False, lead=lead, count=count)
        answers = {"chat": said, "completions": completion.choices[0].text}
        for way, answer in answers.items():
            right[way] += begins(answer, question.answer, *question.accepted)
        print(f"{question.question} {answers}", flush=True)
    return {way: round(count / len(asked), 4) for way, count in right.items()}


def learn(folder: Path, url: str) -> dict[str, Any]:
    """Learn a directory as a user does, and return what `lmc learn` says."""
    words = ["learn", str(folder), "--url", url, "--json", "--manifest", str(folder.parent / "manifest.jsonl")]
    done = subprocess.run([sys.executable, "-m", "lmc", *words], stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def stored_documents(disk: Path) -> int:
    """Return how many chunks of documents are on a disk."""
    (place,) = places(disk)
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
    shown = [question for question in wanted if question.shown or small][:questions]
    asked = [(question, retriever.top(question.question, TOP)) for question in shown]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = texts | {name: collection.documents[name] for _, names in asked for name in names}
        (folder / "texts").mkdir()
        for title, text in known.items():
            (folder / "texts" / f"{title}.txt").write_text(text)
        path, template = (str(SHIPPED / "model"), TEMPLATE) if small else (model, None)
        with Server(path, folder, template) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            learned = learn(folder / "texts", server.url)
            print(learned, flush=True)
            tokenizer = AutoTokenizer.from_pretrained(path)
            tokenizer.chat_template = template or tokenizer.chat_template
            chat = Chat(client, tokenizer, known)
            talk(chat, sorted(texts), collection.system, collection.questions, requests)
            found = {
                "documents": len(known),
                "learned": learned["learned"],
                "learning seconds": round(learned["seconds"], 1),
                "requests": chat.requests,
                "reused": round(chat.reused / chat.wanted, 4),
                "least reused": round(chat.least, 4),
            }
            if asked:
                found["right"] = quality(chat, collection, asked)
            size = Settings().chunk_size
            chunks = sum(len(chunk_bounds(tokens, size)) for sizes in chat.sizes.values() for tokens in sizes)
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
