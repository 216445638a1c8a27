"""The supply of slots: how a store's host memory grows and shrinks, and takes over what was in it before.

Each method of `SlotSupply` but `furnish` is one step of the store's state, under its lock, like those in `state.py`.
"""

from collections.abc import Callable, Iterable, Sequence

from lmc.storage.fairness import Owner
from lmc.storage.ledger import Slot
from lmc.storage.level import Backing, Todo
from lmc.storage.state import StoreState
from lmc.storage.tiers.record import RecordMeta


class SlotSupply:
    """The slots of one store's host memory."""

    def __init__(self, state: StoreState, backing: Backing | None) -> None:
        self._state, self._host, self._backing = state, state.host, backing

    @property
    def ready(self) -> int:
        """How many slots have memory, and no chunk yet."""
        return self._host.ledger.ready

    def furnish(self, bare: Sequence[Slot]) -> set[Slot]:
        """Take the memory of bare slots; return those for which the system has none, and which stay bare.

        The lock is not held meanwhile, because that takes milliseconds.
        """
        if not bare:
            return set()
        assert self._backing is not None, "without a backing, all slots have memory"
        lacking = self._backing.furnish(bare)
        with self._state.step():
            self._host.ledger.furnished(slot for slot in bare if slot not in lacking)
        return lacking

    def evict(self, covers: Callable[[Owner], bool], size: int) -> tuple[list[Slot], int]:
        """Reserve the slots of chunks of some owners, which were used longest ago; see `Level.evict`."""
        with self._state.step():
            fair = self._host.fair
            owners = [owner for owner in fair.owners() if covers(owner)] if fair is not None else []
            return self._host.evict(owners, size)

    def retire(self) -> Slot | None:
        """Reserve a slot whose memory can be given back: a ready one, or the one that is evicted next."""
        with self._state.step():
            return None if self._state.closed else self._host.reserve(Todo(), used=True)

    def retired(self, slots: Iterable[Slot], *, unused: bool) -> None:
        """Let slots that were retired be used again, or be `unused` because their memory was given back."""
        with self._state.step():
            for slot in slots:
                (self._host.ledger.lay_aside if unused else self._host.ledger.abort)(slot)

    def prepare(self, ready: int) -> Slot | None:
        """Choose an unused slot to take memory for it; None if there is none, or if `ready` slots are ready."""
        with self._state.step():
            enough = self._state.closed or self._host.ledger.ready >= ready
            return None if enough else self._host.ledger.prepare()

    def prepared(self, slot: Slot, *, ready: bool) -> None:
        """Let a slot be `ready` for which memory was taken, or unused again."""
        with self._state.step():
            self._host.ledger.prepared(slot, ready=ready)

    def by_last_use(self) -> list[Slot]:
        """Return the slots that may be evicted, those whose chunks were used longest ago first."""
        with self._state.step():
            return self._host.ledger.by_last_use()

    def adopt(self, found: Iterable[tuple[Slot, RecordMeta]]) -> None:
        """Let chunks be found that were in slots before this process began, those used longest ago first."""
        with self._state.step():
            for slot, meta in found:
                self._host.adopt(slot, meta)

    def make_safe(self) -> None:
        """Let slots be used that were unsafe."""
        with self._state.step():
            self._host.ledger.make_safe()
