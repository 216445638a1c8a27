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
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmc.blend.segments import Placement, Span
from lmc.blend.strategies import NEEDS_QUESTION, RecomputePolicy
from lmc.engine import Piece

Salt = tuple[int, bytes]  # (block, secret): block hashes from `block` on depend on `secret`
Salts = tuple[Salt, ...]  # ascending

MAX_BLENDS = 4096  # maximal number of remembered blends; each takes about 1 KB


def salt_of(prompt: Sequence[int], reused: Sequence[Piece], policy: RecomputePolicy) -> bytes:
    """Return the salt of a blend: a hash of its policy, its reused pieces, and all tokens that it can depend on."""
    tokens = prompt if policy.strategy in NEEDS_QUESTION else prompt[: reused[-1].stop]
    given = repr((policy, [(piece.at, piece.stop) for piece in reused])).encode()
    return hashlib.sha256(b"lmc-blend-2 %d " % len(given) + given + array("I", tokens).tobytes()).digest()


def set_salts(request: Any, salts: Salts, *, replacing: Salts = ()) -> None:
    """Recompute the request's block hashes so that they depend on `salts`, and no longer on `replacing`."""
    if replacing:
        del request.block_hashes[replacing[0][0] :]
        request.update_block_hashes()
    for block, secret in salts:
        original = request.block_hashes[block]
        del request.block_hashes[block:]
        request.block_hashes.append(hashlib.sha256(secret + original).digest())
        request.update_block_hashes()


@dataclass(slots=True)
class RevisionCost:
    """What all revisions of a conversation have cost."""

    tokens: float = 0.0  # that they have computed, and that vLLM alone would have had in its prefix cache


@dataclass(slots=True, kw_only=True, eq=False)
class OwnBlend:
    """A prompt that this engine has blended."""

    request: str  # the engine's id of the request
    policy: RecomputePolicy
    pieces: tuple[Placement, ...]  # its approximate tokens
    salts: Salts
    origin: Salt  # the first salt of the first blend of the conversation
    block: bytes  # the exact hash of the last full block among the tokens on which the blend depends
    rest: tuple[int, ...]  # the tokens between `block` and `end`
    first: int  # the position of the first block with approximate tokens
    end: int  # The blend depends on the tokens before this position.
    documents: bytes  # the exact hash of the last full block of the blend's documents
    by_separators: bool  # Separators mark the blend's documents.
    revisions: RevisionCost  # shared with the blends that revise it

    @property
    def stop(self) -> int:
        """The position after the last approximate token."""
        return self.pieces[-1].at + self.pieces[-1].tokens


class OwnBlends:
    """The recent blends of one engine, by the block hashes of their prompts.

    The hashes of a prompt's blocks cover the tenant's salt, so a tenant finds only its own blends.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_block: defaultdict[bytes, list[OwnBlend]] = defaultdict(list)
        self._by_documents: dict[bytes, OwnBlend] = {}
        self._of_tenant: defaultdict[str, OrderedDict[OwnBlend, None]] = defaultdict(OrderedDict)
        self.changes = 0  # number of blends added or removed until now

    def add(
        self,
        *,
        request: str,
        tenant: str,
        prompt: Sequence[int],
        hashes: Sequence[bytes],
        end: int,
        pieces: Sequence[Placement],
        policy: RecomputePolicy,
        salts: Salts,
        origin: Salt,
        by_separators: bool,
        revisions: RevisionCost | None = None,
    ) -> None:
        """Add a blend that depends on the tokens before `end`. `hashes` are the exact hashes of the prompt's blocks.

        `pieces` are its approximate tokens, with those of an earlier blend that it continues. A blend that revises an
        earlier one gets the `revisions` of that one.
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
            origin=origin,
            block=hashes[full - 1],
            rest=tuple(prompt[full * self._block_size : end]),
            first=salts[0][0] * self._block_size,
            end=end,
            documents=hashes[last - 1],
            by_separators=by_separators,
            revisions=revisions or RevisionCost(),
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
        self.changes += 1
        if sum(map(len, self._of_tenant.values())) > MAX_BLENDS:  # The tenant with the most blends loses one.
            most = max(self._of_tenant, key=lambda name: len(self._of_tenant[name]))
            self._remove(next(iter(self._of_tenant[most])), most)

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
        self._by_block.clear()
        self._by_documents.clear()
        self._of_tenant.clear()

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
        self.changes += 1


def _fits(blend: OwnBlend, documents: Sequence[Span] | None, policy: RecomputePolicy) -> bool:
    """Return whether a prompt asks for the policy of a blend, and its documents include the pieces of the blend."""
    if blend.policy != policy:
        return False
    if documents is None:
        return blend.by_separators
    return all(
        any(span.start <= piece.at and piece.at + piece.tokens <= span.stop for span in documents)
        for piece in blend.pieces
    )
