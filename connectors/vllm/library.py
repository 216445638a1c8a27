"""The store as the scheduler's side uses it: keys of both domains, pins, slots for workers to fill, documents to learn.

No vLLM in here, and nothing about requests.
"""

import contextlib
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from lmc.config import Settings
from lmc.connectors.vllm.messages import WorkerFacts
from lmc.connectors.vllm.prefixes import Prefixes
from lmc.engine import open_tiers
from lmc.errors import ConfigError, CorruptRecord
from lmc.keys import ChunkKey, Namespace, chunk_bounds, document_keys
from lmc.shapes import GIB, KV
from lmc.storage.loads import Pin, Writing
from lmc.storage.record import RecordMeta
from lmc.storage.slab import Slab
from lmc.storage.stats import Policy
from lmc.storage.store import Store
from lmc.storage.tier import Tier

BELIEVED_SECONDS = 0.05
SALTS = 4096  # tenants whose namespace is remembered


@dataclass(slots=True)
class Filling:
    """Slots that workers are filling."""

    writings: list[Writing]
    done: Callable[[], None]  # the engine's blocks may go
    ranks: int = 0  # that have reported
    failed: bool = False


@dataclass(slots=True)
class Jobs:
    """Numbered work of workers that ends in slots."""

    ranks: int
    store: Store
    under_way: dict[int, Filling] = field(default_factory=dict)
    stored: Counter[str] = field(default_factory=Counter)
    _next: int = 0

    def begin(self, writings: list[Writing], done: Callable[[], None]) -> int:
        """A number for the workers to report."""
        self._next += 1
        self.under_way[self._next] = Filling(writings, done)
        return self._next

    def report(self, done: dict[int, int], failed: set[int]) -> None:
        """So many ranks have ended; the last one makes the chunks visible, or gives the slots back."""
        for job in failed & self.under_way.keys():
            self.under_way[job].failed = True
        for job, ranks in done.items():
            filling = self.under_way.get(job)
            if filling is None:
                continue
            filling.ranks += ranks
            if filling.ranks >= self.ranks:
                del self.under_way[job]
                self._end(filling)

    def fail_all(self) -> None:
        """What is under way will not be kept."""
        for filling in self.under_way.values():
            filling.failed = True

    def drop_all(self) -> None:
        """At the end: nobody will report any more."""
        self.fail_all()
        for filling in self.under_way.values():
            self._end(filling)
        self.under_way.clear()

    def _end(self, filling: Filling) -> None:
        for writing in filling.writings:
            if filling.failed:
                self.store.abort(writing)
            else:
                self.store.commit(writing)
                self.stored["chunks"] += 1
                self.stored["tokens"] += writing.meta.tokens
        filling.done()


def check_chunk_size(settings: Settings, block_size: int) -> None:
    """Raise `ConfigError` if chunks are not made of whole blocks."""
    if settings.chunk_size % block_size:
        near = max(1, round(settings.chunk_size / block_size)) * block_size
        raise ConfigError(
            f"chunk_size = {settings.chunk_size} is not a multiple of the engine's block size of {block_size} tokens; set chunk_size "
            f"(LMC_CHUNK_SIZE) to {near}, or --block-size to a divisor of it"
        )


class Library:
    """Chunks of one model, for all tenants."""

    def __init__(
        self,
        settings: Settings,
        workers: Sequence[WorkerFacts],
        block_size: int,
        hashing: str,
        *,
        tiers: Sequence[Tier] | None = None,
    ) -> None:
        """Make the slab and open the tiers (the settings', if none are given); raise `ConfigError`, `NoMemory` or `TierUnusable`."""
        check_chunk_size(settings, block_size)
        if len({w.fingerprint for w in workers}) > 1:
            raise ConfigError("the workers have loaded different models")
        self.block_size, self.chunk = block_size, settings.chunk_size
        self._first = workers[0]
        ranks = max(w.rank[1] for w in workers) + 1
        per_chunk = self.chunk // block_size
        part = max(size for w in workers for size in w.page_bytes) * per_chunk
        self.parts = sum(len(w.page_bytes) for w in workers)
        slab = Slab.of_size(settings.max_local_cpu_size * GIB, self.parts, part, shared=True)
        self.slab_at, self._part_bytes = slab.at, part
        self.slots = slab.slots
        self.stages = tuple(len(w.page_bytes) for w in sorted(workers, key=lambda w: w.rank) if w.rank[1] == 0)
        self._tiers = open_tiers(settings, self._item_bytes) if tiers is None else list(tiers)
        self._shares = any(tier.shared for tier in self._tiers)
        self._believed: dict[ChunkKey, str | None] = {}
        self._believed_until = 0.0
        self.store = Store(slab, self._tiers, policy=Policy(settings.store_policy))
        self.jobs = Jobs(len(workers), self.store)
        layout = "|".join(f"{w.rank}{w.page_bytes}{w.layout}" for w in workers)
        self._ranks, self._epoch = ranks, ""
        self._layout = f"{layout}|block {block_size}|{hashing}"
        self.prefixes = Prefixes(self._pages_namespace(), per_chunk)
        self._documents: OrderedDict[str, bytes] = OrderedDict()
        self._recall()

    def document_namespace(self, salt: str) -> bytes:
        """Of a tenant's documents."""
        if salt not in self._documents:
            self._documents[salt] = self._namespace("tokens", self._first.rope, salt)
            while len(self._documents) > SALTS:
                self._documents.popitem(last=False)
        return self._documents[salt]

    def document_keys(self, namespace: bytes, tokens: Sequence[int]) -> list[ChunkKey]:
        """Of a document's chunks."""
        return document_keys(namespace, tokens, self.chunk)

    def begin_pages(self, hashes: Sequence[bytes]) -> Writing | None:
        """A slot for the chunk of these blocks; None if there is one that serves them, or no room."""
        key = self.prefixes.key(hashes[-1])
        # A tier that others share is not asked: that would be a round trip in the step for each chunk. It keeps one of two records.
        if any(self.store.lookup([key, *self.prefixes.holders(hashes)], shared=False)):
            return None
        tokens, label = len(hashes) * self.block_size, self.prefixes.label(hashes)
        size = self._part_bytes // self.prefixes.blocks * len(hashes)  # what lay in the slot before goes nowhere
        writing = self.store.begin(self._meta(key, self._pages, tokens, 0, size, label))
        if writing is not None:
            self.prefixes.remember(key, hashes)
        return writing

    def begin_document(self, namespace: bytes, tokens: Sequence[int]) -> list[Writing | None] | None:
        """Slots for a document's chunks, None for those that are stored; None altogether if nothing is to do or nothing fits."""
        keys = self.document_keys(namespace, tokens)
        places = self.store.lookup(keys, shared=False)
        if all(places) or len(keys) > self.slots:
            return None
        writings: list[Writing | None] = []
        for key, place, (start, stop) in zip(keys, places, chunk_bounds(len(tokens), self.chunk), strict=True):
            size = (stop - start) * KV * self._first.kv_heads * self._first.head_dim * self._item_bytes
            writing = None if place else self.store.begin(self._meta(key, namespace, stop - start, start, size, ""))
            if place is None and writing is None:
                for begun in writings:
                    if begun is not None:
                        self.store.abort(begun)
                return None
            writings.append(writing)
        return writings

    def pin(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Pin]:
        """Pins of those that are there; loads from tiers start."""
        unique = list(dict.fromkeys(keys))
        return {pin.key: pin for pin in self.store.acquire(unique, self.lookup(unique)) if pin is not None}

    def lookup(self, keys: Sequence[ChunkKey]) -> list[str | None]:
        """As the store's, but what tiers said that others share is believed for a moment: a plan asks several times for the same."""
        found, now = self.store.lookup(keys, shared=False), time.monotonic()
        if all(found) or not self._shares:
            return found
        if now > self._believed_until:
            self._believed, self._believed_until = {}, now + BELIEVED_SECONDS
        new = [key for key, place in zip(keys, found, strict=True) if place is None and key not in self._believed]
        self._believed |= dict(zip(new, self.store.lookup(new), strict=True))
        return [place or self._believed[key] for key, place in zip(keys, found, strict=True)]

    def let_go(self, pins: Sequence[Pin]) -> None:
        """Give pins back; nobody here reads the slots, and workers notice what is taken from under them."""
        if pins:
            self.store.release(list(pins), wait=False)

    def forget_all(self, *, wait: bool = True) -> None:
        """Remove every chunk, also from under those who read it; what other processes share stays with them."""
        self.jobs.fail_all()  # chunks under way would become visible afterwards
        known = self.store.keys()
        for key in known:
            self.store.forget(key, wait=wait, shared=False)

    def begin_anew(self) -> None:
        """From now on other keys: new weights may come from the same files, and nothing of theirs may be found by a later process."""
        self._epoch = os.urandom(16).hex()
        self._documents.clear()
        self.prefixes = Prefixes(self._pages_namespace(), self.prefixes.blocks)

    def close(self) -> None:
        """Write down what is not on a tier yet, and close everything."""
        self.jobs.drop_all()
        self.store.close()

    @property
    def _item_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self._first.dtype.removeprefix("torch."))
        return dtype.itemsize

    def _pages_namespace(self) -> bytes:
        self._pages = self._namespace("pages", self._layout, "")
        return self._pages

    def _namespace(self, kind: str, layout: str, salt: str) -> bytes:
        first, ranks = self._first, self._ranks
        return Namespace(
            kind=kind,
            model=first.fingerprint + self._epoch,
            dtype=first.dtype,
            layers=self.parts // ranks,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            rope=layout,
            chunk_size=self.chunk,
            tensor_parallel=ranks,
            cache_salt=salt,
        ).digest()

    def _meta(
        self, key: ChunkKey, namespace: bytes, tokens: int, first: int, part_bytes: int, label: str
    ) -> RecordMeta:
        return RecordMeta(
            key=key,
            namespace=namespace,
            tokens=tokens,
            first=first,
            parts=self.parts,
            part_bytes=part_bytes,
            label=label,
        )

    def _recall(self) -> None:
        """Bring the index of blocks back from the records of earlier processes. Reads one header each.

        Not from tiers that other processes fill as well: there whole chunks are found by their keys.
        """
        for tier in (tier for tier in self._tiers if not tier.shared):
            for entry in tier.entries():
                with contextlib.suppress(OSError, CorruptRecord, ValueError):  # the last: a label that is none
                    reader = tier.open(entry.key)
                    if reader is not None:
                        with contextlib.closing(reader):
                            if reader.meta.namespace == self._pages and reader.meta.label:
                                self.prefixes.recall(entry.key, reader.meta.label)
