"""What scheduler and workers tell each other, once a step: plain data, picklable, without a word of vLLM.

The scheduler owns the store; a worker gets slot numbers and block numbers, moves bytes or computes, and says what is done.
"""

from dataclasses import dataclass, field

from lmc.blend.select import Policy
from lmc.storage.slab import SlabAt


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker says of itself, once, after its KV caches are there."""

    rank: tuple[int, int]  # pipeline stage, tensor-parallel rank
    page_bytes: tuple[int, ...]  # of one block, by layer
    layout: str  # everything about how bytes lie in a page
    fingerprint: str  # of the weights
    kv_heads: int = 0  # of this rank; 0 if its pages have no tokens that we could read
    head_dim: int = 0
    dtype: str = ""
    rope: str = ""
    refused: str = ""  # why it cannot blend; empty if it can


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """Blocks of a request, and the slot whose pages they get or give."""

    slot: int
    tag: int  # what the slot has to hold
    blocks: tuple[int, ...]
    first: int = 0  # page of the slot that goes with the first block


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentPart:
    """Tokens of a stored chunk of a document, and where they go in the prompt."""

    slot: int
    tag: int
    at: int  # position in the prompt of the first used token
    tokens: int  # used
    first: int  # position at which that token was computed
    skip: int  # leading tokens of the chunk that are not used
    stored: int  # tokens in the chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """Exact pages for a request that waits for them."""

    request: str
    copies: tuple[PageCopy, ...]
    ready: bool  # everything is in its slots already


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendJob:
    """KV of positions `[start, stop)` of a request: exact pages, moved documents, and what has to be computed."""

    request: str
    tokens: tuple[int, ...]  # from position 0 to `stop`
    blocks: tuple[int, ...]  # the request's block table
    start: int  # the engine has everything before this
    exact: int  # exact from 0 to here, once `copies` are done
    question: int  # where the question begins; `stop` if the engine computes it
    copies: tuple[PageCopy, ...]
    documents: tuple[DocumentPart, ...]
    ready: bool
    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnJob:
    """A document to prefill alone, in blocks lent for it, into the slots of its chunks."""

    job: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    chunk: int  # tokens of a full one
    slots: tuple[int, ...]  # -1 for a chunk that is stored already


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """Pages, or tokens, that this step completes: to be copied into a slot behind the forward."""

    job: int
    slot: int
    blocks: tuple[int, ...]
    tokens: tuple[int, int] | None = None  # positions whose keys and values are wanted, instead of whole pages


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What workers have to do from this step on."""

    slab: SlabAt | None = None
    stages: tuple[int, ...] = ()  # layers of each pipeline stage
    scheduled: int = 0  # tokens that the engine itself computes in this step
    loads: list[LoadJob | BlendJob] = field(default_factory=list)
    late: list[str] = field(default_factory=list)  # requests whose loads wait for what does not come: they have failed
    saves: list[SaveJob] = field(default_factory=list)
    learn: list[LearnJob] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class StepReport:
    """What a worker has finished since its last report, or what all workers have."""

    done: dict[int, int] = field(default_factory=dict)  # saved or learned job -> ranks
    failed: set[int] = field(default_factory=set)  # jobs whose slots hold nothing
    lost: set[str] = field(default_factory=set)  # requests whose load failed
    blended: dict[str, dict[str, object]] = field(default_factory=dict)  # request -> what it took

    def __bool__(self) -> bool:
        return bool(self.done or self.failed or self.lost or self.blended)

    def merge(self, other: "StepReport") -> "StepReport":
        """Of two ranks."""
        done = dict(self.done)
        for job, ranks in other.done.items():
            done[job] = done.get(job, 0) + ranks
        return StepReport(
            done=done,
            failed=self.failed | other.failed,
            lost=self.lost | other.lost,
            blended={**other.blended, **self.blended},
        )
