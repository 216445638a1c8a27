"""KV events for the policy `precise`: the index of blocks, and how vLLM's stream over ZMQ is followed."""

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.asyncio import Context

from lmc.router.engines import Engine, address
from lmc.router.event_stream import EventStream
from lmc.router.follow import BlockEvents, follow_blocks
from lmc.router.kv_index import BlockIndex, CacheSource, Run, token_chain
from lmc.router.policies.precise import Precise
from lmc.router.policy_types import Candidate

ENGINE = CacheSource("http://e1:8000")
SIZE = 4
TOPIC = "kv"


def stored(names: list[int], parent: int | None, tokens: list[int], **fields: Any) -> dict[str, Any]:
    """A BlockStored as vLLM encodes it: a map with its type, and with fields that nobody here needs."""
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "kv_cache_spec_kind": "full_attention",
        "session_id": None,
    } | fields


def removed(names: list[int], medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": medium}


def packed(time: float, *events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([time, list(events), 0])


def longest(index: BlockIndex, tokens: list[int], salt: str = "", adapter: str = "") -> Run:
    return index.longest(ENGINE.engine, lambda size: token_chain(tokens, size, salt, adapter))


def test_a_prompt_finds_the_blocks_of_its_beginning() -> None:
    index = BlockIndex()
    events = BlockEvents(index, ENGINE)
    events.take(packed(1.0, stored([10, 11], None, [1, 1, 1, 1, 2, 2, 2, 2])))
    events.take(packed(2.0, stored([12], 11, [3, 3, 3, 3], medium="CPU")))
    assert longest(index, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]) == Run(4 + 4 + 0.8 * 4, 12)
    assert longest(index, [1, 1, 1, 1, 9, 9, 9, 9]) == Run(4, 4)
    assert longest(index, [2, 2, 2, 2]) == longest(index, [1, 1, 1]) == Run()
    events.take(packed(3.0, removed([10])))
    assert longest(index, [1, 1, 1, 1, 2, 2, 2, 2]) == Run()
    events.take(packed(4.0, {"type": "AllBlocksCleared"}))
    assert index.blocks(ENGINE) == {}


def test_a_salt_and_an_adapter_are_part_of_a_block() -> None:
    index = BlockIndex()
    events, tokens = BlockEvents(index, ENGINE), [1, 1, 1, 1, 2, 2, 2, 2]
    events.take(packed(1.0, stored([20, 21], None, tokens, extra_keys=[["tenant"], None])))
    assert longest(index, tokens) == Run()
    assert longest(index, tokens, "tenant") == Run(8, 8)
    events.take(
        packed(2.0, stored([30, 31], None, tokens, extra_keys=[["lora", "tenant"], ["lora"]], lora_name="lora"))
    )
    events.take(packed(2.0, stored([40], None, tokens[:4], extra_keys=[[["picture", 0]]])))
    assert index.is_adapter("lora")
    assert longest(index, tokens, "tenant", "lora") == Run(8, 8)
    assert longest(index, tokens, "", "lora") == longest(index, tokens) == Run()


def test_a_block_is_there_as_long_as_a_copy_of_it_is() -> None:
    """The same tokens may be in two blocks: vLLM names blended KV otherwise than exact KV."""
    index = BlockIndex()
    events = BlockEvents(index, ENGINE)
    events.take(packed(1.0, stored([1], None, [5] * 4), stored([1], None, [5] * 4, medium="CPU")))
    events.take(packed(2.0, stored([2], None, [5] * 4, medium="STORAGE")))
    assert longest(index, [5] * 4).score == 4.0
    events.take(packed(3.0, removed([1])))
    assert longest(index, [5] * 4).score == 0.8 * 4
    events.take(packed(4.0, removed([1, 77], "CPU")))
    assert longest(index, [5] * 4).score == 0.25 * 4
    events.take(packed(5.0, removed([2], "STORAGE")))
    assert longest(index, [5] * 4) == Run()


def test_a_block_that_is_stored_twice_is_there_until_it_is_removed_twice() -> None:
    """vLLM computes the last block of a prompt again that ends with it, and says of each copy when it comes and goes.

    The block, and all behind it, were once taken for gone when the first copy had gone.
    """
    index = BlockIndex()
    events, tokens = BlockEvents(index, ENGINE), [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    events.take(packed(1.0, stored([10, 11], None, tokens[:8])))
    events.take(packed(2.0, stored([11], 10, tokens[4:8])))
    events.take(packed(3.0, removed([11])))
    events.take(packed(4.0, stored([12], 11, tokens[8:])))
    assert longest(index, tokens) == Run(12, 12)
    events.take(packed(5.0, removed([11])))
    assert longest(index, tokens) == Run(4, 4)
    assert index.unplaced == 0


def test_blocks_behind_unknown_ones_are_not_placed_and_the_number_of_blocks_is_bounded() -> None:
    index = BlockIndex(max_blocks=10)
    events = BlockEvents(index, ENGINE)
    events.take(packed(1.0, stored([2], 1, [5] * 4)))
    assert (index.unplaced, index.blocks(ENGINE)) == (1, {})
    for number in range(1, 100):
        events.take(packed(number, stored([number], None, [number] * 4)))
    assert sorted(index.blocks(ENGINE)) == list(range(90, 100))
    assert longest(index, [99] * 4) == Run(4, 4)
    assert longest(index, [89] * 4) == Run()


def test_ranks_of_an_engine_are_apart_and_are_forgotten_together() -> None:
    index, other = BlockIndex(), CacheSource("http://e2:8000")
    for source in (ENGINE, ENGINE._replace(rank=1), other):
        BlockEvents(index, source).take(packed(1.0, stored([1], None, [source.rank] * 4)))
    index.drop(ENGINE)
    assert longest(index, [0] * 4) == Run()
    assert longest(index, [1] * 4) == Run(4, 4)
    index.forget(ENGINE.engine)
    assert longest(index, [1] * 4) == Run()
    assert index.blocks(other)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        packed(1.0, {"type": "Unknown"}),
        packed(1.0, stored([1, 2], None, [1] * 4)),
        packed(1.0, stored([1], None, [], block_size=0)),
        packed(1.0, stored([1], None, [-1] * 4)),
        packed(1.0, stored([1], None, [2**32] * 4)),
        packed(1.0, stored([1], None, [1] * 4, extra_keys=[])),
    ],
)
def test_a_batch_that_cannot_be_read_ends_what_was_known(payload: bytes) -> None:
    index = BlockIndex()
    events = BlockEvents(index, ENGINE)
    events.take(packed(0.0, stored([1], None, [1] * 4)))
    events.take(payload)
    assert (events.unreadable, index.blocks(ENGINE)) == (1, {})


VERBS = [*["stored"] * 5, *["removed"] * 3, "cleared"]


@given(st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 5)), min_size=20, max_size=40))
def test_the_index_has_what_a_dict_of_blocks_has(steps: list[tuple[str, int]]) -> None:
    """Block n of six stands behind block n // 2, has the token n, and copies of it on media by their numbers."""
    index, there = BlockIndex(), dict[int, Counter[str]]()
    events = BlockEvents(index, ENGINE)
    media = ("GPU", "CPU", "STORAGE")
    for number, (verb, block) in enumerate(steps):
        parent, medium = (block // 2 if block else None), media[(number // 8 + block) % 3]
        if verb == "stored":
            events.take(packed(number, stored([block], parent, [block] * SIZE, medium=medium)))
            if parent is None or parent in there:
                there.setdefault(block, Counter())[medium.lower()] += 1
        elif verb == "removed":
            events.take(packed(number, removed([block], medium)))
            if block in there:
                there[block] -= Counter([medium.lower()])
            there = {name: at for name, at in there.items() if at}
        else:
            events.take(packed(number, {"type": "AllBlocksCleared"}))
            there = {}
        known = {name: {medium for medium, _ in at} for name, at in index.blocks(ENGINE).items()}
        assert known == {name: set(at) for name, at in there.items()}
    weights = {"gpu": 1.0, "cpu": 0.8, "storage": 0.25}
    for last in range(6):
        path = [last]
        while path[0]:
            path.insert(0, path[0] // 2)
        held = next((place for place, name in enumerate(path) if name not in there), len(path))
        score = sum(max(weights[medium] for medium in there[name]) * SIZE for name in path[:held])
        run = longest(index, [token for name in path for token in [name] * SIZE])
        assert (run.tokens, run.score) == (held * SIZE, pytest.approx(score))


# The stream.


class Publisher:
    """Publishes as vLLM does: frames topic, number, batch; and a replay of those that are still in the buffer."""

    def __init__(self, buffer: int = 10_000) -> None:
        # XPUB sends what PUB sends, and says when somebody has subscribed.
        context = Context.instance()
        self._pub, self._router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.endpoint, self.replay_endpoint = (self._bind(socket) for socket in (self._pub, self._router))
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._number, self._time = 0, 0.0
        self.replays: list[int] = []
        self.at_once = 1 << 30  # messages of a replay that its queue has room for; it drops the others
        self._task = asyncio.create_task(self._serve())

    def _bind(self, socket: Any) -> str:
        socket.bind("tcp://127.0.0.1:0")
        return str(socket.get_string(zmq.LAST_ENDPOINT))

    async def subscribed(self) -> None:
        await asyncio.wait_for(self._pub.recv(), 10)

    async def publish(self, *events: dict[str, Any], drop: bool = False) -> None:
        self._time += 1
        payload = packed(self._time, *events)
        if not drop:
            await self._pub.send_multipart([TOPIC.encode(), self._number.to_bytes(8, "big"), payload])
        self._buffer.append((self._number, payload))
        self._number += 1

    async def send(self, *frames: bytes) -> None:
        await self._pub.send_multipart(frames)

    def start_again(self) -> None:
        """Count from 0 again, as a new process does at the same address."""
        self._buffer.clear()
        self._number = 0

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.replays.append(int.from_bytes(start, "big"))
            again = [(number, payload) for number, payload in self._buffer if number >= self.replays[-1]]
            for number, payload in again[: self.at_once]:
                await self._router.send_multipart([client, b"", TOPIC.encode(), number.to_bytes(8, "big"), payload])
            if len(again) < self.at_once:
                await self._router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._pub.close(linger=0)
        self._router.close(linger=0)


class SimulatedEngine:
    """An engine that stores and removes blocks of a few prompts; `truth` is what it has."""

    def __init__(self, publisher: Publisher, seed: int) -> None:
        self._publisher, self._dice = publisher, random.Random(seed)
        self.truth: dict[int, int | None] = {}  # blocks and the blocks before them

    def lose_everything(self) -> None:
        self.truth = {}
        self._publisher.start_again()

    async def step(self, drop: bool) -> None:
        prompt, events = [self._dice.randrange(3) for _ in range(6)], []
        parent: int | None = None
        for depth in range(1, len(prompt) + 1):
            name = hash(tuple(prompt[:depth])) & (1 << 64) - 1
            if name not in self.truth:
                events.append(stored([name], parent, [prompt[depth - 1]] * SIZE))
                self.truth[name] = parent
            parent = name
        while len(self.truth) > 60:
            leaves = [name for name in self.truth if name not in self.truth.values()]
            gone = self._dice.choice(leaves)
            events.append(removed([gone]))
            del self.truth[gone]
        await self._publisher.publish(*events, drop=drop)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def following(publisher: Publisher, index: BlockIndex, **options: Any) -> AsyncIterator[BlockEvents]:
    options = {"replay": publisher.replay_endpoint, "quiet_seconds": 0.05} | options
    stream = EventStream(publisher.endpoint, topic=TOPIC, from_start=True, **options)
    events = BlockEvents(index, ENGINE)
    task = asyncio.create_task(events.follow(stream))
    await publisher.subscribed()
    try:
        yield events
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def with_publisher(test: Callable[[Publisher], Coroutine[Any, Any, None]], buffer: int = 10_000) -> None:
    async def main() -> None:
        publisher = Publisher(buffer)
        try:
            await test(publisher)
        finally:
            await publisher.close()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_after_drops_the_index_is_what_the_engine_has(seed: int) -> None:
    """One batch in three is lost, the last one among them, and the engine is started again."""

    async def scenario(publisher: Publisher) -> None:
        index, dice = BlockIndex(), random.Random(seed)
        engine = SimulatedEngine(publisher, seed)

        def equal() -> bool:
            return index.blocks(ENGINE).keys() == engine.truth.keys()

        for _ in range(10):
            await engine.step(drop=False)  # before anybody listens
        async with following(publisher, index) as events:
            for _ in range(100):
                await engine.step(drop=dice.random() < 0.3)
            await engine.step(drop=True)
            await until(equal)
            assert index.unplaced == 0
            engine.lose_everything()
            await until(equal)
            for _ in range(20):
                await engine.step(drop=dice.random() < 0.3)
            await until(equal)
            assert events.unreadable == 0

    with_publisher(scenario)


def test_a_new_engine_with_more_batches_than_the_former_one_is_noticed() -> None:
    """The numbers go on as if nothing had been missed, and only the contents of the last batch tell."""

    async def scenario(publisher: Publisher) -> None:
        index = BlockIndex()
        async with following(publisher, index):
            for number in range(3):
                await publisher.publish(stored([number], None, [number] * 4))
            await until(lambda: len(index.blocks(ENGINE)) == 3)
            publisher.start_again()
            for number in range(10, 16):
                await publisher.publish(stored([number], None, [number] * 4), drop=number < 15)
            await until(lambda: sorted(index.blocks(ENGINE)) == list(range(10, 16)))

    with_publisher(scenario)


@pytest.mark.parametrize("replay", [False, True])
def test_what_cannot_be_replayed_is_dropped(replay: bool) -> None:
    async def scenario(publisher: Publisher) -> None:
        index = BlockIndex()
        options = {} if replay else {"replay": ""}
        async with following(publisher, index, quiet_seconds=20.0, **options):
            for number in range(12):
                await publisher.publish(stored([number], None, [number] * 4), drop=3 <= number < 11)
                if number == 2:
                    await until(lambda: len(index.blocks(ENGINE)) == 3)
            await until(lambda: sorted(index.blocks(ENGINE)) == (list(range(7, 12)) if replay else [11]))

    with_publisher(scenario, buffer=5)


def test_a_replay_that_is_dropped_in_part_is_asked_for_again_until_it_is_complete() -> None:
    """vLLM answers into a queue of a thousand messages, and drops the others, its last one among them."""

    async def scenario(publisher: Publisher) -> None:
        index, publisher.at_once = BlockIndex(), 10
        for number in range(35):
            await publisher.publish(stored([number], None, [number] * 4))
        async with following(publisher, index, quiet_seconds=20.0, replay_seconds=0.4):
            await until(lambda: len(index.blocks(ENGINE)) == 10)
            await publisher.publish(stored([35], None, [35] * 4))
            await until(lambda: sorted(index.blocks(ENGINE)) == list(range(36)))
        assert publisher.replays == [0, 9, 19, 29]

    with_publisher(scenario)


def test_what_cannot_be_read_ends_what_is_known_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(publisher: Publisher) -> None:
        index = BlockIndex()
        async with following(publisher, index, quiet_seconds=20.0) as events:
            await publisher.publish(stored([0], None, [0] * 4))
            await publisher.publish({"type": "NotYetInvented"})
            await publisher.send(TOPIC.encode(), b"two frames")
            await publisher.publish(stored([2], None, [2] * 4))
            await until(lambda: sorted(index.blocks(ENGINE)) == [2])
            assert events.unreadable == 1
        assert len([record for record in caplog.records if "unreadable" in record.message]) == 1

    with_publisher(scenario)


def test_a_replay_that_is_not_answered_holds_nothing_up() -> None:
    async def scenario(publisher: Publisher) -> None:
        index = BlockIndex()
        nobody = {"replay": "tcp://127.0.0.1:9", "replay_seconds": 0.05, "quiet_seconds": 20.0}
        async with following(publisher, index, **nobody):
            await publisher.publish(stored([0], None, [0] * 4), drop=True)
            await publisher.publish(stored([1], None, [1] * 4))
            await until(lambda: sorted(index.blocks(ENGINE)) == [1])

    with_publisher(scenario)


def test_requests_are_answered_while_many_batches_are_applied() -> None:
    """A replay of ten thousand batches once held up everything else until it was through."""

    class There:
        async def batches(self) -> AsyncIterator[bytes]:
            for number in range(200):
                yield packed(1.0, stored([number], None, [number] * SIZE))

    async def run() -> int:
        turns, index = 0, BlockIndex()
        following = asyncio.create_task(BlockEvents(index, ENGINE).follow(There()))  # type: ignore[arg-type]
        while not following.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(index) == index.count(ENGINE.engine) == 200
        return turns

    assert asyncio.run(run()) >= 200


def test_the_age_of_each_batch_is_told() -> None:
    ages: list[float] = []
    BlockEvents(BlockIndex(), ENGINE, ages.append).take(packed(time.time() - 5.0, stored([1], None, [1] * SIZE)))
    assert 5.0 <= ages[0] < 60.0


def test_each_rank_of_an_engine_is_followed_at_its_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    class Quiet:
        def __init__(self, address: str, replay: str, **_: Any) -> None:
            made.append((address, replay))

        async def batches(self) -> AsyncIterator[bytes]:
            yield packed(1.0, stored([len(made)], None, [1] * SIZE))
            await asyncio.Event().wait()

    async def run(policy: Precise) -> None:
        one = address("http://e1:8000", kv_events="tcp://e1:5557+tcp://e1:6557")
        engine = Engine(one, Candidate(one.url), one.models)
        following = asyncio.create_task(follow_blocks(policy.index, policy.needs.ranks, lambda *_: None, engine))
        while policy.index.count(one.url) < 2:
            await asyncio.sleep(0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert policy.index.count(one.url) == 0, "nobody says any more what changes"

    monkeypatch.setattr("lmc.router.follow.EventStream", Quiet)
    asyncio.run(run(Precise(ranks=2)))
    assert made == [("tcp://e1:5557", "tcp://e1:6557"), ("tcp://e1:5558", "tcp://e1:6558")]


def test_streams_share_one_context_of_zeromq() -> None:
    async def run() -> None:
        before = len(asyncio.all_tasks())
        streams = [EventStream(f"tcp://127.0.0.1:{port}").batches() for port in (1, 2)]
        for stream in streams:
            await anext(stream)
        assert not Context.instance().closed
        await streams[0].aclose()
        assert not Context.instance().closed, "the others go on"
        await streams[1].aclose()
        assert len(asyncio.all_tasks()) == before

    asyncio.run(run())
