"""The cache engine: joins tokens to keys to storage. What a connector asks for KV.

find_prefix, find_document   a plan: which stored chunks serve which tokens (a pure question; nothing is held)
layers                       the plan's KV, layer by layer, while the next layers are being fetched
store                        KV of a prompt's prefix, or of a document computed alone
"""

from collections import Counter, OrderedDict
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from itertools import dropwhile

import torch

from lmc.config import Settings
from lmc.errors import ChunkLost, ConfigError
from lmc.keys import ChunkKey, Namespace, chunk_bounds, document_keys, exact_keys, exact_root, next_key
from lmc.remote import parse_remote
from lmc.shapes import GIB, KVShape
from lmc.storage.codec import Coded
from lmc.storage.disk import DiskTier
from lmc.storage.record import RecordMeta
from lmc.storage.slab import Slab
from lmc.storage.speed import Offer
from lmc.storage.stats import Policy
from lmc.storage.store import Store
from lmc.storage.tier import Tier

TAILS = 4096  # places at which tails are remembered
MEMORY = frozenset({"device", "host"})  # places of chunks that need no loading; all others are tiers
LayerKV = tuple[torch.Tensor, torch.Tensor]  # keys and values [T, H, D]


class Kind(Enum):
    """What KV is good for: the two domains of keys."""

    EXACT = "exact"  # as the start of a prompt, and only there
    DOCUMENT = "document"  # computed alone: anywhere, approximately


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stored chunk, or a part of one, and where it goes in a prompt."""

    key: ChunkKey
    stored: int  # tokens in the chunk
    skip: int  # of these, leading ones that are not used
    tokens: int  # used ones
    at: int  # position in the prompt of the first used token
    first: int  # position at which that token was computed
    place: str | None  # where it was when it was looked for; None: nowhere


class CacheEngine:
    """Chunks of one model for one tenant, over the tiers that the settings name."""

    def __init__(
        self,
        settings: Settings,
        shape: KVShape,
        namespace: Namespace,
        *,
        device: torch.device | str = "cpu",
        tiers: Sequence[Tier] | None = None,
    ) -> None:
        """Make the slabs and open the tiers; raise `NoMemory` or `TierUnusable` and leave nothing open."""
        self.settings, self.shape = settings, shape
        self.namespace = namespace.digest()
        self.chunk_size = settings.chunk_size
        part = shape.part_bytes(settings.chunk_size)
        host = Slab.of_size(settings.max_local_cpu_size * GIB, shape.layers, part)
        on_device = settings.max_local_device_size * GIB
        slab = Slab.of_size(on_device, shape.layers, part, device) if on_device else None
        tiers = open_tiers(settings, shape.dtype.itemsize) if tiers is None else tiers
        self._slots = host.slots
        # Lengths of partly full exact chunks, by the key before them: turns of conversations, system texts.
        self._tails: OrderedDict[ChunkKey, set[int]] = OrderedDict()
        self.store_of_chunks = Store(host, tiers, device=slab, policy=Policy(settings.store_policy))
        self.speeds = self.store_of_chunks.speeds

    # -- plans -------------------------------------------------------------------------------------------------------

    def keys(self, kind: Kind, tokens: Sequence[int]) -> list[ChunkKey]:
        """Keys of the chunks of `tokens`, the last of which may be partly full."""
        chain = exact_keys if kind is Kind.EXACT else document_keys
        return chain(self.namespace, tokens, self.chunk_size)

    def lookup(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt are stored as its exact prefix."""
        return sum(piece.tokens for piece in self.find_prefix(tokens))

    def find_prefix(self, tokens: Sequence[int]) -> list[Piece]:
        """The longest run of exact chunks from the start of `tokens`.

        A partly full chunk ends the run: one that `tokens` ends with, or one that this engine stored (its length is not in its key,
        so those of earlier processes are not looked for).
        """
        plan = []
        for piece in self._pieces(Kind.EXACT, tokens, 0):
            if piece.place is None:
                break
            plan.append(piece)
        tail = self._find_tail(tokens, plan)
        return [*plan, tail] if tail else plan

    def find_document(self, tokens: Sequence[int], at: int) -> list[Piece] | None:
        """The whole document `tokens` for use from position `at` on, or None if any chunk of it is missing."""
        found = self._pieces(Kind.DOCUMENT, tokens, at)
        return found if all(piece.place for piece in found) else None

    # -- KV ----------------------------------------------------------------------------------------------------------

    def layers(
        self, plan: Sequence[Piece], loaded: "Counter[str] | None" = None
    ) -> Generator[tuple[int, list[torch.Tensor]], None, None]:
        """Per layer, in order: one `[K, T, H, D]` for each piece, while later layers are on their way. No plan, no iteration.

        The tensors are views of slots, good until the generator ends; use it under `contextlib.closing`. `loaded` is increased by
        the bytes that came from each place. Raises `ChunkLost` if a chunk is gone or turns out corrupt: plan again.
        """
        if not plan:
            return
        with self.store_of_chunks.pinned([piece.key for piece in plan]) as found:
            pins = [pin for pin in found if pin is not None]
            if len(pins) < len(plan):
                raise ChunkLost([piece.key for piece, pin in zip(plan, found, strict=True) if pin is None])
            try:
                for layer in range(self.shape.layers):
                    parts = []
                    for piece, pin in zip(plan, pins, strict=True):
                        part = self.shape.part(pin.part(layer), piece.stored)
                        parts.append(part[:, piece.skip : piece.skip + piece.tokens])
                        if loaded is not None:
                            loaded[pin.source] += self.shape.part_bytes(piece.stored)
                    yield layer, parts
            finally:
                if torch.cuda.is_available():
                    torch.cuda.current_stream().synchronize()  # copies out of the slots must end before the pins do

    def retrieve(self, plan: Sequence[Piece], loaded: "Counter[str] | None" = None) -> list[torch.Tensor]:
        """All layers at once: `[K, T, H, D]` each, of the plan's pieces side by side, copied; otherwise as `layers`."""
        with closing(self.layers(plan, loaded)) as reader:
            return [torch.cat(parts, dim=1) for _, parts in reader]

    def store(self, kind: Kind, tokens: Sequence[int], kv: Sequence[LayerKV], *, patient: bool = False) -> int:
        """Keep the KV of `tokens`, computed from position 0 on; return how many chunks are new.

        A partly full last chunk is kept for documents always and for prefixes if `save_unfull_chunk`. What does not fit now is not kept;
        if `patient`, room is waited for, so that nothing is lost on a slow tier.
        """
        assert len(kv) == self.shape.layers
        assert kv[0][0].shape[0] >= len(tokens)
        new, parent = 0, exact_root(self.namespace)
        for piece in self._pieces(kind, tokens, 0)[: self._slots]:  # more would evict the first ones again
            full = piece.stored == self.chunk_size
            if kind is Kind.EXACT and not full:
                if not self.settings.save_unfull_chunk:
                    break
                self._remember_tail(parent, piece.stored)
            parent = piece.key
            if piece.place is None:
                if patient:
                    self.store_of_chunks.flush()
                new += self._store_chunk(piece, kv)
        return new

    def _store_chunk(self, piece: Piece, kv: Sequence[LayerKV]) -> bool:
        with self.store_of_chunks.writing(self._meta(piece)) as slot:
            if slot is None:
                return False
            rows = slice(piece.at, piece.at + piece.stored)
            for raw, (keys, values) in zip(slot, kv, strict=True):
                part = self.shape.part(raw, piece.stored)
                part[0].copy_(keys[rows])
                part[1].copy_(values[rows])
        return True

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether all chunks of `tokens` can be in memory at once, which using them needs."""
        return len(chunk_bounds(len(tokens), self.chunk_size)) <= self._slots

    def close(self) -> None:
        """Write down what is not on a tier yet, and close everything."""
        self.store_of_chunks.close()

    def _remember_tail(self, parent: ChunkKey, length: int) -> None:
        self._tails.setdefault(parent, set()).add(length)
        self._tails.move_to_end(parent)
        while len(self._tails) > TAILS:
            self._tails.popitem(last=False)

    def _find_tail(self, tokens: Sequence[int], plan: Sequence[Piece]) -> Piece | None:
        """The longest partly full chunk that is known to follow `plan` and whose tokens come next."""
        at = sum(piece.tokens for piece in plan)
        if at % self.chunk_size:
            return None
        parent = plan[-1].key if plan else exact_root(self.namespace)
        lengths = self._tails.get(parent, set())
        for length in sorted((n for n in lengths if n <= len(tokens) - at), reverse=True):
            key = next_key(parent, tokens[at : at + length])
            place = self.store_of_chunks.lookup([key])[0]
            if place:
                return Piece(key=key, stored=length, skip=0, tokens=length, at=at, first=at, place=place)
        return None

    def _pieces(self, kind: Kind, tokens: Sequence[int], at: int) -> list[Piece]:
        keys, bounds = self.keys(kind, tokens), chunk_bounds(len(tokens), self.chunk_size)
        places = self.store_of_chunks.lookup(keys)
        return [
            Piece(key=key, stored=stop - start, skip=0, tokens=stop - start, at=at + start, first=start, place=place)
            for key, place, (start, stop) in zip(keys, places, bounds, strict=True)
        ]

    def _meta(self, piece: Piece) -> RecordMeta:
        return RecordMeta(
            key=piece.key,
            namespace=self.namespace,
            tokens=piece.stored,
            first=piece.first,
            parts=self.shape.layers,
            part_bytes=self.shape.part_bytes(piece.stored),
        )


def open_tiers(settings: Settings, item_bytes: int) -> list[Tier]:
    """The tiers that the settings name, fastest first; `item_bytes` of a number are what codecs split. Raise `TierUnusable`."""
    tiers: list[Tier] = []
    try:
        if settings.local_disk is not None:
            disk = DiskTier(settings.local_disk, int(settings.max_local_disk_size * GIB))
            tiers.append(Coded(disk, settings.local_disk_serde, item_bytes))
        if settings.remote_url is not None:
            tiers.append(Coded(open_remote(settings), settings.remote_serde, item_bytes))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return tiers


def open_remote(settings: Settings) -> Tier:
    """The Redis that the settings name; raise `TierUnusable`, or `ConfigError` if the package for it is missing."""
    assert settings.remote_url is not None
    try:
        from lmc.storage.redis import RedisTier
    except ImportError as error:
        raise ConfigError(f"remote_url needs the package {error.name}: pip install 'lmc[redis]'") from None
    return RedisTier(
        parse_remote(settings.remote_url),
        deadline=settings.remote_deadline,
        ttl=settings.remote_ttl,
        prefix=settings.remote_prefix,
    )


def trim(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """The part of `pieces` that falls on positions `[start, stop)` of the prompt."""
    kept = []
    for piece in pieces:
        skip = max(0, start - piece.at)
        tokens = min(piece.at + piece.tokens, stop) - piece.at - skip
        if tokens > 0:
            moved = replace(piece, skip=piece.skip + skip, tokens=tokens, at=piece.at + skip, first=piece.first + skip)
            kept.append(moved)
    return kept


def offer(shape: KVShape, exact: Sequence[Piece], reused: Sequence[Piece], *, ratio: float, prompt: int) -> Offer:
    """What of a plan would have to be loaded, and what that spares: all that is exact from the first such piece on, and the others."""
    away = {piece.key: piece for piece in (*exact, *reused) if piece.place not in MEMORY}
    wanted = []
    for piece in away.values():
        assert piece.place is not None
        wanted.append((piece.place, shape.part_bytes(piece.stored) * shape.layers))
    return Offer.of(
        wanted,
        exact=sum(piece.tokens for piece in dropwhile(lambda piece: piece.key not in away, exact)),
        reused=sum(piece.tokens for piece in reused if piece.key in away),
        ratio=ratio,
        prompt=prompt,
    )
