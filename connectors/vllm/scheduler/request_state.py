"""The state of one request on the scheduler's side."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lmc.blend.segments import Span
from lmc.blend.strategies import RecomputePolicy
from lmc.connectors.vllm.scheduler.isolation import OwnBlend, Salt, Salts
from lmc.connectors.vllm.scheduler.kv_groups import Borrowed
from lmc.connectors.vllm.scheduler.request_options import Options
from lmc.connectors.vllm.scheduler.revision import Revision
from lmc.engine import DocumentMatch, Plan, Unlearned
from lmc.keys import ChunkKey
from lmc.storage.contract import Pin
from lmc.storage.cost_model import BlendOffer


class Role(Enum):
    """How a request is served."""

    EXACT = "exact"
    BLEND = "blend"
    LEARN = "learn"


@dataclass(slots=True)
class StoredChunks:
    """A request's stored chunks, and the time limits of their loads. `Claims` changes them."""

    elsewhere: dict[ChunkKey, str] | None = None  # tiers of its chunks, among tiers that processes share
    asked: tuple[ChunkKey, ...] = ()  # chunks of known documents about which a slow tier has not answered yet
    answers_due: float = 0.0  # time until which the request waits for these answers
    pins: dict[ChunkKey, Pin] = field(default_factory=dict)
    lost: set[ChunkKey] = field(default_factory=set)  # chunks that could not be loaded, and are not tried again
    memory_only: bool = False  # Nothing is loaded from slower tiers, because computing was expected to be faster.
    ended_early: bool = False  # A load was ended, because computing the rest was expected to be faster.
    skipped: int = 0  # stored tokens that were not loaded
    planned_after: int = -1  # number of tokens in the engine's cache when its chunks were chosen
    # When a blend was compared with prefill: the tokens in the engine's cache, and those that the plan loaded.
    weighed: tuple[int, int] | None = None
    waiting_since: float | None = None  # time since which the engine waits for the claim or the load
    progress_at: float = 0.0  # time of the last arrival of a part
    parts_arrived: int = 0  # number of parts of pinned chunks that had arrived at `progress_at`
    loads: tuple[ChunkKey, ...] = ()  # chunks that tiers began to load when the request arrived
    begun_at: float = 0.0  # time of this
    computing: float | None = None  # expected seconds of computing their tokens instead; None if they are not compared


@dataclass(slots=True)
class Waiting:
    """When a request may begin, among others with loads and blends. `Admission` decides it."""

    is_long: bool = False  # The engine would compute a tenth of a step or more: earlier blends go first.
    since: float | None = None  # time since which the request may have waited for earlier blends, or for blocks
    awaited: "RequestState | None" = None  # a request that loads what this one would load
    loads_from: bytes | None = None  # hash of the first block of an exact load, until the engine computes the request


@dataclass(slots=True)
class FollowUp:
    """What a request has in common with earlier blends of this engine. `FollowUps` finds it."""

    stored_exactly: int = 0  # number of leading tokens that were stored exactly when the request arrived
    awaited: "RequestState | None" = None  # a request whose blend this one waits for, to continue or revise it
    awaited_hashes: Sequence[bytes] = ()  # hashes of the awaited blend's blocks, if the request will continue it
    has_awaited_hashes: bool = False  # The request has these hashes, so that the engine finds the blocks at once.
    searched: int = -1  # `OwnBlends.added` at the last search for a blend to continue
    follows: bool = False  # The request continues an earlier blend, or asks something else about its documents.
    shared: int = 0  # leading tokens shared with an earlier blend; vLLM alone would have them exactly
    continues: OwnBlend | None = None  # the earlier blend whose blocks the request uses as they are
    blended_before: int = 0  # number of tokens on which the continued blend depends


@dataclass(slots=True)
class Saving:
    """What of a request is saved. `SaveQueue` saves it."""

    chunks: int = 0  # number of full chunks that are saved, or need not be saved
    has_end: bool = False  # The end of the prompt is saved; this is done for layers with a window.
    next_at: float = 0  # number of computed tokens at which the next chunk may be due to be saved


@dataclass(slots=True)
class Learning:
    """What is learned from a request."""

    allowed: bool = True  # Unknown documents of the request may be learned.
    unknown: tuple[DocumentMatch, ...] = ()  # documents to learn
    repeats: tuple[Span, ...] = ()  # what the prompt repeats of earlier prompts after other prefixes
    # Of a request to learn
    name: str = ""  # name for its documents
    queued: tuple[Unlearned, ...] = ()  # documents that it has put into the queue
    is_done: bool = False
    computed: int = 0  # documents that were not stored before
    stored: tuple[str, ...] = ()  # ids of its documents


@dataclass(slots=True)
class Timing:
    """Measurements for the cost model."""

    begun: float | None = None  # time at which the engine or a worker began to compute the prompt
    alone: bool = True  # Nothing else has been computed since `begun`.
    offer: BlendOffer | None = None  # what the blend computes and loads
    prefilled: int = 0  # number of prompt tokens that the engine computes; 0 if some are loaded


@dataclass(slots=True)
class Stamp:
    """What is joined with a request's block hashes, because they do not cover it: an adapter's files, or images."""

    content: bytes = b""
    of_images: bytes = b""  # joined as well from the moment on at which the request has images
    _content: bytes = b""  # what `_stamped` is joined with
    _engine: list[bytes] = field(default_factory=list)  # the engine's hashes, from which `_stamped` is computed
    _stamped: list[bytes] = field(default_factory=list)

    def on(self, hashes: Sequence[bytes], *, has_images: bool) -> Sequence[bytes]:
        """Return the engine's block hashes of a request, joined with the stamp if there is one.

        Each hash is computed once, because most requests only append hashes. A session that gets more input drops its
        last token, and the hash of a block that this token filled. It may also get its first images.
        """
        content = self.content + self.of_images if has_images else self.content
        if not content:
            return hashes
        if content != self._content:
            self._content, self._engine, self._stamped = content, [], []
        # A hash covers all earlier blocks: if a hash is unchanged, all hashes before it are unchanged as well.
        while self._engine and self._engine[-1:] != hashes[len(self._engine) - 1 : len(self._engine)]:
            del self._engine[-1], self._stamped[-1]
        new = hashes[len(self._engine) :]
        self._engine += new
        self._stamped += [hashlib.sha256(content + block).digest() for block in new]
        return self._stamped


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One request, from its arrival to its end."""

    request: Any
    role: Role
    policy: RecomputePolicy | None = None
    options: Options | None = None  # the request's options for lmc; None if they are invalid
    cached: bool = False  # The engine lacks few tokens, so the request's documents were not looked up.
    documents: tuple[DocumentMatch, ...] = ()
    question: int = 0
    chunks: StoredChunks = field(default_factory=StoredChunks)
    waiting: Waiting = field(default_factory=Waiting)
    follow_up: FollowUp = field(default_factory=FollowUp)
    saving: Saving = field(default_factory=Saving)
    learning: Learning = field(default_factory=Learning)
    timing: Timing = field(default_factory=Timing)
    stamp: Stamp = field(default_factory=Stamp)
    # Its load or blend
    blends: bool = True  # The request allows blending.
    refused: str = ""  # why its documents are not reused; see `Match.refused`
    awaits_blocks: bool = False  # The engine may run the request as soon as it has enough blocks.
    claim: Plan | None = None  # the plan that the engine was promised, from pinned chunks
    is_blend: bool = False  # Its latest plan was a blend.
    loading: bool = False  # Workers are loading or blending.
    loading_since: float = 0.0  # time at which the load or blend job was created
    borrowed: Borrowed | None = None  # blocks that the blend under way needs in addition to the request's own
    blended_now: bool = False  # Its blend is under way or has ended, and the engine has computed nothing for it yet.
    local: int = 0  # number of tokens in the engine's own cache when the load began
    given_up: bool = False  # A load failed or was too late, and nothing more is loaded.
    # Where its KV is approximate
    exact_hashes: Sequence[bytes] = ()  # hashes of the prompt's blocks when the request arrived
    salts: Salts = ()  # salts on which the block hashes depend
    origin: Salt | None = None  # as in `OwnBlend`; None without salts and without a revision
    revision: Revision | None = None  # the blend that is revised for this request's question
    copied: Sequence[Any] = ()  # blocks that are held while workers copy them
    approximate: int | None = None  # From this position on, KV is not exact and is not saved as exact.
    # What the engine has computed
    scheduled: bool = False  # The engine has computed tokens of the request.
    answered: bool = False  # The first output token has been computed.
    decodes: bool = False  # The prompt is computed: steps only check whether a chunk is due to be saved.
    watched_at: float = math.inf  # number of the step from which on it is watched again; see `WatchedRequests`
    # Facts for the response
    exact_tokens: int = 0  # tokens that were loaded exactly
    continued: int = 0  # tokens from the engine's own blocks of an earlier blend
    sources: Counter[str] = field(default_factory=Counter)  # number of loaded tokens by tier
    note: str = ""
    blended: dict[str, object] = field(default_factory=dict)

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
    def has_begun(self) -> bool:
        """Whether the engine has scheduled the request, in this step or before, and cached the blocks of its load."""
        return self.scheduled or self.request.status.name == "RUNNING"

    @property
    def hashes(self) -> Sequence[bytes]:
        """The hashes of the exact blocks: the engine's hashes, joined with the stamp if there is one."""
        stamp = self.stamp
        return stamp.on(self.request.block_hashes, has_images=bool(stamp.of_images and self.request.mm_features))

    @property
    def is_searched(self) -> bool:
        """Whether the request's documents are looked up in the store, to reuse them."""
        return self.role is Role.BLEND and not self.request.skip_reading_prefix_cache

    @property
    def stored_documents(self) -> list[DocumentMatch]:
        """The documents of a prompt that need not be learned; known only once they were looked up."""
        unknown = {document.span for document in self.learning.unknown}
        stored = [document for document in self.documents if document.learnable and document.span not in unknown]
        return stored if self.is_searched else []

    def add_note(self, text: str) -> None:
        """Append a text to the note of the response; an empty text adds nothing."""
        self.note = "; ".join(filter(None, (self.note, text)))

    @property
    def mode(self) -> str:
        """The mode in which the request was served, for operators and metrics."""
        if self.role is Role.LEARN:
            return "learn"
        # A request that continues from the engine's own blend has neither. After a reset or an error of lmc, the KV of
        # any request counts as approximate, so that it is not saved.
        if self.salts and (self.sources or self.blended):
            return "blend"
        return "exact" if self.exact_tokens else "full"

    def facts(self) -> dict[str, object] | None:
        """Return facts for the response about reused and recomputed tokens; None if lmc did nothing for the request."""
        if self.role is Role.LEARN:
            learning = self.learning
            facts: dict[str, object] = {
                "learned": learning.is_done,
                "documents": list(learning.stored),
                "note": self.note,
                "computed_documents": learning.computed if learning.is_done else 0,
            }
            return {name: value for name, value in facts.items() if value or name == "learned"}
        found: dict[str, object] = {
            "exact_tokens": self.exact_tokens,
            "tokens_from": dict(self.sources),
            "skipped_tokens": self.chunks.skipped,
            "continued_tokens": self.continued,
            "found_documents": dict(Counter(document.found_by.value for document in self.stored_documents)),
            "unknown_documents": len(self.learning.unknown),
            "note": self.note,
        }
        return {name: value for name, value in found.items() if value} | self.blended or None
