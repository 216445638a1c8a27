"""Proves the invariants of the store's bookkeeping, from the outside."""

from collections import Counter

from lmc.storage.eviction import Standing
from lmc.storage.ledger import Ledger, Slot
from lmc.storage.store import Store
from lmc.storage.tiers.disk import DiskTier


def check_store(store: Store) -> None:
    """Every ledger of a store is right."""
    with store._state._changed:
        for level in store._state.levels:
            check_ledger(level.ledger)


def check_ledger(ledger: Ledger) -> None:
    """Each slot is exactly once in {free, held, being written}; links, keys and counts agree."""
    queue = [*free_queue(ledger), *ledger._ready, *ledger._preparing, *ledger._unused, *ledger._unsafe]
    free = set(queue)
    assert len(queue) == len(free) == ledger.free, "free queue and its count disagree"
    for slot in map(Slot, range(ledger.slots)):
        assert (ledger._holders[slot] == 0) == (slot in free), f"slot {slot} is both free and held, or neither"
        assert slot not in ledger._writing or (ledger._holders[slot] == 1 and ledger._keys[slot] is None)
    held = {slot for slots in ledger._slots_of.values() for slot in slots}
    assert held == {s for s in range(ledger.slots) if ledger._keys[s] is not None}, "keys and slots disagree"
    assert all(ledger._keys[s] == key for key, slots in ledger._slots_of.items() for s in slots)

    keyed = Counter(ledger._standing[slot] for slot in held)
    for standing in (Standing.DOCUMENT, Standing.PINNED):
        assert ledger._queue._taken[standing] == keyed[standing], "what documents take is counted wrongly"
    assert all(ledger._standing[slot] is Standing.OTHER for slot in range(ledger.slots) if slot not in held)


def check_disk(tier: DiskTier) -> None:
    """The index and the order of eviction agree."""
    with tier._lock:
        assert set(tier._order) == set(tier._index)
        assert sum(tier._index.values()) <= tier.bytes
        for standing in (Standing.DOCUMENT, Standing.PINNED):
            there = sum(size for key, size in tier._index.items() if tier._standing.get(key) is standing)
            assert tier._order._taken[standing] == there, "what documents take is counted wrongly"


def free_queue(ledger: Ledger) -> list[Slot]:
    """Free slots from the head: the order in which they will be taken."""
    return list(ledger._queue)


def reserve(ledger: Ledger, count: int) -> list[Slot] | None:
    """Take `count` slots, or none if fewer are free."""
    return [ledger.reserve() for _ in range(count)] if count <= ledger.free else None
