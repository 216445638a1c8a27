"""Eviction: which entry of a place goes next. Memory and the disk tier use this.

The least recently used entry goes first, with a share reserved for documents. While documents do not exceed their
share, other entries are evicted before them. A pinned entry counts as a document. It is not evicted while pinned
entries do not exceed the share. In memory over a disk, pinned entries are evicted if no other entry is left.

In a cache server each entry has an owner: a model and a tenant. Models share a place by their weights, and the tenants
of a model share its part by theirs. The oldest entry stays if its owner does not exceed its fair share. The oldest
entry of an owner that exceeds its share is evicted instead. An owner that has stored or used nothing for a long time
has no share, so that no space is kept for a tenant that does not return.
"""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from operator import itemgetter
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from lmc.keys import RecordKind
from lmc.queue_dict import QueueDict

T = TypeVar("T", bound=Hashable)
Owner: TypeAlias = tuple[str, str]  # the name of a model, and the digest of a tenant's cache salt

SHARES_EVENTS = 256  # The fair shares are computed again after this number of uses.
MAX_GREEDY_OWNERS = 256  # the maximum number of owners to search for one that exceeds its share
# An owner is idle if it uses nothing during SHARES_EVENTS uses, plus this number of uses per entry of the place.
IDLE_USES_PER_ENTRY = 4


class EvictionClass(IntEnum):  # Hashing a plain `Enum` took a tenth of the time of a store's bookkeeping.
    """How an entry is protected from eviction."""

    OTHER = 0
    DOCUMENT = 1
    PINNED = 2

    @classmethod
    def of(cls, kind: RecordKind, *, pinned: bool) -> "EvictionClass":
        """Return the class of a record of this kind."""
        return cls.PINNED if pinned else cls.DOCUMENT if kind is RecordKind.DOCUMENT else cls.OTHER


Queues: TypeAlias = dict[EvictionClass, QueueDict[T, int]]  # entry -> number of its last use, oldest first


class Facts(NamedTuple):
    """What the order knows of an entry. Equal facts are one object, because a disk has millions of few kinds."""

    eviction_class: EvictionClass
    size: float
    owner: Owner | None = None

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, eviction_class: EvictionClass, size: float, owner: Owner | None = None) -> "Facts":
        """Return the object with these values."""
        return cls(eviction_class, size, owner)


class EvictionOrder(Generic[T]):
    """The entries of a place, in use or evictable. All operations are O(1), except an occasional fair choice."""

    def __init__(self, share: float = 0.0, *, pins_yield: bool = False, fair: "FairShares | None" = None) -> None:
        """Create an empty order.

        `share` is the amount that belongs to documents, in the unit of the entries' sizes: slots of memory, or bytes
        of a disk. With `pins_yield`, pinned entries are evicted if no other entry is left, because a tier also has
        them. With `fair`, each owner has a fair share.
        """
        self._share, self._pins_yield, self._fair = share, pins_yield, fair
        self._entries: dict[T, Facts] = {}
        self._taken = [0.0] * len(EvictionClass)  # by entries in use and evictable
        self._queues: Queues[T] = _empty_queues()  # of the evictable entries
        self._owned: defaultdict[Owner, Queues[T]] = defaultdict(_empty_queues)
        self._clock = itertools.count(1)

    def first(self) -> T | None:
        """Return the next entry to evict, or None if no entry may be evicted."""
        pinned = self._taken[EvictionClass.PINNED]
        evictable = [EvictionClass.OTHER]
        if self._taken[EvictionClass.DOCUMENT] + pinned > self._share:
            evictable.append(EvictionClass.DOCUMENT)
        if pinned > self._share:
            evictable.append(EvictionClass.PINNED)
        oldest = _oldest(self._queues, evictable)
        if oldest is None:  # Only documents and pinned entries within the share are left, if any.
            oldest = _oldest(self._queues, [EvictionClass.DOCUMENT])
            return _oldest(self._queues, [EvictionClass.PINNED]) if oldest is None and self._pins_yield else oldest
        _, _, owner = self._entries[oldest]
        if self._fair is None or owner is None or self._fair.exceeds(owner):
            return oldest
        greedy = (owner for owner in self._fair.greediest() if owner in self._owned)
        entries = (_oldest(self._owned[owner], evictable) for owner in greedy)
        return next((entry for entry in entries if entry is not None), oldest)

    def insert(self, entry: T, eviction_class: EvictionClass, size: float = 1, owner: Owner | None = None) -> None:
        """Add an entry that is in use. It becomes evictable with `release`."""
        self._entries[entry] = Facts.of(eviction_class, size, owner)
        self._taken[eviction_class] += size
        if self._fair is not None and owner is not None:
            self._fair.count(owner, size)

    def fill(self, entries: Sequence[T], facts: Facts) -> None:
        """Add evictable entries without owners that have the same facts, least recently used first."""
        self._entries.update(dict.fromkeys(entries, facts))
        self._taken[facts.eviction_class] += facts.size * len(entries)
        self._queues[facts.eviction_class].update(dict.fromkeys(entries, next(self._clock)))

    def remove(self, entry: T) -> None:
        """Remove an entry, in use or evictable."""
        eviction_class, size, owner = self._entries[entry]
        if entry in self._queues[eviction_class]:
            self.hold(entry)
        del self._entries[entry]
        self._taken[eviction_class] -= size
        if self._fair is not None and owner is not None:
            self._fair.count(owner, -size)

    def hold(self, entry: T) -> None:
        """Begin a use of an evictable entry, which is not evicted meanwhile."""
        eviction_class, _, owner = self._entries[entry]
        del self._queues[eviction_class][entry]
        if owner is not None:
            del self._owned[owner][eviction_class][entry]
            if not any(self._owned[owner].values()):
                del self._owned[owner]

    def release(self, entry: T) -> None:
        """End a use of an entry. It becomes evictable, as the most recently used one."""
        eviction_class, _, owner = self._entries[entry]
        now = next(self._clock)
        self._queues[eviction_class][entry] = now
        if owner is not None:
            self._owned[owner][eviction_class][entry] = now
            if self._fair is not None:
                self._fair.use(owner)

    def touch(self, entry: T) -> None:
        """Record a use of an evictable entry. For an entry in use, `release` will record it."""
        if entry in self._queues[self._entries[entry][0]]:
            self.hold(entry)
            self.release(entry)

    def reclassify(self, entry: T, eviction_class: EvictionClass) -> None:
        """Change the class of an entry.

        An evictable entry keeps the time of its last use, and becomes the last of its class. So several entries must
        be reclassified in the order of their last use, or touched as well.
        """
        before, size, owner = self._entries[entry]
        if before is eviction_class:
            return
        self._entries[entry] = Facts.of(eviction_class, size, owner)
        self._taken[before] -= size
        self._taken[eviction_class] += size
        owned = self._owned.get(owner) if owner is not None else None
        for queues in filter(None, (self._queues, owned)):
            if entry in queues[before]:
                queues[eviction_class][entry] = queues[before].pop(entry)

    @property
    def entries(self) -> Mapping[T, Facts]:
        """All entries, in use or evictable."""
        return self._entries

    def __iter__(self) -> Iterator[T]:
        """Return all evictable entries, least recently used first, regardless of their class."""
        aged = itertools.chain.from_iterable(queue.items() for queue in self._queues.values())
        return iter([entry for entry, _ in sorted(aged, key=lambda item: item[1])])

    def owned_by(self, covers: Callable[[Owner], bool]) -> Iterator[T]:
        """Yield the evictable entries of the owners that `covers` accepts, except pinned ones, oldest first."""
        owned = [queues for owner, queues in self._owned.items() if covers(owner)]
        classes = EvictionClass.OTHER, EvictionClass.DOCUMENT
        queues = [queues[eviction_class].items() for queues in owned for eviction_class in classes]
        return (entry for entry, _ in heapq.merge(*queues, key=lambda item: item[1]))

    def faults(self, in_use: Callable[[T], bool]) -> Iterator[str]:
        """Yield a sentence for each inconsistency. `in_use` returns whether an entry is in use."""
        taken, taken_by_owners = [0.0] * len(EvictionClass), Counter[Owner]()
        for entry, (eviction_class, size, owner) in self._entries.items():
            taken[eviction_class] += size
            expected = [] if in_use(entry) else [eviction_class]
            if owner is not None:
                taken_by_owners[owner] += size  # type: ignore[assignment]
                if _classes_with(entry, self._owned.get(owner, {})) != expected:
                    yield f"{_name(entry)} is not where it belongs in the queues of its owner"
            if _classes_with(entry, self._queues) != expected:
                yield f"{_name(entry)} is not where it belongs in the queues of evictable entries"
        for entry in itertools.chain.from_iterable(self._queues.values()):
            if entry not in self._entries:
                yield f"{_name(entry)} is evictable, but not an entry"
        if taken != self._taken:
            yield f"other entries, documents and pinned ones take {taken}, counted as {self._taken}"
        if self._fair is not None and taken_by_owners != self._fair.taken:
            yield f"entries of owners take {dict(taken_by_owners)}, counted as {dict(self._fair.taken)}"


class Weights(Protocol):
    """The weights of models and of tenants. A weight that is not configured is 1."""

    def of_model(self, model: str) -> float:
        """Return the weight of a model among models."""

    def of_tenant(self, model: str, tenant: str) -> float:
        """Return the weight of a tenant among the tenants of a model."""


class FairShares:
    """What each owner takes of one place, and its fair share. Guarded by the lock of the place."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.taken: Counter[Owner] = Counter()  # in the unit of the place: slots, or bytes
        self._entries = self._events = 0
        self._used: dict[Owner, int] = {}  # the number of the event of the last use
        self._fair: Mapping[Owner, float] = {}
        self._greedy: list[Owner] = []  # owners, highest multiple of their share first
        self._due = 0  # the event at which shares are computed again

    def count(self, owner: Owner, change: float) -> None:
        """Count a new entry of an owner with the size `change`, or remove an entry with a negative `change`."""
        self._entries += 1 if change > 0 else -1
        self.taken[owner] += change  # type: ignore[assignment]
        if self.taken[owner] <= 0:
            del self.taken[owner]

    def use(self, owner: Owner) -> None:
        """Record a use by an owner."""
        self._events += 1
        self._used[owner] = self._events

    def exceeds(self, owner: Owner) -> bool:
        """Return whether an owner exceeds its fair share."""
        self._compute()
        return self.taken[owner] > self._fair.get(owner, 0.0)

    def greediest(self) -> Iterator[Owner]:
        """Yield the owners that exceed their fair shares, highest multiple of the share first."""
        self._compute()
        return (owner for owner in self._greedy if self.exceeds(owner))

    def change(self) -> None:
        """Compute the shares again when they are next needed, because weights have changed."""
        self._due = 0

    def _compute(self) -> None:
        if self._events < self._due:
            return
        self._due = self._events + SHARES_EVENTS
        oldest = self._events - IDLE_USES_PER_ENTRY * self._entries - SHARES_EVENTS
        self._used = {owner: at for owner, at in self._used.items() if at >= oldest}
        tenants: defaultdict[str, dict[Owner, float]] = defaultdict(dict)
        for model, tenant in self._used:
            tenants[model][model, tenant] = self._weights.of_tenant(model, tenant)
        models = {model: self._weights.of_model(model) for model in tenants}
        whole = sum(self.taken.values()) / (sum(models.values()) or 1.0)
        self._fair = {
            owner: whole * models[model] * weight / sum(weights.values())
            for model, weights in tenants.items()
            for owner, weight in weights.items()
        }
        times = {owner: taken / (self._fair.get(owner) or 1e-9) for owner, taken in self.taken.items()}
        self._greedy = heapq.nlargest(MAX_GREEDY_OWNERS, times, key=times.__getitem__)


def _empty_queues() -> dict[EvictionClass, QueueDict[T, int]]:
    return {eviction_class: QueueDict() for eviction_class in EvictionClass}


def _classes_with(entry: T, queues: Mapping[EvictionClass, QueueDict[T, int]]) -> list[EvictionClass]:
    return [eviction_class for eviction_class, queue in queues.items() if entry in queue]


def _name(entry: object) -> str:
    return f"record {entry.hex()}" if isinstance(entry, bytes) else f"slot {entry}"


def _oldest(queues: Queues[T], classes: Sequence[EvictionClass]) -> T | None:
    if len(classes) == 1:  # the common case: documents take less than their share
        return queues[classes[0]].first()
    heads = [
        (queue[first], first) for queue in map(queues.__getitem__, classes) if (first := queue.first()) is not None
    ]
    return min(heads, key=itemgetter(0))[1] if heads else None
