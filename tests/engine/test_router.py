"""The router before two real vLLM servers: what it expects is what they do, and it knows what they have."""

import asyncio
import json
import random
import re
import statistics
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import zmq
from http_engine import MODEL, HttpEngine, free_port
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parent.parent))
from router_house import House, served
from service_fakes import eventually

from lmc.chat_template import with_documents
from lmc.router.application import Router
from lmc.router.document_index import Told
from lmc.router.engines import Engines, address
from lmc.router.event_stream import EventStream
from lmc.router.local_tokenizers import LocalTokenizers
from lmc.router.policies import make
from lmc.router.questions import read
from lmc.router.settings import RouterSettings
from lmc.storage.places import place_of

TEXTS = [path.read_text().strip() for path in sorted((MODEL.parent / "documents").glob("*.txt"))]
TEMPLATE = "{% for one in messages %}{{ one.role }} : {{ one.content }} .{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %} a{% endif %}"
IN_PROMPT, PROMPTS = 4, 60
MEMORY = 0.035  # GB: about half of the documents of a test


class Engine(HttpEngine):
    """A server with lmc, its administration and its document events."""

    def __init__(self, folder):
        self.admin = f"127.0.0.1:{free_port()}"
        events = f"tcp://*:{free_port()},tcp://*:{free_port()}"
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "LMC_ENABLE_BLENDING": "true", "LMC_BLEND_MIN_TOKENS": "32", "LMC_MAX_LOCAL_CPU_SIZE": MEMORY,
            "LMC_ADMIN": self.admin, "LMC_DOCUMENT_EVENTS": events,
        }  # fmt: skip
        exports = "".join(f"export {name}='{value}'\n" for name, value in variables.items())
        transfer = '{"kv_connector": "LMCConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
        (folder / "template.jinja").write_text(with_documents(TEMPLATE, " # # "))
        serve = "vllm serve MODEL --served-model-name small --port 8000 --enable-prompt-tokens-details"
        serve += f" --chat-template {folder}/template.jinja"
        super().__init__(folder, f"{exports}{serve} --kv-transfer-config '{transfer}'")

    def reused(self) -> float:
        """Return how many tokens of documents it has reused, as its metrics say."""
        found = re.findall(r"^lmc:reused_tokens_sum\{.*\} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.M)
        return sum(map(float, found))

    def documents(self) -> dict[Told, set[str]]:
        """Return where its documents are, as it says itself."""
        listed = httpx.get(f"http://{self.admin}/v1/documents?limit=1000").json()["documents"]
        found = {
            Told(one["tenant"], one["digest"]): {place_of(place).medium for place in one["places"]} for one in listed
        }
        return {told: media for told, media in found.items() if media}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    started = [Engine(folder), Engine(folder)]
    try:
        for one in started:
            one.wait()
        yield started
    finally:
        for one in started:
            one.close()


@pytest.fixture
def routed(engines):
    """A function that opens a router of a policy."""
    opened = []

    def routed(policy: str) -> House:
        known = Engines()
        for one in engines:
            known.add(address(one.url, admin=one.admin))
        serving = served(Router(RouterSettings(), make(policy), known), lifespan=True)
        opened.append((serving, house := House(serving.__enter__(), [])))
        return house

    yield routed
    for serving, house in opened:
        for one in house.connections:
            one.close()
        serving.__exit__(None, None, None)


def prompts(count: int, seed: int, parts: Sequence[int] = (0, 1, 0)) -> list[str]:
    """Questions over documents, of which those of one part of the corpus are found together."""
    chosen, half = random.Random(seed), len(TEXTS) // 2
    of_part = TEXTS[:half], TEXTS[half:]
    return [
        " # # ".join(
            ["name one owner .", *chosen.sample(of_part[parts[number % len(parts)]], IN_PROMPT), f"question {number}"]
        )
        for number in range(count)
    ]


def ask_parts(house: House, engines: list[Engine], salt: str) -> None:
    """Ask about each part of the corpus while the other engine is being drained."""
    for part, other in enumerate(engines):
        assert house.ask("/engines/drain", {"url": other.url})[0] == 200
        ask_all(house, engines, salt, prompts(6, 2, (part,)))
        assert house.ask("/engines/drain", {"url": other.url, "drain": False})[0] == 200


def ask_all(house: House, engines: list[Engine], salt: str, asked: list[str]) -> tuple[float, list[float]]:
    """Return how many tokens of documents were reused, and by how much each answer was not what was expected."""
    before, errors = sum(one.reused() for one in engines), []
    for prompt in asked:
        body = {"model": "small", "prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
        answer = house.send("/v1/completions", body)
        usage = json.loads(answer.read())["usage"]
        reported = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        errors.append((int(answer.headers["x-lmc-expected-tokens"]) - reported) / usage["prompt_tokens"])
    return sum(one.reused() for one in engines) - before, errors


def test_documents_are_reused_more_often_than_with_round_robin(engines, routed):
    """Each engine has met one half of the documents, and has no room for all of them."""
    found = {}
    for policy in ("round_robin", "documents"):
        house = routed(policy)
        ask_parts(house, engines, policy)
        found[policy], errors = ask_all(house, engines, policy, prompts(PROMPTS, 1))
    by_turns, by_documents = found["round_robin"], found["documents"]
    assert by_documents > 1.2 * by_turns
    late = errors[len(errors) // 2 :]  # The first requests teach how many letters a token has.
    assert abs(statistics.mean(late)) < 0.1


def test_tokenizers_of_the_router_cut_prompts_as_engines_do(engines, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = with_documents(TEMPLATE, " # # ")
    tokenizer.save_pretrained(tmp_path)
    chat = [{"role": "system", "content": "name one owner"}, {"role": "user", "content": TEXTS[0]}]
    later = [*chat, {"role": "assistant", "content": "Kai"}, {"role": "user", "content": "and the goat ?"}]
    documents = [{"text": TEXTS[1]}, {"text": f" {TEXTS[2]}\n"}]
    asked = [
        {"prompt": prompts(1, 3)[0]},
        {"prompt": prompts(1, 3)[0], "add_special_tokens": False},
        *({"messages": messages} for messages in (chat, later)),
        {"messages": later, "documents": documents},
        {"messages": later, "chat_template_kwargs": {"documents": documents}, "add_generation_prompt": False},
        {"messages": later[:3], "continue_final_message": True, "add_generation_prompt": False},
    ]

    async def tokens_of(questions: list[dict[str, object]]) -> list[list[int]]:
        tokenizers = LocalTokenizers({"small": str(tmp_path)}, 1)
        reading = asyncio.create_task(tokenizers.run(lambda _: " # # ", lambda *_: None))
        try:
            while "small" not in tokenizers:
                await asyncio.sleep(0.05)
            return [await tokenizers.tokens("small", one) for one in questions]
        finally:
            reading.cancel()
            tokenizers.close()

    questions = [read(json.dumps({"model": "small", **one}).encode(), {}, "", " # # ").tokenize for one in asked]
    found = [httpx.post(f"{engines[0].url}/tokenize", json=one).json()["tokens"] for one in questions]
    assert asyncio.run(tokens_of(questions)) == found


@contextmanager
def lossy(address: str):
    """The address of a forwarder of events that loses two of three batches, and how many it has lost."""
    context, ended, lost = zmq.Context(), threading.Event(), []
    coming, going = context.socket(zmq.SUB), context.socket(zmq.PUB)
    coming.subscribe("")
    coming.connect(address)
    port = going.bind_to_random_port("tcp://127.0.0.1")

    def forward() -> None:
        while not ended.is_set():
            if coming.poll(50):
                frames = coming.recv_multipart()
                if int.from_bytes(frames[1], "big") % 3:
                    lost.append(frames[1])
                else:
                    going.send_multipart(frames)

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}", lost
    finally:
        ended.set()
        thread.join()
        context.destroy(0)


@pytest.mark.parametrize("loses", [False, True])
def test_the_index_is_what_the_engines_have(engines, routed, monkeypatch, loses):
    lost = []
    with ExitStack() as opened:
        if loses:

            def stream(address: str, replay: str, topic: str) -> EventStream:
                forwarded, gone = opened.enter_context(lossy(address))
                lost.append(gone)
                return EventStream(forwarded, replay, topic, quiet_seconds=0.3)

            monkeypatch.setattr("lmc.router.follow.EventStream", stream)
        house = routed("documents")
        index = house.router.application.policy.index
        for number in range(6):
            ask_all(house, engines, f"{loses} {number}", prompts(2, 1))
        for one in engines:
            eventually(lambda one=one: index.told(one.url) == one.documents())
    assert len(lost) == (2 if loses else 0)
    assert not loses or any(lost), "no batch was lost"
