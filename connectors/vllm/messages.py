"""The messages between the scheduler's side and the workers, one pair in each step: plain data that can be pickled.

The scheduler's side owns the store. A worker gets slot numbers and block numbers, copies bytes or computes, and reports
completed jobs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmc.blend.strategies import RecomputePolicy
from lmc.engine import Piece
from lmc.storage.memory.slab import SlabAddress

# lmc may always compute at least 1 / BLEND_SHARE of a step.
BLEND_SHARE = 10

NULL = 0  # number of the engine's null block, which a table has in the place of blocks that a window has passed
Table = tuple[int, ...]  # block numbers, in the order of the tokens
Tables = tuple[Table, ...]  # the block table of each KV cache group of the engine


def passed_blocks(table: Sequence[int]) -> int:
    """Return how many leading blocks of a table a window has passed."""
    return next((at for at, block in enumerate(table) if block != NULL), len(table))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Facts that a worker reports once, when its KV caches have been allocated."""

    rank: tuple[int, int]  # pipeline stage, tensor-parallel rank
    page_bytes: tuple[int, ...]  # bytes of one block, by layer
    layout: str  # everything on which the bytes in a page depend
    weights: str = ""  # digest of the weights in memory, if they do not come from files
    kv_heads: int = 0  # KV heads of this rank; 0 if the tokens in its pages cannot be read
    head_dim: int = 0
    value_dim: int = 0
    dtype: str = ""
    dtypes: str = ""  # of each layer's KV, if they differ
    rope: str = ""
    refused: str = ""  # why the worker cannot blend; empty if it can
    processor: str = ""  # name of its GPU, or of the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """Blocks of a request in one KV cache group, and the slot from which their pages are copied."""

    slot: int
    tag: int  # as in `Piece`
    blocks: Table
    first: int = 0  # the page of the slot that belongs to the first block
    group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """Exact pages for a request that waits for them."""

    request: str
    copies: tuple[PageCopy, ...]
    ready: bool  # All parts are already in their slots.


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendJob:
    """KV of the positions `[start, stop)` of a request: exact pages, moved documents, and tokens to compute."""

    request: str
    tokens: tuple[int, ...]  # tokens from position 0 on, up to the prompt's end if the strategy needs the question
    tables: Tables  # of the request
    stop: int  # The engine computes the KV from this position on.
    policy: RecomputePolicy
    start: int = 0  # The engine has the KV of all positions before this one.
    exact: int = 0  # All positions before this one are exact after `copies`.
    question: int = 0  # position at which the question begins
    learned_after: int = 0  # number of tokens before each document when it was learned
    copies: tuple[PageCopy, ...] = ()
    documents: tuple[Piece, ...] = ()  # with their slots
    own: tuple[Piece, ...] = ()  # tokens whose KV is in copied blocks
    copied: tuple[tuple[int, int], ...] = ()  # blocks of the engine, and blocks of the request that get copies of them
    ready: bool = True  # All parts are already in their slots.


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnJob:
    """A document to prefill alone, in borrowed blocks, and to copy into the slots of its chunks."""

    job: int
    tokens: tuple[int, ...]  # the tokens of the primer, then those of the document
    document: int  # index of the document's first token in `tokens`
    tables: Tables
    chunk: int  # number of tokens in a full chunk
    slots: tuple[int, ...]  # -1 for a chunk that is already stored
    resets: int = 0  # number of cache resets before this job; each reset may mean new weights
    idle: bool = False  # The document is computed only in steps in which nothing else is.


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillJob:
    """Tokens to prefill exactly in idle steps, in borrowed blocks."""

    job: int
    tokens: tuple[int, ...]
    known: int  # number of leading tokens whose KV is already in their blocks
    tables: Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """Pages to copy into a slot after the forward pass that completes them."""

    job: int
    slot: int
    tables: Tables


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The work of the workers from this step on."""

    slab: SlabAddress | None = None
    scheduled: int = 0  # number of tokens that the engine itself computes in this step
    rested: bool = True  # The engine has computed nothing for a moment, so that jobs for idle steps may run.
    loads: list[LoadJob | BlendJob] = field(default_factory=list)
    first: set[str] = field(default_factory=set)  # requests whose blends a prompt waits for; the step ends after them
    received: set[str] = field(default_factory=set)  # requests whose load all workers have reported as ended
    answers: set[str] = field(default_factory=set)  # blended requests that get their first token in this step
    late: list[str] = field(default_factory=list)  # requests whose loads have failed because chunks did not arrive
    # Requests whose load cannot be executed after an error, with the blocks that the engine has to compute.
    failed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # For tensor parallelism: number of parts that have arrived of each chunk of a request; `LOST` if a chunk is lost.
    arrived: dict[str, int] = field(default_factory=dict)
    saves: list[SaveJob] = field(default_factory=list)
    learn: list[LearnJob] = field(default_factory=list)
    backfill: list[BackfillJob] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)  # numbers of jobs for idle steps that are given up

    @property
    def has_jobs(self) -> bool:
        """Whether the plan begins or ends a job other than a save."""
        return bool(self.loads or self.late or self.failed or self.learn or self.backfill or self.cancel)


@dataclass(slots=True, kw_only=True)
class StepReport:
    """The work that a worker, or all workers, have finished since the last report."""

    done: dict[int, int] = field(default_factory=dict)  # job number -> number of ranks that have ended it
    failed: set[int] = field(default_factory=set)  # failed jobs, whose slots have invalid contents
    lost: set[str] = field(default_factory=set)  # requests whose load failed
    blended: dict[str, dict[str, object]] = field(default_factory=dict)  # request -> facts for its response
    errors: int = 0  # errors of lmc that the worker's guard has caught

    def __bool__(self) -> bool:
        return bool(self.done or self.failed or self.lost or self.blended or self.errors)

    def merge(self, other: "StepReport") -> "StepReport":
        """Merge the reports of two ranks."""
        return StepReport(
            done=Counter(self.done) + Counter(other.done),
            failed=self.failed | other.failed,
            lost=self.lost | other.lost,
            blended={**other.blended, **self.blended},
            errors=self.errors + other.errors,
        )
