"""The supply of slots: a store's host memory grows, shrinks, and takes over chunks from an earlier process.

Each method of `SlotSupply` except `furnish` is one step of the store's state, under its lock, as in `state.py`.
"""

from collections.abc import Callable, Iterable, Sequence

from lmc.storage.fairness import Owner
from lmc.storage.ledger import Slot
from lmc.storage.level import Backing, Todo
from lmc.storage.state import StoreState
from lmc.storage.tiers.record import RecordMeta


class SlotSupply:
    """Adds and removes slots of one store's host memory."""

    def __init__(self, state: StoreState, backing: Backing | None) -> None:
        self._state, self._host, self._backing = state, state.host, backing

    @property
    def ready(self) -> int:
        """The number of slots that have memory and no chunk yet."""
        return self._host.ledger.ready

    def furnish(self, bare: Sequence[Slot]) -> set[Slot]:
        """Allocate the memory of bare slots. Returns the slots for which the system lacks memory; they stay bare.

        The lock is not held meanwhile, because the allocation takes milliseconds.
        """
        if not bare:
            return set()
        assert self._backing is not None, "without a backing, all slots have memory"
        lacking = self._backing.furnish(bare)
        with self._state.step():
            self._host.ledger.furnished(slot for slot in bare if slot not in lacking)
        return lacking

    def evict(self, covers: Callable[[Owner], bool], size: int) -> tuple[list[Slot], int]:
        """Evict the least recently used chunks of the owners that `covers` accepts; see `Level.evict`."""
        with self._state.step():
            fair = self._host.fair
            owners = [owner for owner in fair.owners() if covers(owner)] if fair is not None else []
            return self._host.evict(owners, size)

    def retire(self) -> Slot | None:
        """Reserve a slot whose memory can be given back: a ready slot, or the next slot to evict."""
        with self._state.step():
            return None if self._state.closed else self._host.reserve(Todo(), used=True)

    def retired(self, slots: Iterable[Slot], *, unused: bool) -> None:
        """End the retirement of slots: they become free, or `unused` if their memory was given back."""
        with self._state.step():
            for slot in slots:
                (self._host.ledger.lay_aside if unused else self._host.ledger.abort)(slot)

    def prepare(self, ready: int) -> Slot | None:
        """Choose an unused slot to take memory for. Returns None if none is left, or if `ready` slots are ready."""
        with self._state.step():
            enough = self._state.closed or self._host.ledger.ready >= ready
            return None if enough else self._host.ledger.prepare()

    def prepared(self, slot: Slot, *, ready: bool) -> None:
        """End the preparing of a slot: it becomes `ready`, or unused again if its memory was not taken."""
        with self._state.step():
            self._host.ledger.prepared(slot, ready=ready)

    def by_last_use(self) -> list[Slot]:
        """Return the slots whose chunks may be evicted, least recently used first."""
        with self._state.step():
            return self._host.ledger.by_last_use()

    def adopt(self, found: Iterable[tuple[Slot, RecordMeta]]) -> None:
        """Make chunks visible that were in slots before this process started, least recently used first."""
        with self._state.step():
            for slot, meta in found:
                self._host.adopt(slot, meta)

    def make_safe(self) -> None:
        """Allow the use of the slots that were unsafe."""
        with self._state.step():
            self._host.ledger.make_safe()
