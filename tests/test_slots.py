"""The slots of a memory: worked examples of vLLM's block pool, and a state machine against plain lists."""

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from storage_fakes import meta_of

from lmc.keys import ChunkKey, exact_keys
from lmc.storage.change_log import ChangeLog
from lmc.storage.memory.slab import Slab, Slot
from lmc.storage.slots import SlotPool

DATA = json.loads((Path(__file__).parent / "data" / "block_pool.json").read_text())
SIZE = DATA["block_size"]
A, B, C = (ChunkKey(bytes([i]) * 32) for i in range(3))


def pool_of(slots: int) -> SlotPool:
    return SlotPool("host", Slab(slots, 1, 1), ChangeLog())


def commit(pool: SlotPool, slot: Slot, key: ChunkKey) -> None:
    pool.commit(slot, meta_of(key, 1, 1))


def key_in(pool: SlotPool, slot: int) -> ChunkKey | None:
    meta = pool.metas[slot]
    return meta and meta.key


def free_slots(pool: SlotPool) -> list[Slot]:
    """Slots that nothing holds, in the order in which they will be allocated."""
    return [*reversed(pool._empty), *pool.by_last_use()]


def allocate(pool: SlotPool, count: int) -> list[Slot] | None:
    """Allocate `count` slots, or none if fewer are free."""
    return [pool.allocate() for _ in range(count)] if count <= pool.slots - pool.held else None


@contextmanager
def pinned(pool: SlotPool, *keys: ChunkKey):
    """Slots of keys, held inside the block."""
    slots = [slot for slot in map(pool.find, keys) if slot is not None]
    for slot in slots:
        pool.hold(slot)
    try:
        yield slots
    finally:
        pool.free(slots)


class BlockPool:
    """The least that serves requests from a pool: a block table each, keys for full blocks."""

    def __init__(self) -> None:
        self.pool = pool_of(DATA["num_blocks"])
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[Slot]] = {}

    def start(self, request: str, tokens: list[str | int]) -> tuple[list[Slot], list[Slot]]:
        """Blocks that were hit, and new ones. At least one token is left to compute."""
        numbers = list(map(number, tokens))
        hit = []
        for key in exact_keys(b"", numbers, SIZE)[: (len(numbers) - 1) // SIZE]:
            slot = self.pool.find(key)
            if slot is None:
                break
            hit.append(slot)
        for slot in hit:
            self.pool.hold(slot)
        self.tokens[request], self.tables[request] = numbers, list(hit)
        return hit, self._grow(request, len(hit))

    def append(self, request: str, tokens: list[str | int]) -> None:
        full = len(self.tokens[request]) // SIZE
        self.tokens[request] += map(number, tokens)
        self._grow(request, full)

    def finish(self, request: str) -> None:
        self.pool.free(self.tables.pop(request))

    def _grow(self, request: str, committed: int) -> list[Slot]:
        """Blocks for all tokens; the full ones behind the first `committed` get their keys."""
        tokens, table = self.tokens[request], self.tables[request]
        new = allocate(self.pool, -(-len(tokens) // SIZE) - len(table))
        table += new
        for block in range(committed, len(tokens) // SIZE):
            commit(self.pool, table[block], exact_keys(b"", tokens, SIZE)[block])
        assert list(self.pool.faults()) == []
        return new

    @property
    def cached(self) -> list[int]:
        return [slot for slot in range(self.pool.slots) if key_in(self.pool, slot) is not None]


def number(token: str | int) -> int:
    return ord(token) + 1000 if isinstance(token, str) else token


def test_the_published_steps_end_in_the_published_states():
    pool, proved = BlockPool(), 0
    for step in DATA["steps"]:
        hit, new = [], []
        match step["op"]:
            case "start":
                hit, new = pool.start(step["request"], step["tokens"])
            case "append":
                pool.append(step["request"], step["tokens"])
            case "finish":
                pool.finish(step["request"])
        assert list(pool.pool.faults()) == []
        state = {"hit": hit, "new": new, "cached": pool.cached, "free": free_slots(pool.pool)}
        state["table"] = pool.tables.get(step["request"])
        for what, value in DATA["expect"].get(str(step["time"]), {}).items():
            assert state[what] == value, (step["time"], what)
            proved += 1
    assert proved == sum(map(len, DATA["expect"].values()))


def test_a_request_keeps_its_own_duplicate_of_a_block():
    pool, example = BlockPool(), DATA["duplicates"]
    first, second = example["first"], example["second"]
    pool.start("first", first["prompt"])
    pool.append("first", first["generated"])
    assert (pool.tables["first"], pool.cached) == (first["table"], first["cached"])
    hit, _ = pool.start("second", second["prompt"])
    pool.append("second", second["generated"])
    assert (hit, pool.tables["second"], pool.cached) == (second["hit"], second["table"], second["cached"])


def test_the_same_tokens_at_other_positions_are_no_hit():
    pool, example = BlockPool(), DATA["position_matters"]
    pool.start("first", example["first"])
    hit, _ = pool.start("second", example["second"])
    assert hit == example["hit"]


def test_a_request_returns_its_blocks_in_reverse():
    pool, example = pool_of(10), DATA["reverse_free"]
    for slot in allocate(pool, 10):
        commit(pool, slot, ChunkKey(bytes([slot]) * 32))
    pool.free(example["request_blocks"])
    assert free_slots(pool) == example["free_tail"]


def test_a_pinned_slot_is_never_evicted():
    pool = filled(A, B, C)
    with pinned(pool, B):
        assert allocate(pool, 3) is None
        assert len(allocate(pool, 2)) == 2
        assert (pool.find(A), pool.find(B), pool.find(C)) == (None, 1, None)
        assert allocate(pool, 1) is None
    assert allocate(pool, 1) == [1]
    assert pool.find(B) is None


def test_a_slot_that_is_held_twice_stays_until_both_have_left():
    pool = filled(A)
    with pinned(pool, A):
        with pinned(pool, A):
            assert pool.holders == 2
        assert pool.slots - pool.held == 0
    assert pool.slots - pool.held == 1


def test_reserving_takes_all_or_nothing():
    pool = filled(A, B)
    before = free_slots(pool)
    assert allocate(pool, 3) is None
    assert (free_slots(pool), pool.find(A), pool.find(B), pool.evictions) == (before, 0, 1, 0)


def test_a_released_chain_loses_its_tail_first():
    pool = pool_of(3)
    chain = allocate(pool, 3)
    for slot, key in zip(chain, (A, B, C), strict=True):
        commit(pool, slot, key)
    pool.free(chain)
    allocate(pool, 1)
    assert [pool.find(key) for key in (A, B, C)] == [0, 1, None]
    allocate(pool, 1)
    assert [pool.find(key) for key in (A, B, C)] == [0, None, None]


def test_a_reserved_slot_is_no_hit_and_an_aborted_one_is_taken_next():
    pool = pool_of(3)
    slots = allocate(pool, 2)
    pool.free([slots[0]])
    assert list(pool.keys()) == []
    assert free_slots(pool) == [0, 2]
    assert list(pool.faults()) == []


def test_a_pin_that_is_left_by_an_exception_is_given_back():
    pool = filled(A)
    with pytest.raises(KeyError), pinned(pool, A, B):
        raise KeyError
    assert pool.slots - pool.held == 1


def filled(*keys: ChunkKey) -> SlotPool:
    pool = pool_of(len(keys))
    for key in keys:
        slot = pool.allocate()
        commit(pool, slot, key)
        pool.free([slot])
    assert list(pool.faults()) == []
    return pool


def out_of_the_queue(pool: SlotPool) -> None:
    pool._order.hold(1)


FAULTS = {
    "slot 3 is empty and unassigned": lambda pool: pool.unassign(3),
    "slot 1 is in no state": out_of_the_queue,
    "slots are unassigned twice": lambda pool: [pool.unassign(3) for _ in range(2)],
    "but lookups do not find it": lambda pool: pool.metas.__setitem__(3, pool.metas[0]),
    "in slot 1, which has another one or none": lambda pool: pool.metas.__setitem__(1, None),
    "slot 1 is not where it belongs in the queues": out_of_the_queue,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_bookkeeping_is_reported(fault):
    pool = pool_of(4)
    for key in (A, B, C):
        slot = pool.allocate()
        commit(pool, slot, key)
        pool.free([slot])
    pool.hold(0)
    assert list(pool.faults()) == []
    FAULTS[fault](pool)
    assert any(fault in found for found in pool.faults()), list(pool.faults())


def test_a_slot_whose_chunk_was_dropped_is_allocated_before_another_chunk_is_evicted():
    pool = filled(A, B, C)
    pool.drop(B)
    assert pool.allocate() == 1
    assert pool.evictions == 0


class PoolAgainstLists(RuleBasedStateMachine):
    """The pool beside a model made of a list of free slots and two dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(5)
        self.free = list(range(5))
        self.keys: dict[int, ChunkKey] = {}
        self.pins: list[int] = []  # held slots, as often as they are held
        self.writing: list[int] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        slots = allocate(self.pool, count)
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
        commit(self.pool, slot, key)
        self.keys[slot] = key
        self.pins.append(slot)

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 4))
    def abort(self, pick):
        slot = self.writing.pop(pick % len(self.writing))
        self.pool.free([slot])
        self.give_back(slot)

    @rule(key=st.sampled_from([A, B, C]))
    def hold(self, key):
        slot = self.pool.find(key)
        assert (slot in [s for s, k in self.keys.items() if k == key]) == (key in self.keys.values())
        if slot is not None:
            self.pool.hold(slot)
            self.pins.append(slot)
            self.free = [s for s in self.free if s != slot]

    @precondition(lambda self: self.pins)
    @rule(count=st.integers(1, 5))
    def release(self, count):
        slots, self.pins = self.pins[:count], self.pins[count:]
        self.pool.free(slots)
        held = Counter(slots + self.pins)
        for slot in reversed(slots):
            held[slot] -= 1
            if not held[slot]:
                self.give_back(slot)

    @rule(key=st.sampled_from([A, B, C]))
    def drop(self, key):
        self.pool.drop(key)
        for slot in [slot for slot, there in self.keys.items() if there == key]:
            del self.keys[slot]
            if slot in self.free:
                self.free.remove(slot)
                self.free.insert(0, slot)

    @invariant()
    def agrees(self):
        assert list(self.pool.faults()) == []
        assert free_slots(self.pool) == self.free
        assert self.pool.slots - self.pool.held == len(self.free)
        assert set(self.pool.keys()) == set(self.keys.values())
        assert [key_in(self.pool, slot) for slot in range(5)] == [self.keys.get(slot) for slot in range(5)]

    def give_back(self, slot):
        if slot not in self.keys:
            self.free.insert(0, slot)
        else:
            self.free.append(slot)


TestPoolAgainstLists = PoolAgainstLists.TestCase
TestPoolAgainstLists.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
