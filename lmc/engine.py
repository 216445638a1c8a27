"""The cache engine: joins tokens to keys to storage. What a connector asks for KV.

find_prefix, find_document   a plan: which stored chunks serve which tokens (a pure question; nothing is held)
layers                       the plan's KV, layer by layer, while the next layers are being fetched
store                        KV of a prompt's prefix, or of a document computed alone
"""

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from lmc.config import Settings
from lmc.errors import ChunkLost
from lmc.keys import ChunkKey, Namespace, chunk_bounds, document_keys, exact_keys
from lmc.shapes import GIB, KVShape
from lmc.storage.disk import DiskTier
from lmc.storage.record import RecordMeta
from lmc.storage.slab import Slab
from lmc.storage.store import Policy, Store
from lmc.storage.tier import Tier

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
        if tiers is None:
            tiers = []
            if settings.local_disk is not None:
                tiers.append(DiskTier(settings.local_disk, int(settings.max_local_disk_size * GIB)))
        self.store_of_chunks = Store(host, tiers, device=slab, policy=Policy(settings.store_policy))

    # -- plans -------------------------------------------------------------------------------------------------------

    def keys(self, kind: Kind, tokens: Sequence[int]) -> list[ChunkKey]:
        """Keys of the chunks of `tokens`, the last of which may be partly full."""
        chain = exact_keys if kind is Kind.EXACT else document_keys
        return chain(self.namespace, tokens, self.chunk_size)

    def lookup(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt are stored as its exact prefix."""
        return sum(piece.tokens for piece in self.find_prefix(tokens))

    def find_prefix(self, tokens: Sequence[int]) -> list[Piece]:
        """The longest run of exact chunks from the start of `tokens`; a partly full last chunk only if `tokens` ends with it."""
        plan = []
        for piece, place in self._places(Kind.EXACT, tokens, 0):
            if place is None:
                break
            plan.append(piece)
        return plan

    def find_document(self, tokens: Sequence[int], at: int) -> list[Piece] | None:
        """The whole document `tokens` for use from position `at` on, or None if any chunk of it is missing."""
        found = self._places(Kind.DOCUMENT, tokens, at)
        return [piece for piece, _ in found] if all(place for _, place in found) else None

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

    def retrieve(self, plan: Sequence[Piece]) -> list[torch.Tensor]:
        """All layers at once: `[K, T, H, D]` each, of the plan's pieces side by side, copied."""
        return [torch.cat(parts, dim=1) for _, parts in self.layers(plan)]

    def store(self, kind: Kind, tokens: Sequence[int], kv: Sequence[LayerKV]) -> int:
        """Keep the KV of `tokens`, computed from position 0 on; return how many chunks are new.

        A partly full last chunk is kept for documents always and for prefixes if `save_unfull_chunk`. What does not fit now is not kept.
        """
        assert len(kv) == self.shape.layers
        assert kv[0][0].shape[0] >= len(tokens)
        new = 0
        for piece, place in self._places(kind, tokens, 0):
            full = piece.stored == self.chunk_size
            if place is not None or not (full or kind is Kind.DOCUMENT or self.settings.save_unfull_chunk):
                continue
            with self.store_of_chunks.writing(self._meta(piece)) as slot:
                if slot is None:
                    continue
                rows = slice(piece.at, piece.at + piece.stored)
                for raw, (keys, values) in zip(slot, kv, strict=True):
                    part = self.shape.part(raw, piece.stored)
                    part[0].copy_(keys[rows])
                    part[1].copy_(values[rows])
            new += 1
        return new

    def forget(self, plan: Sequence[Piece]) -> None:
        """Remove a plan's chunks everywhere."""
        for piece in plan:
            self.store_of_chunks.forget(piece.key)

    def close(self) -> None:
        """Write down what is not on a tier yet, and close everything."""
        self.store_of_chunks.close()

    def _places(self, kind: Kind, tokens: Sequence[int], at: int) -> list[tuple[Piece, str | None]]:
        keys = self.keys(kind, tokens)
        pieces = [
            Piece(key=key, stored=stop - start, skip=0, tokens=stop - start, at=at + start, first=start)
            for key, (start, stop) in zip(keys, chunk_bounds(len(tokens), self.chunk_size), strict=True)
        ]
        return list(zip(pieces, self.store_of_chunks.lookup(keys), strict=True))

    def _meta(self, piece: Piece) -> RecordMeta:
        return RecordMeta(
            key=piece.key,
            namespace=self.namespace,
            tokens=piece.stored,
            first=piece.first,
            parts=self.shape.layers,
            part_bytes=self.shape.part_bytes(piece.stored),
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
