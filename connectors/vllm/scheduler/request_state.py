"""The state of one request on the scheduler's side."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lmc.blend.segments import Span
from lmc.blend.strategies import RecomputePolicy
from lmc.connectors.vllm.scheduler.isolation import Salts
from lmc.connectors.vllm.scheduler.request_options import Options
from lmc.engine import DocumentLookup, Plan, Unlearned
from lmc.keys import ChunkKey
from lmc.storage.contract import Pin
from lmc.storage.cost_model import BlendOffer


class Role(Enum):
    """How a request is served."""

    EXACT = "exact"
    BLEND = "blend"
    LEARN = "learn"


@dataclass(frozen=True, slots=True)
class Claim:
    """A promise to the engine: the KV of the tokens `[local, plan.stop)`, from pinned chunks."""

    local: int
    plan: Plan
    blend: BlendOffer | None = None  # what its blend computes and loads


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One request, from its arrival to its end."""

    request: Any
    role: Role
    policy: RecomputePolicy | None = None
    options: Options | None = None  # what the request asks of lmc; None if that is wrong
    cached: bool = False  # The engine has nearly all of it, so that its documents were not looked for.
    documents: tuple[DocumentLookup, ...] = ()
    question: int = 0
    stamp: bytes = b""  # joins the block hashes, which do not cover a LoRA adapter's files or numbered images
    # What is stored for it
    elsewhere: dict[ChunkKey, str] | None = None  # where its chunks are on tiers that other processes share
    pins: dict[ChunkKey, Pin] = field(default_factory=dict)
    lost: set[ChunkKey] = field(default_factory=set)  # chunks that could not be loaded, and are not tried again
    memory_only: bool = False  # Nothing is loaded from tiers, because computing was expected to be faster.
    slow: str = ""  # why it is not blended: prefill was expected to be faster
    weighed: int = -1  # the engine's own tokens when a blend was weighed against prefill
    claim: Claim | None = None
    # How long it waits
    waiting_since: float | None = None  # since when the engine waits for its claim, or for its load
    progress_at: float = 0.0  # when a part that it waits for arrived last
    parts_arrived: int = 0  # parts of pinned chunks that had arrived by then
    loading: bool = False  # Workers are loading or blending.
    local: int = 0  # tokens that the engine's own cache had when the load began
    given_up: bool = False  # A load failed or was too late, and nothing more is loaded.
    # What is saved of it
    exact_hashes: Sequence[bytes] = ()  # of its prompt's blocks, as they were when it arrived
    stored_exactly: int = 0  # leading tokens that were stored exactly when it arrived
    salts: Salts = ()  # on which its block hashes depend
    searched: int = -1  # the changes of the engine's own blends when one was looked for
    scheduled: bool = False  # The engine has computed tokens of it.
    follows: bool = False  # It is a later turn of a conversation.
    blended_before: int = 0  # tokens on which the blend depends that it goes on from
    continued: int = 0  # tokens from the engine's own blocks of an earlier blend
    approximate: int | None = None  # the position from which on its KV is not exact, and is not saved as exact
    saved: int = 0  # full chunks that are saved, or need not be
    save_at: float = 0  # the computed tokens from which on the next chunk may have to be saved
    blends: bool = True  # It does not say that nothing shall be blended.
    learns: bool = True  # Its unknown documents may be learned.
    unknown: tuple[Span, ...] = ()  # documents to learn
    queued: tuple[Unlearned, ...] = ()  # documents that a request to learn has put into the queue
    # For the response
    name: str = ""  # for the documents of a request to learn
    learned: bool = False
    stored: tuple[str, ...] = ()  # the ids of the documents that it has learned
    skipped: int = 0  # stored tokens that were not loaded
    exact_tokens: int = 0  # tokens that were loaded exactly
    sources: Counter[str] = field(default_factory=Counter)  # loaded tokens by the place they came from
    note: str = ""
    blended: dict[str, object] = field(default_factory=dict)
    loading_since: float = 0.0  # when its job was made
    answered: bool = False  # Its first token has come.
    decodes: bool = False  # It has nothing to do but to be saved, because its prompt is computed.
    # For the cost model
    begun: float | None = None  # when the engine or a worker began to compute its prompt
    alone: bool = True  # Nothing else has been computed since.
    offer: BlendOffer | None = None  # what its blend computes
    prefilled: int = 0  # tokens of its prompt that the engine computes; 0 if some are loaded
    _unstamped: list[bytes] = field(default_factory=list)  # the engine's hashes, of which `_stamped` are made
    _stamped: list[bytes] = field(default_factory=list)

    @property
    def id(self) -> str:
        """The engine's id of the request."""
        found: str = self.request.request_id
        return found

    @property
    def salt(self) -> str:
        """The tenant's cache salt."""
        return self.request.cache_salt or ""

    @property
    def hashes(self) -> Sequence[bytes]:
        """The hashes of its exact blocks: the engine's, joined with the stamp if there is one.

        A stamped request is never blended, so hashes are added at the end, and each of them is computed once. Only a
        session that gets more input drops its last token, and with it the hash of a block that had just been full.
        """
        found: Sequence[bytes] = self.request.block_hashes
        if not self.stamp:
            return found
        # A hash covers all blocks before its own, so that those before one that has stayed have stayed as well.
        while self._unstamped and self._unstamped[-1:] != found[len(self._unstamped) - 1 : len(self._unstamped)]:
            del self._unstamped[-1], self._stamped[-1]
        new = found[len(self._unstamped) :]
        self._unstamped += new
        self._stamped += [hashlib.sha256(self.stamp + block).digest() for block in new]
        return self._stamped

    @property
    def way(self) -> str:
        """How it was served, for people and for metrics."""
        if self.role is Role.LEARN:
            return "learn"
        if self.approximate is not None and self.sources:  # Otherwise the engine has cached its own blend.
            return "blend"
        return "exact" if self.exact_tokens else "full"

    def facts(self) -> dict[str, object] | None:
        """Return facts for the response on what was reused and recomputed; None if lmc did nothing for the request."""
        if self.role is Role.LEARN:
            facts: dict[str, object] = {"learned": self.learned, "documents": list(self.stored), "note": self.note}
            return {name: value for name, value in facts.items() if value or name == "learned"}
        found: dict[str, object] = {
            "exact_tokens": self.exact_tokens,
            "tokens_from": dict(self.sources),
            "skipped_tokens": self.skipped,
            "continued_tokens": self.continued,
            "unknown_documents": len(self.unknown),
            "note": self.note,
        }
        return {name: value for name, value in found.items() if value} | self.blended or None
