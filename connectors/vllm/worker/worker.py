"""The worker's side of the connector: it copies between pages and slots, blends and learns, one slice in each step.

Work is a queue of generators, oldest first, which yield their cost in token-layers. In each step, lmc may compute as
much as the engine's own limit leaves: `max_num_batched_tokens` in all layers, minus the tokens that the engine computes
itself. lmc may always compute at least a tenth of the limit. In models with ten layers or more, a running request
therefore waits at most a tenth longer for its next token than after a full step of chunked prefill. The step ends early
after blends that a prompt waits for (`StepPlan.first`).

A failed job is reported, and the engine computes its tokens. An error stops the engine in two cases only: other ranks
would wait for this rank forever (tensor parallelism), or the slab cannot be opened.

With several ranks, the ranks agree on everything that could make their steps differ. The scheduler's plan says which
parts have arrived. A vote decides whether every rank has memory for a job's next step.
"""

import logging
from collections import defaultdict
from collections.abc import Generator, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lmc.blend.blender import Blender, BlendInput, BlendResult
from lmc.blend.canvas import KV
from lmc.connectors.vllm.messages import (
    BLEND_SHARE,
    BackfillJob,
    BlendJob,
    LearnJob,
    LoadJob,
    PageCopy,
    SaveJob,
    StepPlan,
    StepReport,
    Table,
    WorkerFacts,
    passed_blocks,
)
from lmc.connectors.vllm.model_identity import layout_of, weights_in_memory
from lmc.connectors.vllm.model_kinds import TESTED, groups_of
from lmc.connectors.vllm.plugin import bytes_of_steps, loaded_runner
from lmc.connectors.vllm.vllm_api import get_pp_group, get_tensor_model_parallel_rank, get_tp_group
from lmc.connectors.vllm.worker.canvas import COPY_COST, BatchRows, PagedCanvas, prefill_alone, read_tokens
from lmc.connectors.vllm.worker.draft_model import DraftModel
from lmc.connectors.vllm.worker.lora import WithoutAdapters
from lmc.connectors.vllm.worker.memory import allocated, make_room, memory_for
from lmc.connectors.vllm.worker.native import NativeLayers
from lmc.connectors.vllm.worker.paged import Move, Pages
from lmc.connectors.vllm.worker.rank_slab import RankSlab
from lmc.connectors.vllm.worker.selftest import prove_model, run_full_batch
from lmc.connectors.vllm.worker.streams import LayerLoads, Streams, divided, seconds_of
from lmc.connectors.vllm.worker.tensor_parallel import meet_all_ranks, on_all_ranks
from lmc.copies import Addresses, sent
from lmc.engine import Piece
from lmc.engine.speeds import processor_of
from lmc.errors import ChunkLost, NoMemory, StorageError, UnsupportedModel
from lmc.keys import chunk_bounds
from lmc.storage.memory.slab import LOST, SlabAddress

log = logging.getLogger(__name__)

LEARN_EVERY = 8  # While blends and loads run, one slice of learning is done in this many steps.
# A blend of at least this many rows ends the step: its request gets its first token before other blends are computed.
# The engine's pass for this token would take longer than smaller blends. On a GPU, such a pass takes as long as many
# rows, so that a blend has to be as large as a fourth of a step.
ROWS_THAT_END = 128
STEPS_THAT_END = 1 / 4
# If the engine computes more than this share of a step for running requests, a step is full of work as it is.
BUSY = 1 / 16
# On a GPU, the blend may still be running then. Other blends wait until it is reported, or for this number of steps.
MAX_STEPS_WAITED = 100
MIN_ROWS = 512  # minimal rows per call of a layer on a CPU, or of the compiled model: each call reads all weights


class Cost(NamedTuple):
    """The cost of a slice of a job, in token-layers; 0 if the slice waits for bytes."""

    done: int
    coming: int | None = None  # cost of the next slice, if known; 0 after the last slice


@dataclass(slots=True)
class Work:
    """A job that is under way."""

    steps: Generator[Cost, None, None]
    request: str = ""  # the request that waits for the job
    blocks: tuple[int, ...] = ()  # blocks whose contents are invalid if the job fails
    wanted: Sequence[PageCopy | Piece] = ()  # the slots that the job reads
    job: int = -1  # the number of a learning or backfill job
    idle: bool = False  # The job runs only in steps in which nothing else is computed.
    computes: str = ""  # what the job computes; "" if it only copies
    memory: int = 0  # number of bytes that the job may still allocate, in addition to those for a batch of rows
    coming: int = 0  # expected cost of the next slice
    rows: float = 0  # tokens that a blend computes
    largest: int = 0  # largest cost of a slice until now; it is the expectation if the cost of the next is unknown

    def next_slice(self) -> int:
        """Run a slice, and return its cost. Raises `StopIteration` after the last slice."""
        cost, coming = next(self.steps)
        self.largest = max(self.largest, cost)
        self.coming = self.largest if coming is None else coming
        return cost


class EndedLoad(NamedTuple):
    """A load whose copies have all been issued, or that has failed."""

    event: Any  # the event that is complete when the load's copies are complete
    request: str
    bad: tuple[int, ...]  # blocks that the engine has to compute
    blocks: tuple[int, ...] = ()  # all blocks that the load filled
    wanted: Sequence[PageCopy | Piece] = ()  # the slots that the load read


class Worker:
    """One rank's side of the connector."""

    def __init__(self, config: Any, kv_cache_config: Any, *, blends: bool) -> None:
        self._config, self._kv_cache_config, self._blends = config, kv_cache_config, blends
        self._pages: Pages
        self._layers: NativeLayers | None = None
        self._slab: RankSlab | None = None
        self._loading: dict[str, Work] = {}  # loads and blends by request, oldest first
        self._learning: list[Work] = []
        self._backfills: list[Work] = []  # exact prefill in idle steps
        self._steps = 0
        self._unreported: set[str] = set()  # requests whose blends have ended a step
        self._steps_waited = 0  # number of steps in which other blends have waited for these
        # KV of the primer, after which all documents are learned: by the number of resets before it, a list by layer.
        self._prefix_kv: dict[int, list[KV]] = {}
        self._arrived: dict[str, int] = {}  # number of arrived parts by request, see `StepPlan.arrived`
        self._report = StepReport()
        self._copied: list[tuple[Any, int]] = []  # (event, job) of copies that may be in flight
        self._ended: list[EndedLoad] = []  # loads whose copies may be in flight
        self._step_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self._rows = BatchRows(layer=self._step_tokens)
        self._rows_that_end = float(ROWS_THAT_END)
        self._batch_bytes = 0  # number of bytes that a layer needs on a GPU for a batch of full size
        self._adapters: WithoutAdapters | None = None  # in an engine with LoRA
        self._engine_bytes = 0  # number of bytes that the engine's own steps need on a GPU

    # -- start -------------------------------------------------------------------------------------------------------

    def register(
        self, caches: dict[str, torch.Tensor], model: Any | None, draft_model: Any | None = None, why_not: str = ""
    ) -> WorkerFacts:
        """Register the KV caches and the model, and return facts about them.

        `model` is None if it was not found, and `draft_model` if there is none. `why_not` is the reason why this engine
        may not blend with any model; it is empty if it may. The facts describe the caches, and say why the model cannot
        be blended, if it cannot.
        """
        # The engine lists caches group by group, and those of one kind of layers after those of another.
        places = {name: place for place, name in enumerate(self._config.compilation_config.static_forward_context)}
        caches = {name: caches[name] for name in sorted(caches, key=lambda name: places.get(name, len(places)))}
        self._pages = Pages(caches, self._kv_cache_config.num_blocks, groups_of(self._kv_cache_config))
        self._ranks: int = get_tp_group().world_size
        cache = next(iter(caches.values()))
        self._device = cache.device
        self._streams = Streams(self._device)
        self._engine_bytes = bytes_of_steps()
        self._pages.choose_copy_mode(seconds_of)
        if self._device.type != "cuda":  # On a GPU, kernels may have buffers for the tokens of one step only.
            self._rows = BatchRows(layer=max(MIN_ROWS, self._step_tokens))
        else:
            self._rows_that_end = max(ROWS_THAT_END, STEPS_THAT_END * self._step_tokens)
        refused = "blending is off (enable_blending)"
        if self._blends:
            refused = why_not or self._prepare_blending(caches, model, draft_model)
        shape = self._layers.shape if self._layers else None
        dtypes = [str(one.dtype) for one in self._layers.shapes] if self._layers else []
        return WorkerFacts(
            rank=(get_pp_group().rank_in_group, get_tensor_model_parallel_rank()),
            page_bytes=self._pages.page_bytes,
            layout=layout_of(self._config, self._kv_cache_config, self._pages.layout),
            weights=weights_in_memory(self._config, model),
            kv_heads=shape.kv_heads if shape else 0,
            head_dim=shape.head_dim if shape else 0,
            value_dim=shape.value_dim if shape else 0,
            dtype=str(shape.dtype if shape else cache.dtype),
            dtypes=",".join(dtypes) if len(set(dtypes)) > 1 else "",
            rope=self._layers.rope if self._layers else "",
            refused=refused,
            processor=processor_of(self._device),
        )

    def _prepare_blending(self, caches: dict[str, torch.Tensor], model: Any | None, draft_model: Any | None) -> str:
        if model is None:
            return "the loaded model was not found in this worker (does another plugin replace it?)"
        try:
            if self._config.lora_config is not None:
                self._adapters = WithoutAdapters(loaded_runner())
                self._rows = BatchRows(layer=self._step_tokens)  # Kernels for adapters have buffers for one step.
            drafts = DraftModel.of(draft_model, self._config.speculative_config, caches)
            layers = NativeLayers(model, self._config, self._kv_cache_config, caches, drafts, self._adapters)
            if len(layers.attention) < self._pages.layers and self._config.speculative_config is not None:
                raise UnsupportedModel("the draft model was not found in this worker")
            if [one.layer_name for one in layers.attention] != self._pages.names:
                raise UnsupportedModel("the engine does not have exactly one KV cache per layer")
            vocabulary, blocks = self._config.model_config.get_vocab_size(), self._kv_cache_config.num_blocks
            as_compiled = prove_model(layers, vocabulary, blocks, self._step_tokens, self._streams.load)
            if as_compiled and self._step_tokens >= BLEND_SHARE * MIN_ROWS:
                self._rows = self._rows._replace(through=self._step_tokens // BLEND_SHARE)
            if self._device.type == "cuda":  # On a CPU, this batch takes seconds, and memory is less scarce.
                self._batch_bytes = run_full_batch(
                    layers, min(self._rows.layer, self._config.model_config.max_model_len - 1)
                )
            refused = ""
        except UnsupportedModel as error:
            refused = str(error)
        except Exception as error:
            log.exception("lmc could not run the self-test of this model")
            refused = f"the self-test raised {type(error).__name__}: {error}"
        # If only this rank had an error, the other ranks may wait for it in the middle of a layer.
        if not meet_all_ranks(good=not refused):
            return refused or "the self-test failed on another rank"
        if tested := [name for name in layers.architectures if name in TESTED]:
            log.info("%s was tested with lmc: %s", tested[0], TESTED[tested[0]])
        else:
            text = "%s has not been tested with lmc: it has passed the self-test, and is blended"
            log.warning(text, layers.architectures[0])
        self._layers = layers
        return ""

    # -- a step ------------------------------------------------------------------------------------------------------

    @property
    def ends_loads(self) -> bool:
        """Whether loads have ended that are not yet reported to the engine."""
        return bool(self._ended)

    @property
    def has_news(self) -> bool:
        """Whether there is something to report."""
        return bool(self._copied or self._report)

    def work(self, plan: StepPlan) -> None:
        """Add the new jobs of a step, and run slices of all jobs up to the step's limit."""
        self._find_slab(plan)
        self._arrived = plan.arrived
        self._steps += 1
        waits = self._waits_for_answers(plan)
        if not (plan.has_jobs or self._loading or self._learning or self._backfills):
            return
        for request, blocks in plan.failed.items():
            self._fail(request, blocks)
        for request in self._loading.keys() & plan.late:
            self._end(self._loading[request], self._loading[request].blocks)
        for job in plan.loads:
            self._loading[job.request] = self._load_or_blend(job)
        for document in plan.learn:
            name = f"a document of {len(document.tokens)} tokens"
            batch = self._pages.layers * min(self._rows.through, len(document.tokens))
            self._learning.append(
                Work(self._learn(document), job=document.job, idle=document.idle, computes=name, coming=batch)
            )
        for backfill in plan.backfill:
            name = f"the exact KV of {len(backfill.tokens)} tokens"
            rows = self._pages.layers * min(self._rows.through, len(backfill.tokens))
            self._backfills.append(Work(self._backfill(backfill), job=backfill.job, computes=name, coming=rows))
        for cancelled in [work for work in (*self._learning, *self._backfills) if work.job in plan.cancel]:
            self._end(cancelled, (), failed=True)
        all_token_layers = self._step_tokens * self._pages.layers
        limit = max(all_token_layers - plan.scheduled * self._pages.layers, all_token_layers // BLEND_SHARE)
        restored = self._adapters.restored() if self._adapters is not None else nullcontext()
        with torch.inference_mode(), restored:
            loading = [work for work in self._loading.values() if not (waits and work.computes)]
            busy = plan.scheduled > BUSY * self._step_tokens
            remaining = limit - self._do(loading, limit, first=plan.first, may_end=not busy)
            if plan.first or waits:  # A prompt or a first token waits for the end of this step.
                remaining = 0
            # Learning comes last. While requests run, it gets one slice of a step, so that requests hardly wait for it.
            turn = remaining == limit or not self._steps % LEARN_EVERY
            idle = plan.rested and not plan.scheduled and not self._loading and not plan.first
            self._do([work for work in self._learning if not work.idle], 0 if plan.scheduled else remaining, alone=turn)
            # Idle work gets one slice of a step, so that a new request waits for one slice at most.
            if idle and all(work.idle for work in self._learning):
                self._do(self._learning or self._backfills, 0)

    def _waits_for_answers(self, plan: StepPlan) -> bool:
        """Return whether blends wait in this step for the first token of a request whose blend has ended.

        All ranks decide the same, by what the engine has received and what it computes in this step.
        """
        reported = self._unreported & plan.received
        self._unreported -= reported
        self._steps_waited = self._steps_waited + 1 if self._unreported else 0
        if self._steps_waited > MAX_STEPS_WAITED:
            self._unreported.clear()
        return bool(self._unreported or reported & plan.answers)

    def fail_work(self, plan: StepPlan) -> None:
        """Report every load, learning and backfill job as failed, after an error in `work`."""
        self.end_all()
        for job in plan.loads:
            self._fail(job.request, _blocks(job.copies) if isinstance(job, LoadJob) else self._blocks_to_fill(job))
        for request, blocks in plan.failed.items():
            self._fail(request, blocks)
        reported = {job for _, job in self._copied}
        numbers = {document.job for document in plan.learn} | {backfill.job for backfill in plan.backfill}
        for number in numbers - reported:
            self._report.failed.add(number)
            self._copied.append((self._streams.event(), number))

    def fail_saves(self, jobs: Sequence[SaveJob]) -> None:
        """Report saves as failed, after an error in `save`."""
        reported = {job for _, job in self._copied}
        self._report.failed |= {job.job for job in jobs}
        self._copied += [(self._streams.event(), job.job) for job in jobs if job.job not in reported]

    def _fail(self, request: str, blocks: tuple[int, ...]) -> None:
        """Report the load of a request as failed, unless it is already reported as ended."""
        if request not in {ended.request for ended in self._ended}:
            self._report.lost.add(request)
            self._ended.append(EndedLoad(self._streams.event(), request, blocks))

    def _find_slab(self, plan: StepPlan) -> None:
        """Map the slab of the plan. The slab of a cache server may have been replaced or closed since the last step.

        The slab of a cache server is mapped at the first job, because only then is the scheduler's process certain to
        keep it open.
        """
        address = plan.slab
        if self._slab is not None and self._slab.at != address:
            self._slab = None
        if (
            self._slab is None
            and address is not None
            and (not address.lifeline or plan.loads or plan.saves or plan.learn)
        ):
            slab = None
            try:
                slab = RankSlab(address, self._unmap)
            except StorageError as error:
                if not address.lifeline:
                    raise
                log.warning("could not map the memory of the cache server, so nothing is loaded: %s", error)
            # Blends are computed by all ranks or by none.
            self._slab = slab if on_all_ranks(good=slab is not None) else None

    def _unmap(self, at: SlabAddress) -> None:
        """Unmap the slab of a cache server that has ended, even in an idle engine, so that its memory is freed.

        Several ranks unmap it when the plan has another slab, because they must map and unmap in the same step.
        """
        under_way = self._loading or self._learning or self._copied or self._ended
        if self._ranks == 1 and self._slab is not None and self._slab.at == at and not under_way:
            self._slab = None

    def save(self, jobs: list[SaveJob]) -> None:
        """Copy blocks that earlier steps have filled into slots, after the forward pass of this step."""
        if not jobs:
            return
        with torch.inference_mode(), self._streams.behind(self._streams.save):
            try:
                self._save(jobs)
            except Exception:  # noqa: BLE001 - Jobs that fail by themselves are logged and reported.
                self._save_each(jobs)
            event = self._streams.event()
            self._copied += [(event, job.job) for job in jobs]

    def _save_each(self, jobs: Sequence[SaveJob]) -> None:
        """Save jobs one by one, after an error of all of them together, so that a bad job fails alone."""
        for job in jobs:
            try:
                self._save([job])
            except Exception as error:
                if not isinstance(error, ChunkLost):  # ChunkLost: a missing slab has already been logged.
                    log.exception("lmc could not save a chunk")
                self._report.failed.add(job.job)

    def cancel(self, requests: set[str]) -> None:
        """Stop the work for requests that have ended. The engine frees their blocks when they are reported."""
        for request in requests & self._loading.keys():
            self._loading[request].wanted = ()  # The request has ended: its slots need no check.
            self._end(self._loading[request], ())

    def end_all(self) -> None:
        """End all jobs under way as failed, and drop the KV that learning keeps in the engine's memory."""
        for work in [*self._loading.values(), *self._learning, *self._backfills]:
            self._end(work, work.blocks, failed=True)
        self._prefix_kv = {}
        self._unreported.clear()

    def outcome(self) -> dict[str, Table]:
        """Return, for the engine, the requests whose load has ended, with the blocks whose contents are invalid."""
        ended, waiting = divided(self._ended)
        bad = {load.request: load.bad for load in ended}
        for load in ended:
            if not load.bad and self._is_lost(load.wanted):  # A slot was given to another chunk during the copies.
                self._report.lost.add(load.request)
                bad[load.request] = load.blocks
        self._ended = waiting  # Updated last, so that an error before this line loses no load.
        return bad

    def report(self) -> StepReport:
        """Return, for lmc's scheduler, the jobs that have ended since the last report."""
        finished, self._copied = divided(self._copied)
        self._report.done |= {job: 1 for _, job in finished}
        report, self._report = self._report, StepReport()
        return report

    # -- inside: slices ----------------------------------------------------------------------------------------------

    def _do(
        self,
        queue: list[Work],
        left: int,
        *,
        alone: bool = True,
        first: Set[str] = frozenset(),
        may_end: bool = False,
    ) -> int:
        """Run slices that cost at most `left` token-layers, and return their cost.

        With `alone`, lmc has computed nothing else in this step. Then at least one slice is run, whatever its cost.
        With `first`, the jobs of these requests run first, and nothing is run after them. If large blends `may_end` the
        step, only loads are run after one that ends, and the cost is at least what was `left`.
        """
        done, ended = 0, False
        for work in sorted(queue, key=lambda work: work.request not in first):
            if first and not self._loading.keys() & first:
                break
            if ended and work.computes:
                continue
            if (alone and not done) or done + work.coming <= left:
                done += self._advance(work, left - done)
            # This holds for blends that fail, too, so that all ranks do the same.
            if may_end and work.rows >= self._rows_that_end and work.request not in self._loading:
                self._unreported.add(work.request)
                ended = True
        return max(done, left) if ended else done

    def _advance(self, work: Work, left: int) -> int:
        """Run one slice of a job and further slices that fit into `left` token-layers, and return their cost.

        Stops when the job waits for bytes or ends.
        """
        done, among_ranks = 0, work.computes and self._ranks > 1
        try:
            # Between two slices, the engine may use memory that was reserved for the job before. With one rank, a later
            # lack of memory only fails the job, so the memory is checked once.
            if among_ranks or (work.computes and not work.largest):
                need = self._batch_bytes + max(work.memory, 0)
                make_room(need, self._device, work.computes, kept=self._engine_bytes)
            before = allocated(self._device) if among_ranks else 0
            while (not done or done + work.coming <= left) and (cost := work.next_slice()):
                done += cost
            if among_ranks:
                work.memory -= allocated(self._device) - before
        except StopIteration:
            self._end(work, ())
        except (ChunkLost, NoMemory) as error:
            lost = isinstance(error, ChunkLost)
            reason = f"a chunk for request {work.request} was lost while it was loaded" if lost else str(error)
            log.warning("%s; %s", reason, "the engine will compute it" if work.request else "it was not learned")
            self._end(work, work.blocks, failed=True)
        except Exception:
            if self._ranks > 1:
                raise  # The other ranks are about to enter a collective operation, and would wait forever.
            log.exception("lmc failed in a worker; the engine will compute what lmc should have loaded")
            self._end(work, work.blocks, failed=True)
        return done

    def _end(self, work: Work, bad: tuple[int, ...], *, failed: bool = False) -> None:
        work.steps.close()
        if work.request:
            del self._loading[work.request]
            if bad:
                self._report.lost.add(work.request)
            with self._streams.behind(self._streams.load):
                self._ended.append(EndedLoad(self._streams.event(), work.request, bad, work.blocks, work.wanted))
        else:
            (self._learning if work in self._learning else self._backfills).remove(work)
            if failed:
                self._report.failed.add(work.job)
            with self._streams.behind(self._streams.save):
                self._copied.append((self._streams.event(), work.job))

    # -- inside: jobs ------------------------------------------------------------------------------------------------

    def _load_or_blend(self, job: LoadJob | BlendJob) -> Work:
        if isinstance(job, LoadJob):
            return Work(self._load(job), job.request, _blocks(job.copies), wanted=job.copies)
        assert self._layers is not None
        return Work(
            self._blend(job),
            job.request,
            self._blocks_to_fill(job),
            wanted=(*job.copies, *job.documents),
            computes=f"a blend of {len(job.tokens)} tokens",
            rows=self._rows_of(job),
            memory=memory_for(self._layers, job),
        )

    def _rows_of(self, job: BlendJob) -> float:
        """Return about how many tokens a blend computes, apart from its first pass."""
        reused = sum(piece.tokens for piece in (*job.documents, *job.own) if not piece.exact)
        return len(job.tokens) - job.start - reused * (1 - job.policy.share(self._pages.layers))

    def _blocks_to_fill(self, job: BlendJob) -> Table:
        return tuple(block for table in job.tables for block in table[job.start // self._block_size :])

    def _load(self, job: LoadJob) -> Generator[Cost, None, None]:
        loads, last = self._page_loads(job), self._pages.layers - 1
        for layer in range(self._pages.layers):
            while not (job.ready or self._has_arrived(job.request, job.copies, layer)):
                yield Cost(0)
            loads.begin(layer)
            yield Cost(loads.cost, loads.cost if layer < last else 0)
        self._check(job.copies)

    def _page_loads(self, job: LoadJob | BlendJob) -> LayerLoads:
        """Return the loads of a job's exact pages, and the copies of the engine's own blocks."""
        by_group: dict[int, list[PageCopy]] = defaultdict(list)
        for copy in job.copies:
            by_group[copy.group].append(copy)
        own = job.copied if isinstance(job, BlendJob) else ()
        copied = [sent(torch.tensor(own).T.contiguous(), self._device)] if own else []  # sources and targets, [2, B]

        def load(layer: int) -> None:
            copies = by_group[self._pages.group_of[layer]]
            parts = self._parts_of([one.slot for one in copies], layer)
            moves = [Move(one.blocks, part, one.first) for one, part in zip(copies, parts, strict=True)]
            self._pages.load_all(layer, moves)
            for sources, targets in copied:
                self._pages.duplicate(layer, sources, targets)

        most = max([len(own), *(len(_blocks(copies)) for copies in by_group.values())])
        return LayerLoads(load, most * self._block_size // COPY_COST + 1, self._streams, used=copied)

    def _blend(self, job: BlendJob) -> Generator[Cost, None, None]:
        assert self._layers is not None
        copies: list[PageCopy | Piece] = [*job.copies, *job.documents]

        def arrived(layer: int) -> bool:
            return job.ready or self._has_arrived(job.request, copies, layer)

        loads = self._page_loads(job) if job.copies or job.copied else None
        canvas = PagedCanvas(self._layers, job, self._rows, self, arrived, loads, self._streams.load)
        length, pieces = len(job.tokens), sorted((*job.documents, *job.own), key=lambda piece: piece.at)
        blend_input = BlendInput(
            length=length,
            stop=job.stop,
            question=job.question,
            placements=pieces,
            start=job.exact,
            learned_after=job.learned_after,
        )
        blender = Blender(canvas, blend_input, job.policy)
        for finished in blender.slices():
            yield Cost(finished.cost, finished.coming)
        self._check(copies)
        self._report.blended[job.request] = _facts(job, blender.result)

    def _learn(self, job: LearnJob) -> Generator[Cost, None, None]:
        assert self._layers is not None
        tokens, tables = self._tensors(job)
        positions = torch.arange(len(job.tokens))
        before = self._layers.slots(tables, positions[: job.document])
        prefix = self._prefix_kv.get(job.resets, [])
        computed = job.document if prefix else 0
        for access, slots, kv in zip(self._layers.access, before, prefix, strict=bool(prefix)):
            access.scatter(slots, *kv)
        for cost in prefill_alone(self._layers, tokens, tables, self._rows, computed):
            yield Cost(cost)
        if job.document > computed:
            of_layers = zip(self._layers.access, before, strict=True)
            self._prefix_kv = {job.resets: [access.gather(slots) for access, slots in of_layers]}
        begin, count = job.document, len(job.tokens) - job.document
        for slot, (start, stop) in zip(job.slots, chunk_bounds(count, job.chunk), strict=True):
            if slot >= 0:
                # Engine steps do not wait for these copies.
                with self._streams.behind(self._streams.save):
                    self._save_tokens(slot, tables, positions[begin + start : begin + stop])
            cost = (stop - start) * self._layers.depth // COPY_COST + 1
            yield Cost(cost, cost if stop < count else 0)

    def _backfill(self, job: BackfillJob) -> Generator[Cost, None, None]:
        assert self._layers is not None
        tokens, tables = self._tensors(job)
        rows = self._rows._replace(layer=min(self._rows.layer, MIN_ROWS))
        for cost in prefill_alone(self._layers, tokens, tables, rows, job.known):
            yield Cost(cost)

    def _tensors(self, job: LearnJob | BackfillJob) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the tokens and the block tables of a job, on the host."""
        return torch.tensor(job.tokens), [torch.tensor(table) for table in job.tables]

    def _save(self, jobs: Sequence[SaveJob]) -> None:
        """Copy the pages of jobs, layer by layer.

        The next step is launched only when all copies are issued. With one list of copies for each layer, this takes
        the host 3.2 ms for 32 chunks in 32 layers, and with one for each layer and job 33 ms (AMD EPYC).
        """
        unseen = [[passed_blocks(table) for table in job.tables] for job in jobs]
        for layer, group in enumerate(self._pages.group_of):
            moves = []
            parts = self._parts_of([job.slot for job in jobs], layer)
            for job, part, passed in zip(jobs, parts, unseen, strict=True):
                table, first = job.tables[group], passed[group]
                if first:  # The part would otherwise have bytes of another chunk.
                    self.part(job.slot, layer)[: first * self._pages.page_bytes[layer]].zero_()
                if first < len(table):
                    moves.append(Move(table[first:], part, first))
            self._pages.save_all(layer, moves)

    def _save_tokens(self, slot: int, tables: list[torch.Tensor], positions: torch.Tensor) -> None:
        assert self._layers is not None
        for layer, slots in enumerate(self._layers.slots(tables, positions)):
            part = self._layers.shapes[layer].part(self.part(slot, layer), len(slots))
            read_tokens(self._layers.access[layer], slots, part)

    # -- inside: the slab --------------------------------------------------------------------------------------------

    @property
    def _mapped(self) -> RankSlab:
        """The slab. Raises `ChunkLost` if the slab of a cache server could not be mapped."""
        if self._slab is None:
            raise ChunkLost([])
        return self._slab

    def part(self, slot: int, layer: int) -> torch.Tensor:
        """See `PartMemory.part`. Raises `ChunkLost` if the slab of a cache server could not be mapped."""
        return self._mapped.part(slot, layer)

    def addresses(self, slots: Sequence[int], layer: int) -> Addresses | None:
        """See `PartMemory.addresses`. Raises `ChunkLost` as `part` does."""
        return self._mapped.addresses(slots, layer)

    def _parts_of(self, slots: Sequence[int], layer: int) -> Sequence[torch.Tensor | int]:
        """Return the parts of slots, or their addresses if all copies of a layer go to the GPU in one call."""
        addresses = self.addresses(slots, layer) if slots and self._pages.takes_addresses else None
        return [self.part(slot, layer) for slot in slots] if addresses is None else addresses.tolist()

    def _has_arrived(self, request: str, copies: Sequence[PageCopy | Piece], layer: int) -> bool:
        """Return whether all parts of a layer are in all slots; the result is the same on every rank.

        Raises `ChunkLost` if a part will never arrive.
        """
        ready = self._arrived.get(request, 0) if self._ranks > 1 else self._mapped.ready(copies)
        if ready == LOST:
            raise ChunkLost([])
        return ready >= self._mapped.needed(layer)

    def _check(self, copies: Sequence[PageCopy | Piece]) -> None:
        """Raise `ChunkLost` if a slot was given to another chunk while it was read.

        The check runs at the end of a job, where ranks may differ: blocks that one rank reports are invalid for all.
        """
        if self._is_lost(copies):
            raise ChunkLost([])

    def _is_lost(self, copies: Sequence[PageCopy | Piece]) -> bool:
        """Return whether a slot holds a different chunk than expected, or the slab is not mapped."""
        return bool(copies) and (self._slab is None or self._slab.ready(copies) == LOST)

    @property
    def _block_size(self) -> int:
        size: int = self._config.cache_config.block_size
        return size


def _facts(job: BlendJob, result: BlendResult) -> dict[str, object]:
    """Return facts about a blend for the response."""
    return {
        "strategy": job.policy.strategy,
        "reused_tokens": result.reused,
        "fresh_tokens": result.fresh,
        "token_layers": sum(result.computed),
        "charged_budget": round(result.charged_budget, 4),
    }


def _blocks(copies: Sequence[PageCopy]) -> Table:
    return tuple(block for copy in copies for block in copy.blocks)
