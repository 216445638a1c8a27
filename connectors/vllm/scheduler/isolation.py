"""Isolation: approximate KV is reused only by requests that ask for the same approximation.

vLLM keeps a request's blocks in its prefix cache under the request's block hashes. From the first approximate block on,
lmc replaces these hashes by hashes that chain from a salt. The salt covers everything that the blend depends on, so
plain prompts do not find these blocks.

`OwnBlends` remembers the salts of recent blends. A prompt may begin with a prompt that was blended: the next turn of a
conversation, a retry, or a step of a beam search. Such a prompt gets the same salts, and its hashes continue the chain
of the blend. The engine then finds the blocks of the blend and all blocks computed after it, as in one long generation.
Only public list operations of the request are used.
"""

import hashlib
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmc.blend.segments import Placement, Span
from lmc.blend.strategies import NEEDS_QUESTION, RecomputePolicy
from lmc.engine import Piece

Salt = tuple[int, bytes]  # (block, secret): block hashes from `block` on depend on `secret`
Salts = tuple[Salt, ...]  # ascending

MAX_BLENDS = 4096  # maximal number of remembered blends; each takes about 1 KB, and its hashes
RECENT_BLENDS = 256  # Requests that wait look whether one of these is new and fits.
HASHES_PER_BLOCK = 2  # maximal number of remembered hashes for each block of the engine, about 90 bytes each


def salt_of(prompt: Sequence[int], reused: Sequence[Piece], policy: RecomputePolicy) -> bytes:
    """Return the salt of a blend: a hash of its policy, its reused pieces, and all tokens that it can depend on."""
    tokens = prompt if policy.strategy in NEEDS_QUESTION else prompt[: reused[-1].stop]
    given = repr((policy, [(piece.at, piece.stop) for piece in reused])).encode()
    return hashlib.sha256(b"lmc-blend-2 %d " % len(given) + given + array("I", tokens).tobytes()).digest()


def set_hashes(request: Any, hashes: Sequence[bytes]) -> None:
    """Replace the hashes of the request's first blocks. vLLM computes those of the later blocks, which chain on."""
    request.block_hashes[:] = hashes
    request.update_block_hashes()


def add_salt(request: Any, salt: Salt) -> None:
    """Recompute the request's block hashes from the salt's block on, so that they depend on its secret."""
    block, secret = salt
    salted = hashlib.sha256(secret + request.block_hashes[block]).digest()
    set_hashes(request, [*request.block_hashes[:block], salted])


@dataclass(frozen=True, slots=True)
class SaltedHashes:
    """The block hashes of a blended prompt. The turns of a conversation share those that they have in common."""

    new: tuple[bytes, ...]  # hashes of the blocks after the shared ones
    shared: int = 0  # number of blocks at the beginning that have the hashes of `earlier`
    earlier: "SaltedHashes | None" = None

    @classmethod
    def of(cls, hashes: Sequence[bytes], earlier: "SaltedHashes | None") -> "SaltedHashes":
        """Return these hashes, which may begin like those of an earlier blend."""
        pairs = enumerate(zip(hashes, earlier.whole(), strict=False)) if earlier is not None else ()
        known = min(len(earlier), len(hashes)) if earlier is not None else 0
        shared = next((at for at, (one, other) in pairs if one != other), known)
        while earlier is not None and shared <= earlier.shared:  # None of the shared hashes are its own.
            earlier = earlier.earlier
        return cls(tuple(hashes[shared:]), shared, earlier if shared else None)

    def __len__(self) -> int:
        return self.shared + len(self.new)

    def whole(self) -> list[bytes]:
        """Return the hashes of all blocks."""
        parts, need, at = [self.new], self.shared, self.earlier
        while at is not None and need:
            parts.append(at.new[: max(0, need - at.shared)])
            need, at = min(need, at.shared), at.earlier
        return [block for part in reversed(parts) for block in part]


@dataclass(slots=True)
class RevisionCost:
    """What all revisions of a conversation have cost."""

    tokens: float = 0.0  # tokens that they have computed, and that vLLM alone would have had in its prefix cache


@dataclass(slots=True, kw_only=True, eq=False)
class OwnBlend:
    """A prompt that this engine has blended."""

    request: str  # the engine's id of the request
    policy: RecomputePolicy
    pieces: tuple[Placement, ...]  # its approximate tokens
    salts: Salts
    hashes: SaltedHashes  # of the full blocks among the tokens on which the blend depends
    origin: Salt  # the first salt of the first blend of the conversation
    block: bytes  # the exact hash of the last full block among the tokens on which the blend depends
    rest: tuple[int, ...]  # the tokens between `block` and `end`
    first: int  # the position of the first block with approximate tokens
    end: int  # The blend depends on the tokens before this position.
    documents: bytes  # the exact hash of the last full block of the blend's documents
    last: int  # number of full blocks up to the end of these documents
    by_separators: bool  # Separators mark the blend's documents.
    revisions: RevisionCost  # shared with the blends that revise it

    @property
    def stop(self) -> int:
        """The position after the last approximate token."""
        return self.pieces[-1].at + self.pieces[-1].tokens

    def begins(self, hashes: Sequence[bytes]) -> bool:
        """Return whether a prompt with these exact hashes begins with the full blocks of the blend."""
        return list(hashes[len(self.hashes) - 1 : len(self.hashes)]) == [self.block]

    def has_documents_of(self, hashes: Sequence[bytes]) -> bool:
        """Return whether a prompt with these exact hashes begins with the blend's documents."""
        return list(hashes[self.last - 1 : self.last]) == [self.documents]


class OwnBlends:
    """The recent blends of one engine, by the block hashes of their prompts.

    The hashes of a prompt's blocks cover the tenant's salt, so a tenant finds only its own blends.
    """

    def __init__(self, block_size: int, blocks: int) -> None:
        """Remember blends of an engine that has this number of blocks."""
        self._block_size, self._most_hashes = block_size, HASHES_PER_BLOCK * blocks
        self._by_block: defaultdict[bytes, list[OwnBlend]] = defaultdict(list)
        self._by_documents: dict[bytes, OwnBlend] = {}
        self._of_tenant: defaultdict[str, OrderedDict[OwnBlend, None]] = defaultdict(OrderedDict)
        self._recent: deque[OwnBlend] = deque(maxlen=RECENT_BLENDS)  # the last blends that were added
        self._hashes = 0  # number of hashes that blends do not share with earlier ones
        self.added = 0  # number of blends that were added until now

    def add(
        self,
        *,
        request: str,
        tenant: str,
        prompt: Sequence[int],
        hashes: Sequence[bytes],
        salted: Sequence[bytes],
        end: int,
        pieces: Sequence[Placement],
        policy: RecomputePolicy,
        salts: Salts,
        origin: Salt,
        by_separators: bool,
        earlier: OwnBlend | None = None,
    ) -> None:
        """Add a blend that depends on the tokens before `end`.

        `hashes` are the exact hashes of the prompt's blocks, and `salted` those of the blend. `pieces` are its
        approximate tokens, with those of the `earlier` blend that it continues or revises. Both have the same
        revisions.
        """
        full = min(end // self._block_size, len(hashes))
        if not full:
            return
        last = min((pieces[-1].at + pieces[-1].tokens) // self._block_size, len(hashes))
        blend = OwnBlend(
            request=request,
            policy=policy,
            pieces=tuple(pieces),
            salts=salts,
            hashes=SaltedHashes.of(salted[:full], earlier.hashes if earlier is not None else None),
            origin=origin,
            block=hashes[full - 1],
            rest=tuple(prompt[full * self._block_size : end]),
            first=salts[0][0] * self._block_size,
            end=end,
            documents=hashes[last - 1],
            last=last,
            by_separators=by_separators,
            revisions=earlier.revisions if earlier is not None else RevisionCost(),
        )
        self._by_documents[blend.documents] = blend
        same = [
            other
            for other in self._by_block[blend.block]
            if (other.policy, other.rest, other.pieces) == (blend.policy, blend.rest, blend.pieces)
        ]
        for other in same:
            self._remove(other, tenant)
        self._by_block[blend.block].append(blend)
        self._of_tenant[tenant][blend] = None
        self._recent.append(blend)
        self._hashes += len(blend.hashes.new)
        self.added += 1
        while (count := sum(map(len, self._of_tenant.values()))) > 1 and (
            count > MAX_BLENDS or self._hashes > self._most_hashes
        ):  # The tenant with the most blends loses one.
            most = max(self._of_tenant, key=lambda name: len(self._of_tenant[name]))
            self._remove(next(iter(self._of_tenant[most])), most)

    def added_since(self, number: int) -> Sequence[OwnBlend] | None:
        """Return the blends that were added after the first `number` ones; None if these are too many."""
        count = self.added - number
        return list(self._recent)[len(self._recent) - count :] if count <= len(self._recent) else None

    def find(
        self,
        *,
        tenant: str,
        prompt: Sequence[int],
        hashes: Sequence[bytes],
        documents: Sequence[Span] | None,
        policy: RecomputePolicy,
    ) -> Iterator[OwnBlend]:
        """Yield the blends that a prompt can continue, the longest first, and of equally long ones the latest.

        The prompt begins with all tokens on which the blend depends, and asks for the same policy. The pieces that the
        blend reused lie inside the prompt's `documents`. `documents` is None if separators mark the documents of the
        prompt; then they marked those of the blend, too. `hashes` are the exact hashes of the prompt's blocks.
        """
        for full in range(len(hashes) if self._by_block else 0, 0, -1):
            stop = full * self._block_size
            latest = reversed(self._by_block.get(hashes[full - 1], ()))
            for blend in sorted(latest, key=lambda one: -len(one.rest)):
                if tuple(prompt[stop : stop + len(blend.rest)]) == blend.rest and _fits(blend, documents, policy):
                    self._of_tenant[tenant].move_to_end(blend)
                    yield blend

    def find_same_documents(
        self, *, hashes: Sequence[bytes], documents: Sequence[Span] | None, policy: RecomputePolicy
    ) -> OwnBlend | None:
        """Return the last blend with whose documents a prompt begins, whatever its question is.

        The arguments are those of `find`.
        """
        for block in reversed(hashes if self._by_documents else ()):
            blend = self._by_documents.get(block)
            if blend is not None and _fits(blend, documents, policy):
                return blend
        return None

    def repeats(self, hashes: Sequence[bytes]) -> int:
        """Return how many tokens a prompt shares with an earlier blend if it begins with all documents of the blend.

        Returns 0 without such a blend. Each blend is matched only once. `hashes` are the exact hashes of the
        prompt's blocks.
        """
        for full in range(len(hashes) if self._by_documents else 0, 0, -1):
            if self._by_documents.pop(hashes[full - 1], None) is not None:
                return full * self._block_size
        return 0

    def forget(self, request: str, tenant: str) -> None:
        """Forget the blends of a request, for example because its load has failed."""
        for blend in [one for one in self._of_tenant.get(tenant, ()) if one.request == request]:
            self._remove(blend, tenant)

    def clear(self) -> None:
        """Forget all blends."""
        for memory in (self._by_block, self._by_documents, self._of_tenant, self._recent):
            memory.clear()
        self._hashes = 0

    def _remove(self, blend: OwnBlend, tenant: str) -> None:
        of_block, of_tenant = self._by_block[blend.block], self._of_tenant[tenant]
        of_block.remove(blend)
        if self._by_documents.get(blend.documents) is blend:
            del self._by_documents[blend.documents]
        del of_tenant[blend]
        if not of_block:
            del self._by_block[blend.block]
        if not of_tenant:
            del self._of_tenant[tenant]
        self._hashes -= len(blend.hashes.new)


def _fits(blend: OwnBlend, documents: Sequence[Span] | None, policy: RecomputePolicy) -> bool:
    """Return whether a prompt asks for the policy of a blend, and its documents include the pieces of the blend."""
    if blend.policy != policy:
        return False
    if documents is None:
        return blend.by_separators
    at = 0
    for piece in blend.pieces:  # Both are ascending.
        stop = piece.at + piece.tokens
        at = next((n for n in range(at, len(documents)) if documents[n].stop >= stop), len(documents))
        if at == len(documents) or documents[at].start > piece.at:
            return False
    return True
