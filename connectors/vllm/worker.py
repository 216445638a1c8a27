"""What runs in each worker: copies between pages and slots, blends and learning, a slice of them in every step.

Work is a queue of generators, oldest first, that yield their cost in token-layers. A step does what is left of the engine's own
measure (`max_num_batched_tokens` through all layers) behind the tokens that the engine computed itself, so that a running request
never waits longer for its next token than it would behind a chunked prefill. What fails is reported, and the engine computes it; only
where other ranks would wait for this one (tensor parallelism), and where the slab cannot be opened, an error ends the engine.
"""

import logging
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tp_group

from lmc.connectors.vllm.blend import COPY_COST, Cost, PagedBlend, prefill, read_tokens
from lmc.connectors.vllm.fingerprint import fingerprint
from lmc.connectors.vllm.messages import (
    BlendJob,
    DocumentPart,
    LearnJob,
    PageCopy,
    SaveJob,
    StepPlan,
    StepReport,
    WorkerFacts,
)
from lmc.connectors.vllm.native import NativeLayers
from lmc.connectors.vllm.paged import Pages
from lmc.connectors.vllm.ranks import all_of
from lmc.connectors.vllm.selftest import prove
from lmc.errors import ChunkLost, UnsupportedModel
from lmc.shapes import KVShape
from lmc.storage.ledger import Slot
from lmc.storage.slab import LOST, Slab, SlabAt

log = logging.getLogger(__name__)

LEAST_SHARE = 4  # a blend gets at least this part of a step, whatever the engine computes itself; learning never more
LEAST_ROWS = 512  # that go through a layer together even if the engine takes fewer: each call reads all of its weights


@dataclass(slots=True)
class Work:
    """A job under way."""

    steps: Generator[Cost, None, None]
    request: str = ""  # that waits for it
    blocks: tuple[int, ...] = ()  # that are not what they should be if it fails
    job: int = -1  # of learning


@dataclass(slots=True)
class Outcome:
    """What the engine is told at the end of a step."""

    received: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class Worker:
    """One rank's side of the connector."""

    def __init__(self, config: Any, kv_cache_config: Any, *, blends: bool) -> None:
        self._config, self._kv_cache_config, self._blends = config, kv_cache_config, blends
        self._pages: Pages
        self._layers: NativeLayers | None = None
        self._shape: KVShape
        self._slab: Slab | None = None
        self._loading: dict[str, Work] = {}  # by request, oldest first
        self._learning: list[Work] = []
        self._report = StepReport()
        self._copied: list[tuple[Any, int]] = []  # (event, job): saves whose copies are not known to be done
        self._ended: list[tuple[Any, str, tuple[int, ...]]] = []  # (event, request, bad blocks): likewise
        self._stream: Any = None
        self._step_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self._rows = self._step_tokens

    # -- start -------------------------------------------------------------------------------------------------------

    def register(self, caches: dict[str, torch.Tensor], model: Any | None) -> WorkerFacts:
        """Take the KV caches; say what they are, and whether this model can be blended (`model` is None if it was not found)."""
        self._pages = Pages(caches, self._kv_cache_config.num_blocks)
        cache = next(iter(caches.values()))
        self._device = cache.device
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream()
        else:  # kernels of a GPU may have buffers for a step's tokens and no more
            self._rows = max(LEAST_ROWS, self._rows)
        refused = "blending is off (enable_blending)"
        if self._blends:
            refused = self._prepare_blending(caches, model)
        access = self._layers.access[0] if self._layers else None
        if access and self._layers:
            self._shape = KVShape(
                layers=self._layers.depth, kv_heads=access.kv_heads, head_dim=access.head_dim, dtype=cache.dtype
            )
        return WorkerFacts(
            rank=(get_pp_group().rank_in_group, get_tensor_model_parallel_rank()),
            page_bytes=self._pages.page_bytes,
            layout=f"{self._backend()} {self._pages.layout} {self._config.cache_config.cache_dtype}",
            fingerprint=fingerprint(self._config.model_config, model),
            kv_heads=access.kv_heads if access else 0,
            head_dim=access.head_dim if access else 0,
            dtype=str(cache.dtype),
            rope=self._layers.rope if self._layers else "",
            refused=refused,
        )

    def _backend(self) -> str:
        layers = self._config.compilation_config.static_forward_context
        found = {
            f"{layers[name].attn_backend.get_name()}/{getattr(layers[name], 'isa', '')}"
            for group in self._kv_cache_config.kv_cache_groups
            for name in group.layer_names
            if name in layers and hasattr(layers[name], "attn_backend")
        }
        return ",".join(sorted(found))

    def _prepare_blending(self, caches: dict[str, torch.Tensor], model: Any | None) -> str:
        if model is None:
            return "the loaded model was not found in this worker (is another plugin in the way?)"
        if self._config.lora_config is not None:
            # Its layers apply what the engine's last batch asked for, row by row, to whatever rows come next.
            return "LoRA is enabled (--enable-lora)"
        try:
            layers = NativeLayers(model, self._config, self._kv_cache_config, caches)
            if layers.depth != self._pages.layers:
                raise UnsupportedModel("the engine has other KV caches than one for each of its layers")
            prove(model, layers, self._config, self._kv_cache_config.num_blocks)
        except UnsupportedModel as error:
            return str(error)
        except Exception as error:
            log.exception("lmc could not try whether this model can be blended")
            return f"the self-test raised {type(error).__name__}: {error}"
        self._layers = layers
        return ""

    # -- a step ------------------------------------------------------------------------------------------------------

    def work(self, plan: StepPlan) -> None:
        """Take what is new, and do a slice of what there is. Behind the forward."""
        if plan.slab is not None and self._slab is None:
            self._attach(plan.slab, plan.stages)
        for request in self._loading.keys() & plan.late:
            self._end(self._loading[request], self._loading[request].blocks)
        for job in plan.loads:
            if isinstance(job, BlendJob):
                work = Work(self._blend(job), job.request, job.blocks[job.start // self._block_size :])
            else:
                work = Work(self._load(job.copies, job.ready), job.request, _blocks(job.copies))
            self._loading[job.request] = work
        for document in plan.learn:
            self._learning.append(Work(self._learn(document), job=document.job))
        whole = self._step_tokens * self._pages.layers
        left = whole - plan.scheduled * self._pages.layers
        with torch.inference_mode():
            left = self._do(list(self._loading.values()), max(left, whole // LEAST_SHARE))
            # Learning stands behind everything: what nobody else needs, and little of it while requests are running.
            self._do(self._learning, left if not plan.scheduled else min(left, whole // LEAST_SHARE))

    def save(self, jobs: list[SaveJob]) -> None:
        """Copy what this step has completed. On CUDA in a stream of its own, behind the forward."""
        if not jobs:
            return
        with torch.inference_mode():
            if self._stream is None:
                self._save_all(jobs)
                return
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._save_all(jobs)

    def cancel(self, requests: set[str]) -> None:
        """Stop what is done for requests that have ended; their blocks are free once they are reported."""
        for request in requests & self._loading.keys():
            self._end(self._loading[request], ())

    def outcome(self) -> Outcome:
        """What has ended, for the engine: requests whose load is over, and blocks that are wrong."""
        out = Outcome()
        waiting = []
        for event, request, bad in self._ended:
            if event is None or event.query():
                out.received.add(request)
                out.bad_blocks.update(bad)
            else:
                waiting.append((event, request, bad))
        self._ended = waiting
        return out

    def report(self) -> StepReport:
        """What has ended, for our scheduler."""
        copying = []
        for event, job in self._copied:
            if event is None or event.query():
                self._report.done[job] = 1
            else:
                copying.append((event, job))
        self._copied = copying
        report, self._report = self._report, StepReport()
        return report

    # -- inside: slices ----------------------------------------------------------------------------------------------

    def _do(self, queue: list[Work], left: int) -> int:
        for work in list(queue):
            while left > 0:
                try:
                    cost = next(work.steps)
                except StopIteration:
                    self._end(work, ())
                    break
                except ChunkLost:
                    log.warning("a chunk was lost on its way to request %s: the engine computes it", work.request)
                    self._end(work, work.blocks)
                    break
                except Exception:
                    if get_tp_group().world_size > 1:
                        raise  # the other ranks are on their way into a collective: an end is better than a hang
                    log.exception("lmc failed in a worker: the engine computes what it was to load")
                    self._end(work, work.blocks, failed=True)
                    break
                if not cost:
                    break  # it waits for bytes: others may go on
                left -= cost
            if left <= 0:
                break
        return left

    def _end(self, work: Work, bad: tuple[int, ...], *, failed: bool = False) -> None:
        work.steps.close()
        if work.request:
            del self._loading[work.request]
            if bad:
                self._report.lost.add(work.request)
            self._ended.append((self._event(), work.request, bad))
        else:
            self._learning.remove(work)
            if failed:
                self._report.failed.add(work.job)
            self._copied.append((self._event(), work.job))

    def _event(self) -> Any:
        """When the copies that were issued until now are done; None where they are done already."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    # -- inside: jobs ------------------------------------------------------------------------------------------------

    def _load(self, copies: tuple[PageCopy, ...], ready: bool) -> Generator[Cost, None, None]:
        self._check(copies)
        tokens = sum(len(copy.blocks) for copy in copies) * self._block_size
        for layer in range(self._pages.layers):
            while not (ready or self._arrived(copies, layer)):
                yield 0
            for copy in copies:
                self._pages.load(layer, copy.blocks, self._part(copy.slot, layer), copy.first)
            yield tokens // COPY_COST + 1
        self._check(copies)  # nobody took a slot away meanwhile

    def _blend(self, job: BlendJob) -> Generator[Cost, None, None]:
        assert self._layers is not None
        if job.copies:
            yield from self._load(job.copies, job.ready)
        self._check(job.documents)
        blend = PagedBlend(
            self._layers,
            job,
            self._shape,
            self._rows,
            lambda piece, layer: self._part(piece.slot, layer),
            lambda layer: job.ready or self._arrived(job.documents, layer),
        )
        yield from blend.steps()
        self._check(job.documents)
        self._report.blended[job.request] = blend.result

    def _learn(self, job: LearnJob) -> Generator[Cost, None, None]:
        layers = self._layers
        assert layers is not None
        tokens = torch.tensor(job.tokens, device=layers.device)
        blocks = torch.tensor(job.blocks, device=layers.device)
        yield from prefill(layers, tokens, blocks, self._rows)
        for index, slot in enumerate(job.slots):
            start, stop = index * job.chunk, min((index + 1) * job.chunk, len(job.tokens))
            if slot >= 0:
                self._save_tokens(slot, blocks, start, stop)
            yield (stop - start) * layers.depth // COPY_COST + 1

    def _save_all(self, jobs: list[SaveJob]) -> None:
        for job in jobs:
            try:
                if job.tokens is None:
                    for layer in range(self._pages.layers):
                        self._pages.save(layer, job.blocks, self._part(job.slot, layer))
                else:
                    blocks = torch.tensor(job.blocks, device=self._layers.device)  # type: ignore[union-attr]
                    self._save_tokens(job.slot, blocks, *job.tokens)
            except Exception:
                log.exception("lmc could not save a chunk")
                self._report.failed.add(job.job)
        event = self._event()
        self._copied += [(event, job.job) for job in jobs]

    def _save_tokens(self, slot: int, blocks: torch.Tensor, start: int, stop: int) -> None:
        assert self._layers is not None
        for layer in range(self._layers.depth):
            part = self._shape.part(self._part(slot, layer), stop - start)
            read_tokens(self._layers, layer, blocks, start, stop, part)

    # -- inside: the slab --------------------------------------------------------------------------------------------

    def _attach(self, at: SlabAt, stages: tuple[int, ...]) -> None:
        self._slab = Slab.attach(at)
        self._ranks, self._rank = get_tp_group().world_size, get_tp_group().rank_in_group
        # Layer by layer, ranks side by side; a pipeline stage behind those before it.
        self._first_part = sum(stages[: get_pp_group().rank_in_group]) * self._ranks

    def _part(self, slot: int, layer: int) -> torch.Tensor:
        assert self._slab is not None
        return self._slab.part(Slot(slot), self._first_part + layer * self._ranks + self._rank)

    def _arrived(self, wanted: "tuple[PageCopy, ...] | tuple[DocumentPart, ...]", layer: int) -> bool:
        """Whether all ranks' parts of a layer are in all slots; raise `ChunkLost` if they never will be. The same on every rank."""
        assert self._slab is not None
        least = self._first_part + (layer + 1) * self._ranks
        ready = [self._slab.ready(Slot(part.slot), part.tag) for part in wanted]
        there, lost = all(n >= least for n in ready), any(n == LOST for n in ready)
        there, kept = all_of([there, not lost], self._device)
        if not kept:
            raise ChunkLost([])
        return there

    def _check(self, wanted: "tuple[PageCopy, ...] | tuple[DocumentPart, ...]") -> None:
        self._arrived(wanted, -1)

    @property
    def _block_size(self) -> int:
        size: int = self._config.cache_config.block_size
        return size


def _blocks(copies: tuple[PageCopy, ...]) -> tuple[int, ...]:
    return tuple(block for copy in copies for block in copy.blocks)
