"""The ledger: vLLM's published block pool examples, and a state machine against plain lists."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ledger_check import check_ledger, free_queue, reserve

from lmc.keys import ChunkKey, exact_keys
from lmc.storage.ledger import Ledger, Slot

DATA = json.loads((Path(__file__).parent / "data" / "block_pool.json").read_text())
SIZE = DATA["block_size"]
A, B, C = (ChunkKey(bytes([i]) * 32) for i in range(3))


class DocumentedLedger(Ledger):
    """As vLLM's documentation has it: every released slot enters the free queue at its tail."""

    def release(self, slots: Sequence[Slot]) -> None:
        for slot in reversed(slots):
            super().release([slot])
            if slot in self._queue:
                self._queue.touch(slot)


ORDERS = {"doc": DocumentedLedger, "vllm_0_32": Ledger}


@contextmanager
def pinned(ledger: Ledger, *keys: ChunkKey):
    """Slots of keys, held inside the block."""
    slots = [slot for slot in map(ledger.find, keys) if slot is not None]
    for slot in slots:
        ledger.hold(slot)
    try:
        yield slots
    finally:
        ledger.release(slots)


class BlockPool:
    """The least that serves requests from a ledger: a block table each, keys for full blocks."""

    def __init__(self, kind: type[Ledger]) -> None:
        self.ledger = kind(DATA["num_blocks"])
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[Slot]] = {}

    def start(self, request: str, tokens: list[str | int]) -> tuple[list[Slot], list[Slot]]:
        """Blocks that were hit, and new ones. At least one token is left to compute."""
        numbers = list(map(number, tokens))
        hit = []
        for key in exact_keys(b"", numbers, SIZE)[: (len(numbers) - 1) // SIZE]:
            slot = self.ledger.find(key)
            if slot is None:
                break
            hit.append(slot)
        for slot in hit:
            self.ledger.hold(slot)
        self.tokens[request], self.tables[request] = numbers, list(hit)
        return hit, self._grow(request, len(hit))

    def append(self, request: str, tokens: list[str | int]) -> None:
        full = len(self.tokens[request]) // SIZE
        self.tokens[request] += map(number, tokens)
        self._grow(request, full)

    def finish(self, request: str) -> None:
        self.ledger.release(self.tables.pop(request))

    def _grow(self, request: str, committed: int) -> list[Slot]:
        """Blocks for all tokens; the full ones behind the first `committed` get their keys."""
        tokens, table = self.tokens[request], self.tables[request]
        new = reserve(self.ledger, -(-len(tokens) // SIZE) - len(table))
        table += new
        for block in range(committed, len(tokens) // SIZE):
            self.ledger.commit(table[block], exact_keys(b"", tokens, SIZE)[block])
        check_ledger(self.ledger)
        return new

    @property
    def cached(self) -> list[int]:
        return [slot for slot in range(self.ledger.slots) if self.ledger.key_of(Slot(slot)) is not None]


def number(token: str | int) -> int:
    return ord(token) + 1000 if isinstance(token, str) else token


@pytest.mark.parametrize("name", ORDERS)
def test_the_published_steps_end_in_the_published_states(name):
    pool, proved = BlockPool(ORDERS[name]), 0
    for step in DATA["steps"]:
        hit, new = [], []
        match step["op"]:
            case "start":
                hit, new = pool.start(step["request"], step["tokens"])
            case "append":
                pool.append(step["request"], step["tokens"])
            case "finish":
                pool.finish(step["request"])
        check_ledger(pool.ledger)
        state = {"hit": hit, "new": new, "cached": pool.cached, "free": free_queue(pool.ledger)}
        state["table"] = pool.tables.get(step["request"])
        for what, value in DATA["expect"][name].get(str(step["time"]), {}).items():
            assert state[what] == value, (step["time"], what)
            proved += 1
    assert proved == sum(map(len, DATA["expect"][name].values()))


@pytest.mark.parametrize("kind", ORDERS.values())
def test_a_request_keeps_its_own_duplicate_of_a_block(kind):
    pool, example = BlockPool(kind), DATA["duplicates"]
    first, second = example["first"], example["second"]
    pool.start("first", first["prompt"])
    pool.append("first", first["generated"])
    assert (pool.tables["first"], pool.cached) == (first["table"], first["cached"])
    hit, _ = pool.start("second", second["prompt"])
    pool.append("second", second["generated"])
    assert (hit, pool.tables["second"], pool.cached) == (second["hit"], second["table"], second["cached"])


@pytest.mark.parametrize("kind", ORDERS.values())
def test_the_same_tokens_at_other_positions_are_no_hit(kind):
    pool, example = BlockPool(kind), DATA["position_matters"]
    pool.start("first", example["first"])
    hit, _ = pool.start("second", example["second"])
    assert hit == example["hit"]


@pytest.mark.parametrize("kind", ORDERS.values())
def test_a_request_returns_its_blocks_in_reverse(kind):
    ledger, example = kind(10), DATA["reverse_free"]
    for slot in reserve(ledger, 10):
        ledger.commit(slot, ChunkKey(bytes([slot]) * 32))
    ledger.release(example["request_blocks"])
    assert free_queue(ledger) == example["free_tail"]


def test_a_pinned_slot_is_never_evicted():
    ledger = filled(A, B, C)
    with pinned(ledger, B):
        assert reserve(ledger, 3) is None
        assert len(reserve(ledger, 2)) == 2
        assert (ledger.find(A), ledger.find(B), ledger.find(C)) == (None, 1, None)
        assert reserve(ledger, 1) is None
    assert reserve(ledger, 1) == [1]
    assert ledger.find(B) is None


def test_a_slot_that_is_held_twice_stays_until_both_have_left():
    ledger = filled(A)
    with pinned(ledger, A) as slots:
        with pinned(ledger, A):
            assert ledger._holders[slots[0]] == 2
        assert ledger.free == 0
    assert ledger.free == 1


def test_reserving_takes_all_or_nothing():
    ledger = filled(A, B)
    before = free_queue(ledger)
    assert reserve(ledger, 3) is None
    assert (free_queue(ledger), ledger.find(A), ledger.find(B), ledger.evictions) == (before, 0, 1, 0)


def test_a_released_chain_loses_its_tail_first():
    ledger = Ledger(3)
    chain = reserve(ledger, 3)
    for slot, key in zip(chain, (A, B, C), strict=True):
        ledger.commit(slot, key)
    ledger.release(chain)
    reserve(ledger, 1)
    assert [ledger.find(key) for key in (A, B, C)] == [0, 1, None]
    reserve(ledger, 1)
    assert [ledger.find(key) for key in (A, B, C)] == [0, None, None]


def test_a_reserved_slot_is_no_hit_and_an_aborted_one_is_taken_next():
    ledger = Ledger(3)
    slots = reserve(ledger, 2)
    ledger.abort(slots[0])
    assert list(ledger.keys()) == []
    assert free_queue(ledger) == [0, 2]
    check_ledger(ledger)


def test_a_pin_that_is_left_by_an_exception_is_given_back():
    ledger = filled(A)
    with pytest.raises(KeyError), pinned(ledger, A, B):
        raise KeyError
    assert ledger.free == 1


def filled(*keys: ChunkKey) -> Ledger:
    ledger = Ledger(len(keys))
    for key in keys:
        slot = ledger.reserve()
        ledger.commit(slot, key)
        ledger.release([slot])
    check_ledger(ledger)
    return ledger


class LedgerAgainstLists(RuleBasedStateMachine):
    """The ledger beside a model made of a list of free slots and two dicts."""

    kind = Ledger

    def __init__(self) -> None:
        super().__init__()
        self.ledger = self.kind(5)
        self.free = list(range(5))
        self.keys: dict[int, ChunkKey] = {}
        self.pins: list[int] = []  # held slots, as often as they are held
        self.writing: list[int] = []

    @rule(count=st.integers(0, 6))
    def reserve(self, count):
        slots = reserve(self.ledger, count)
        if count > len(self.free):
            assert slots is None
            return
        taken, self.free = self.free[:count], self.free[count:]
        assert slots == taken
        for slot in taken:
            self.keys.pop(slot, None)
        self.writing += taken

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 4), key=st.sampled_from([A, B, C]))
    def commit(self, pick, key):
        slot = self.writing.pop(pick % len(self.writing))
        self.ledger.commit(slot, key)
        self.keys[slot] = key
        self.pins.append(slot)

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 4))
    def abort(self, pick):
        slot = self.writing.pop(pick % len(self.writing))
        self.ledger.abort(slot)
        self.give_back(slot)

    @rule(key=st.sampled_from([A, B, C]))
    def hold(self, key):
        slot = self.ledger.find(key)
        assert (slot in [s for s, k in self.keys.items() if k == key]) == (key in self.keys.values())
        if slot is not None:
            self.ledger.hold(slot)
            self.pins.append(slot)
            self.free = [s for s in self.free if s != slot]

    @precondition(lambda self: self.pins)
    @rule(count=st.integers(1, 5))
    def release(self, count):
        slots, self.pins = self.pins[:count], self.pins[count:]
        self.ledger.release(slots)
        held = Counter(slots + self.pins)
        for slot in reversed(slots):
            held[slot] -= 1
            if not held[slot]:
                self.give_back(slot)

    @rule(key=st.sampled_from([A, B, C]))
    def drop(self, key):
        slot = self.ledger.find(key)
        if slot is not None:
            self.ledger.drop(slot)
            del self.keys[slot]

    @invariant()
    def agrees(self):
        check_ledger(self.ledger)
        assert free_queue(self.ledger) == self.free
        assert self.ledger.free == len(self.free)
        assert set(self.ledger.keys()) == set(self.keys.values())
        assert [self.ledger.key_of(slot) for slot in range(5)] == [self.keys.get(slot) for slot in range(5)]

    def give_back(self, slot):
        if slot not in self.keys and self.kind is Ledger:
            self.free.insert(0, slot)
        else:
            self.free.append(slot)


class LedgerInDocumentedOrder(LedgerAgainstLists):
    kind = DocumentedLedger


HOW = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None)
TestLedgerAgainstLists = LedgerAgainstLists.TestCase
TestLedgerAgainstLists.settings = HOW
TestLedgerInDocumentedOrder = LedgerInDocumentedOrder.TestCase
TestLedgerInDocumentedOrder.settings = HOW
