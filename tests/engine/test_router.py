"""The router before two real vLLM servers: what it expects is what they do, and it knows what they have."""

import asyncio
import itertools
import json
import random
import re
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import httpx
import msgspec
import pytest
import zmq
from http_engine import MODEL, HttpEngine
from lab import BLOCK, words
from ports import free_port
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parent.parent))
from router_house import House, served
from service_fakes import eventually

from lmc.blend.markers import Markers
from lmc.blend.segments import split
from lmc.commands.chat_template import with_documents
from lmc.keys import tokens_digest
from lmc.router.application import Router
from lmc.router.cut import content_of
from lmc.router.document_index import ReportedDocument
from lmc.router.engines import Engines, address
from lmc.router.event_stream import EventStream
from lmc.router.kv_index import CacheSource
from lmc.router.local_tokenizers import LocalTokenizers
from lmc.router.policies import make
from lmc.router.requests import read
from lmc.router.settings import RouterSettings
from lmc.storage.places import place_of

pytestmark = pytest.mark.long

TEXTS = [path.read_text().strip() for path in sorted((MODEL.parent / "documents").glob("*.txt"))]
TEMPLATE = "{% for one in messages %}{{ one.role }} : {{ one.content }} .{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %} a{% endif %}"
IN_PROMPT, PROMPTS = 4, 60
MEMORY = 0.035  # GB: about half of the documents of a test
BLOCKS = 200  # of a prefix cache
FEW = 20  # batches of events that an engine keeps, to send them again


class Announced:
    """What an engine has, as anybody understands it who has received every batch of its KV events."""

    def __init__(self, address: str) -> None:
        self._context, self._copies, self._tokens = zmq.Context(), Counter(), set()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._socket.subscribe("")
        self.batches = 0

    def _read(self) -> None:
        while self._socket.poll(0):
            topic, number, payload = self._socket.recv_multipart()
            assert (topic, int.from_bytes(number, "big")) == (b"kv", self.batches), "a batch has been lost"
            self.batches += 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)

    def _apply(self, event: dict[str, object]) -> None:
        """Every copy of a block is stored and removed by events of its own."""
        if event["type"] == "AllBlocksCleared":
            self._copies.clear()
            return
        stored, medium = event["type"] == "BlockStored", (event["medium"].lower(), event.get("group_idx"))
        for name in event["block_hashes"]:
            self._copies[name, medium] += 1 if stored else -1
            assert self._copies[name, medium] >= 0
        if stored:
            self._tokens.add(tuple(event["token_ids"]))

    def blocks(self) -> dict[int, set[tuple[str, int | None]]]:
        """Return where each block is."""
        self._read()
        found = dict[int, set[tuple[str, int | None]]]()
        for (name, medium), copies in self._copies.items():
            if copies:
                found.setdefault(name, set()).add(medium)
        in_prefix_cache = sum(copies for (_, (medium, _)), copies in self._copies.items() if medium == "gpu")
        assert in_prefix_cache < BLOCKS, "more copies than there is room for"
        return found

    def twice(self) -> set[int]:
        """Return the blocks of which it has two copies."""
        self.blocks()
        return {name for (name, _), copies in self._copies.items() if copies == 2}

    def has_said(self, tokens: Sequence[int]) -> bool:
        """Return whether these tokens have been stored together at any time."""
        self._read()
        return tuple(tokens) in self._tokens

    def close(self) -> None:
        self._context.destroy(0)


class Engine(HttpEngine):
    """A server with lmc, its administration, its document events and its KV events."""

    def __init__(self, folder):
        self.kv_events, self.kv_replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.announced = Announced(self.kv_events)  # listens before there is anything to hear
        self.admin = f"127.0.0.1:{free_port()}"
        events = f"tcp://*:{free_port()},tcp://*:{free_port()}"
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "LMC_ENABLE_BLENDING": "true", "LMC_BLEND_MIN_TOKENS": "32", "LMC_MAX_LOCAL_CPU_SIZE": MEMORY,
            "LMC_LOAD_POLICY": "always",  # A model this small is computed faster than blended.
            "LMC_ADMIN": self.admin, "LMC_DOCUMENT_EVENTS": events,
        }  # fmt: skip
        exports = "".join(f"export {name}='{value}'\n" for name, value in variables.items())
        transfer = '{"kv_connector": "LMCConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
        (folder / "template.jinja").write_text(with_documents(TEMPLATE, " # # "))
        serve = "vllm serve MODEL --served-model-name small --port 8000 --enable-prompt-tokens-details"
        serve += f" --chat-template {folder}/template.jinja --num-gpu-blocks-override {BLOCKS}"
        published = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv", "buffer_steps": 10_000}
        published |= {"endpoint": f"tcp://*:{self.kv_events.rpartition(':')[2]}"}
        published |= {"replay_endpoint": f"tcp://*:{self.kv_replay.rpartition(':')[2]}"}
        serve += f" --kv-events-config '{json.dumps(published)}'"
        super().__init__(folder, f"{exports}{serve} --kv-transfer-config '{transfer}'")

    def ask(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return how many tokens of a prompt it has had."""
        return cached(httpx.post(f"{self.url}/v1/completions", json=completion(tokens, salt), timeout=60).json())

    def start_anew(self) -> None:
        """Kill it, and start another one at the same ports, which keeps few batches of events."""
        self.kill()
        self.announced.close()
        self.announced = Announced(self.kv_events)
        self.command = re.sub(r'"buffer_steps": \d+', f'"buffer_steps": {FEW}', self.command)
        self.start()
        self.wait()

    @property
    def both_kv_events(self) -> str:
        """Where its KV events are, as a router is told."""
        return f"{self.kv_events}+{self.kv_replay}"

    def close(self) -> None:
        self.announced.close()
        super().close()

    def reused(self) -> float:
        """Return how many tokens of documents it has reused, as its metrics say."""
        found = re.findall(r"^lmc:reused_tokens_sum\{.*\} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.M)
        return sum(map(float, found))

    def documents(self) -> dict[ReportedDocument, set[str]]:
        """Return where its documents are, as it says itself."""
        listed = httpx.get(f"http://{self.admin}/v1/documents?limit=1000").json()["documents"]
        found = {
            ReportedDocument(one["tenant"], one["digest"]): {place_of(place).medium for place in one["places"]}
            for one in listed
        }
        return {told: media for told, media in found.items() if media}


def completion(prompt: str | Sequence[int], salt: str = "") -> dict[str, object]:
    body = {"model": "small", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return {**body, "cache_salt": salt} if salt else body


def cached(answer: dict[str, object]) -> int:
    """Return how many tokens of a prompt an engine has had, as its answer says."""
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    with ExitStack() as opened:
        started = [opened.enter_context(closing(Engine(folder))) for _ in range(2)]
        for one in started:
            one.wait()
        yield started


@pytest.fixture
def routed(engines):
    """A function that opens a router of a policy."""
    opened = []

    def routed(policy: str, kv_events: Sequence[str] = (), **options: object) -> House:
        known = Engines()
        for one, events in itertools.zip_longest(engines, kv_events, fillvalue=""):
            known.add(address(one.url, admin=one.admin, kv_events=events))
        settings = RouterSettings(exact_tokens=policy == "precise", health_seconds=0.5)
        serving = served(Router(settings, make(policy, **options), known), lifespan=True)
        opened.append((serving, house := House(serving.__enter__(), [], known)))
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
        answer = house.send("/v1/completions", completion(prompt, salt))
        said = json.loads(answer.read())
        expected = int(answer.headers["x-lmc-expected-tokens"])
        errors.append((expected - cached(said)) / said["usage"]["prompt_tokens"])
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
    assert statistics.mean(abs(error) <= 0.1 for error in late) >= 0.9


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


def test_documents_are_found_in_prompts_without_separators(engines, routed, monkeypatch):
    """Each engine has met one half of the documents, and a new router has read them from the engines."""
    monkeypatch.setattr("lmc.router.document_search.SEARCH_SECONDS", 30.0)
    markers = Markers.of(AutoTokenizer.from_pretrained(MODEL), " # # ")
    ask_parts(routed("documents"), engines, "")
    house = routed("documents")
    search, index = house.router.application.proxy.search, house.router.application.policy.index
    texts_by_digest = {digest_of(engines[0], markers, text): text for text in TEXTS}
    for part, one in enumerate(engines):
        eventually(lambda one=one: index.reports(one.url) == one.documents())
        digests = {document.digest for document in one.documents() if not document.tenant} & texts_by_digest.keys()
        contents = list(map(content_of, digests))
        eventually(lambda contents=contents: all(search.by_tokens.get("", content) for content in contents))
        texts = [texts_by_digest[digest] for digest in sorted(digests)][:IN_PROMPT]
        prompt = "\n".join(["answer from these", *(f"[ {number} ] {text}" for number, text in enumerate(texts))])
        body = completion(f"{prompt} question {part}")
        explained = house.ask("/lmc/explain", body)[1]
        assert explained["documents"] == {"separators": 0, "tokens": 0, "words": len(texts)}
        before, answer = one.reused(), house.send("/v1/completions", body)
        expected = int(answer.headers["x-lmc-expected-tokens"])
        assert answer.headers["x-lmc-engine"] == one.url
        answer.read()
        assert one.reused() - before == pytest.approx(expected, rel=0.1)


def digest_of(engine: Engine, markers: Markers, text: str) -> str:
    """Return the digest of a text's tokens between separators."""
    body = {"model": "small", "prompt": f" # # {text} # # ", "add_special_tokens": False}
    tokens = httpx.post(f"{engine.url}/tokenize", json=body).json()["tokens"]
    (span,) = split(tokens, markers).documents
    return tokens_digest(tokens[span.start : span.stop])


def two_of_three(number: int) -> bool:
    return number % 3 != 0


@contextmanager
def lossy(address: str, loses: Callable[[int], bool] = two_of_three):
    """The address of a forwarder of events that loses some of the batches, and those that it has lost."""
    context, ended, lost = zmq.Context(), threading.Event(), []
    coming, going = context.socket(zmq.SUB), context.socket(zmq.PUB)
    coming.subscribe("")
    coming.connect(address)
    port = going.bind_to_random_port("tcp://127.0.0.1")

    def forward() -> None:
        while not ended.is_set():
            if coming.poll(50):
                frames = coming.recv_multipart()
                if loses(int.from_bytes(frames[1], "big")):
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
            eventually(lambda one=one: index.reports(one.url) == one.documents())
    assert len(lost) == (2 if loses else 0)
    assert not loses or any(lost), "no batch was lost"


# The blocks of prefix caches, of which vLLM itself publishes the events.

NUMBERS = itertools.count()  # seeds of prompts that nobody has asked before


def followed(house: House, engine: Engine) -> dict[int, set[tuple[str, int | None]]]:
    """Return what a router of the policy `precise` knows of an engine."""

    async def look() -> dict[int, set[tuple[str, int | None]]]:
        return house.router.application.policy.index.blocks(CacheSource(engine.url))

    return house.router.call(look())


def explained(house: House, engine: Engine, tokens: Sequence[int]) -> dict[str, float]:
    """Return what the router would make of an engine for a prompt."""
    (found,) = (
        one for one in house.ask("/lmc/explain", completion(tokens))[1]["engines"] if one["engine"] == engine.url
    )
    return found


def asked_and_told(engine: Engine, tokens: Sequence[int]) -> None:
    """Ask for a prompt whose blocks are new, and wait until the engine has said so."""
    engine.ask(tokens)
    eventually(lambda: engine.announced.has_said(tokens[: len(tokens) // BLOCK * BLOCK]))


def caught_up(house: House, engines: Sequence[Engine]) -> None:
    """Wait until the router knows all that engines have said, a block of a new prompt being the last of it."""
    for one in engines:
        asked_and_told(one, words(BLOCK + 1, next(NUMBERS)))
        eventually(lambda one=one: followed(house, one) == one.announced.blocks())


def expected_and_cached(
    house: House, engines: Sequence[Engine], tokens: Sequence[int], salt: str = ""
) -> tuple[int, int]:
    """Ask through the router, and return how many tokens it expects an engine to have, and how many that had.

    When it returns, the router knows what the engine has said of that.
    """
    answer = house.send("/v1/completions", completion(tokens, salt))
    found = int(answer.headers["x-lmc-expected-tokens"]), cached(json.loads(answer.read()))
    caught_up(house, [one for one in engines if one.url == answer.headers["x-lmc-engine"]])
    return found


def some_alike(count: int, seed: int) -> list[tuple[list[int], str]]:
    """Prompts of three tenants, some of which begin alike or end where a block does, and their salts."""
    chosen, found = random.Random(seed), []
    for number in range(count):
        shared = words(10 * BLOCK, 1000 * seed + number % 6)[: BLOCK * chosen.randrange(2, 10)]
        own = words(BLOCK * chosen.randrange(6, 15) + chosen.choice([0, 5, 17]), 1000 * seed + 10 + number)
        found.append((shared + own, f"{seed} {number % 3}"))
    return found


@pytest.mark.parametrize("loses", [False, True])
def test_the_blocks_of_the_index_are_those_that_engines_have(engines, routed, monkeypatch, loses):
    """More is asked than the caches hold. Then all is asked again, and engines have what the router expects."""
    monkeypatch.setattr("lmc.router.follow.EventStream", partial(EventStream, quiet_seconds=0.1))
    asked, addresses, lost = some_alike(44, 1 + loses), [one.both_kv_events for one in engines], []
    with ExitStack() as opened:
        if loses:
            for place, one in enumerate(engines):
                forwarded, gone = opened.enter_context(lossy(one.kv_events))
                addresses[place] = f"{forwarded}+{one.kv_replay}"
                lost.append(gone)
        house = routed("precise", addresses, expected_secs=0.0)
        for number, (tokens, salt) in enumerate(asked):
            engines[number % 2].ask(tokens, salt)
        caught_up(house, engines)
        found = [
            (len(tokens), *expected_and_cached(house, engines, tokens, salt))
            for tokens, salt in random.Random(3).sample(asked, len(asked))
        ]
        index = house.router.application.policy.index
    assert all(abs(expected - had) <= BLOCK for _, expected, had in found), found
    assert any(had < size - 2 * BLOCK for size, _, had in found), "nothing has been evicted"
    assert sum(had > 0 for _, _, had in found) > len(found) / 2
    assert (index.unplaced, index.unreadable) == (0, 0)
    assert all(lost), "no batch was lost"


def test_a_block_is_there_until_the_last_copy_of_it_is_evicted(engines, routed):
    """vLLM computes the last block of a prompt again that ends with it, and keeps both copies.

    It says of each that it was stored, and that it was removed. The router once took the block for gone with the first.
    """
    engine, short = engines[0], words(2 * BLOCK, next(NUMBERS))
    house = routed("precise", [one.both_kv_events for one in engines], expected_secs=0.0)
    caught_up(house, [engine])
    before = engine.announced.twice()
    for _ in range(2):
        engine.ask(short)
    for _ in range(3):  # Otherwise blocks of the longer prompt are evicted right behind the copy.
        engine.ask(words(20 * BLOCK, next(NUMBERS)))
    longer = [*short, *words(8 * BLOCK, next(NUMBERS))]
    engine.ask(longer)
    caught_up(house, [engine])
    (twice,) = engine.announced.twice() - before
    while twice in engine.announced.twice():
        engine.ask(words(10 * BLOCK, next(NUMBERS)))
    caught_up(house, [engine])
    assert expected_and_cached(house, engines, [*longer, 5]) == (len(longer), len(longer))


def test_events_of_blocks_tell_the_policy_documents_which_beginnings_engines_have(engines, routed):
    house = routed("documents", [one.both_kv_events for one in engines])
    tokens = words(6 * BLOCK + 1, next(NUMBERS))
    engines[1].ask(tokens)
    eventually(lambda: explained(house, engines[1], tokens)["expected_tokens"] == 6 * BLOCK)
    assert explained(house, engines[0], tokens)["expected_tokens"] == 0
    answer = house.send("/v1/completions", completion(tokens))
    assert answer.headers["x-lmc-engine"] == engines[1].url
    assert cached(json.loads(answer.read())) == int(answer.headers["x-lmc-expected-tokens"]) == 6 * BLOCK


def test_an_engine_that_was_killed_has_nothing_and_is_followed_anew(engines, routed):
    other, killed = engines
    house = routed("precise", [one.both_kv_events for one in engines], expected_secs=0.0)
    tokens = words(3 * BLOCK + 4, next(NUMBERS))
    for one in engines:
        one.ask(tokens)
    caught_up(house, engines)
    assert expected_and_cached(house, engines, tokens) == (3 * BLOCK, 3 * BLOCK)
    killed.start_anew()
    caught_up(house, engines)
    assert explained(house, other, tokens)["score"] == 3 * BLOCK
    assert house.ask("/engines/drain", {"url": other.url})[0] == 200
    assert expected_and_cached(house, engines, tokens) == (0, 0)
    assert expected_and_cached(house, engines, tokens) == (3 * BLOCK, 3 * BLOCK)


def test_what_cannot_be_sent_again_is_not_believed_any_more(engines, routed, monkeypatch):
    """More batches are lost than the engine keeps. In them, it has said that it has evicted what the router knew."""
    monkeypatch.setattr("lmc.router.follow.EventStream", partial(EventStream, quiet_seconds=600.0))
    engine, is_cut = engines[1], threading.Event()
    if f'"buffer_steps": {FEW}' not in engine.command:
        engine.start_anew()
    with lossy(engine.kv_events, lambda _: is_cut.is_set()) as (forwarded, lost):
        house = routed("precise", ["", f"{forwarded}+{engine.kv_replay}"], expected_secs=0.0)
        old, new = words(4 * BLOCK, next(NUMBERS)), words(4 * BLOCK, next(NUMBERS))
        engine.ask(old)
        eventually(lambda: explained(house, engine, old)["score"] == 4 * BLOCK)
        is_cut.set()
        for _ in range(FEW + 5):  # more blocks than the caches hold
            asked_and_told(engine, words(10 * BLOCK, next(NUMBERS)))
        eventually(lambda: lost and int.from_bytes(lost[-1], "big") == engine.announced.batches - 1)
        assert explained(house, engine, old)["score"] == 4 * BLOCK
        is_cut.clear()
        engine.ask(new)
        eventually(lambda: explained(house, engine, new)["score"] == 4 * BLOCK)
        assert explained(house, engine, old)["score"] == 0
        eventually(lambda: followed(house, engine).items() <= engine.announced.blocks().items())
    assert engine.ask(old) == 0
