"""`LMCConnector`: vLLM's words on the left, ours on the right. Decides nothing; `scheduler.py` and `worker.py` do.

Verified with vLLM 0.32. One object lives in the scheduler's process, one in each worker; they share nothing but the slab and what
travels in metadata, also where both are in one process.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from lmc.blend.segments import Variants, separator_variants
from lmc.config import Settings
from lmc.connectors.vllm.library import Library, check_chunk_size
from lmc.connectors.vllm.messages import StepPlan, StepReport, WorkerFacts
from lmc.connectors.vllm.plugin import join_log, loaded_model
from lmc.connectors.vllm.scheduler import Scheduler
from lmc.connectors.vllm.stats import LmcPromMetrics, LmcStats
from lmc.connectors.vllm.worker import Worker
from lmc.errors import ConfigError, InputError
from lmc.remote import parse_remote

log = logging.getLogger(__name__)

SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


class Handshake(KVConnectorHandshakeMetadata):
    """A worker's facts, on their way to the scheduler."""

    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts


class Metadata(KVConnectorMetadata):
    """A step's plan, on its way to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers' reports, on their way to the scheduler."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Of two ranks."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.merge(other.report))


class LMCConnector(KVConnectorBase_V1):
    """Exact offload and CacheBlend for an unmodified vLLM."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Read the settings; raise `ConfigError` for what cannot work."""
        join_log()
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._config = vllm_config
        self.settings = Settings.load(transfer.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
            raise ConfigError(
                "context parallelism spreads a block's tokens over ranks, which lmc cannot keep: use it without lmc"
            )
        check_chunk_size(self.settings, vllm_config.cache_config.block_size)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._counted: dict[str, float] = {}
        if role is KVConnectorRole.WORKER:
            self._worker = Worker(vllm_config, kv_cache_config, blends=self.settings.enable_blending)
        elif transfer.kv_load_failure_policy != "recompute":
            log.warning(
                'kv_load_failure_policy is %r: a load that fails will fail its request; add "kv_load_failure_policy":"recompute" '
                "to --kv-transfer-config",
                transfer.kv_load_failure_policy,
            )

    # -- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's KV cache is there: look at it, and at the model."""
        assert self._worker is not None
        self._facts = self._worker.register(kv_caches, loaded_model())

    def get_handshake_metadata(self) -> Handshake:
        """Tell the scheduler what kind of worker this is."""
        return Handshake(self._facts)

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        """Loads, blends, learning: a slice."""
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        self._worker.work(metadata.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded inside a forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **named: Any) -> None:
        """Nothing is saved inside a forward."""

    def wait_for_save(self) -> None:
        """Behind the forward: copy what it has completed."""
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        self._worker.save(metadata.plan.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load is over, also those that were aborted in its middle."""
        assert self._worker is not None
        self._worker.cancel(finished_req_ids)
        self._outcome = self._worker.outcome()
        return None, self._outcome.received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the loads that ended in this step and failed."""
        return self._outcome.bad_blocks

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """What was saved, learned, blended."""
        assert self._worker is not None
        report = self._worker.report()
        return WorkerMetadata(report) if report else None

    # -- scheduler ---------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The engine's blocks: held while they are copied, lent while documents are learned."""
        self._pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers are there: open the store."""
        if not self._config.model_config.is_prefix_caching_supported:
            log.warning("lmc does nothing for this model: what it pools needs every token of a prompt")
            return
        workers = [metadata[rank].facts for rank in sorted(metadata)]
        cache = self._config.cache_config
        parallel, settings = self._config.parallel_config, self.settings
        if len(workers) != parallel.tensor_parallel_size * parallel.pipeline_parallel_size:
            raise ConfigError(
                f"{len(workers)} of {parallel.tensor_parallel_size * parallel.pipeline_parallel_size} workers are this engine's own: "
                "lmc needs one scheduler for all ranks (an executor of kind mp or ray, not external_launcher)"
            )
        if parallel.data_parallel_size > 1 and settings.local_disk:  # one engine per directory
            settings = settings.model_copy(
                update={"local_disk": settings.local_disk / f"dp{parallel.data_parallel_index}"}
            )
        library = Library(settings, workers, cache.block_size, cache.prefix_caching_hash_algo)
        refused = next((facts.refused for facts in workers if facts.refused), "")
        if refused and self.settings.enable_blending:
            log.warning("blending is off: %s. Exact offload goes on.", refused)
        variants, first_token = self._separators() if not refused else (None, None)
        log.info("%s", self._said(library, blends=not refused))
        self._scheduler = Scheduler(
            self.settings,
            library,
            self._pool,
            variants=variants,
            first_token=first_token,
            blends=not refused,
            batch_tokens=self._config.scheduler_config.max_num_batched_tokens,
            tells=bool(self._config.kv_events_config and self._config.kv_events_config.enable_kv_cache_events),
            counts_images=self._counts_images(),
        )

    def _counts_images(self) -> bool:
        """Whether the engine numbers multimodal inputs instead of hashing them, as it does if it caches neither them nor prefixes."""
        multimodal = self._config.model_config.multimodal_config
        caches = self._config.cache_config.enable_prefix_caching
        return bool(multimodal and multimodal.mm_processor_cache_gb == 0 and not caches)

    def _said(self, library: Library, *, blends: bool) -> str:
        """What a person who starts the engine wants to see."""
        settings = self.settings
        off = "no blending" if settings.enable_blending else "no blending (enable_blending is false)"
        how = f"blending by {settings.blend_strategy} {settings.blend_recompute_ratios[0]:g}" if blends else off
        disk = f"{settings.local_disk} ({settings.max_local_disk_size:g} GB)" if settings.local_disk else "no disk"
        redis = f", {parse_remote(settings.remote_url)}" if settings.remote_url else ""
        room = f"{library.slots} chunks of {library.chunk} tokens in memory"
        return f"lmc: {how}, {room} ({settings.max_local_cpu_size:g} GB), {disk}{redis}, {len(library.store.keys())} chunks found"

    def _separators(self) -> tuple[Variants | None, int | None]:
        tokenizer = cached_tokenizer_from_config(self._config.model_config)
        if tokenizer is None:
            log.warning(
                "there is no tokenizer (skip_tokenizer_init): the special string is not looked for, documents have to be given per request"
            )
            return None, None
        try:
            variants = separator_variants(tokenizer.encode, self.settings.blend_special_str)
        except InputError as error:
            raise ConfigError(str(error)) from error
        return variants, tokenizer.bos_token_id

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        if self._scheduler is not None:
            self._scheduler.arrive(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much will be loaded; always beside the steps, never inside one."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.claim(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """There are blocks to load into."""
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """By tier; what a blend computes comes from nowhere."""
        found: dict[CacheHitSource, int] = {}
        places = self._scheduler.sources(request, num_external_tokens) if self._scheduler else {}
        for place, count in places.items():
            source = SOURCES.get(place, CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[source] = found.get(source, 0) + count
        return found

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Metadata:
        """The step's plan."""
        if self._scheduler is None:
            return Metadata(StepPlan())
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        plan = self._scheduler.plan(
            scheduler_output.num_scheduled_tokens,
            lambda request: (state.get_block_ids(request) or ([],))[0],
        )
        return Metadata(plan)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers have done."""
        if self._scheduler is None:
            return
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.report if isinstance(metadata, WorkerMetadata) else StepReport()
        self._scheduler.reported(report, connector_output.finished_recving or set())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Its blocks are held by reference count where they are still copied, so it may go at once."""
        facts = self._scheduler.finished(request, block_ids) if self._scheduler else None
        return False, {"lmc": facts} if facts else None

    def has_pending_push_work(self) -> bool:
        """Whether steps are wanted although there is no request: something is saved or learned."""
        return self._scheduler is not None and self._scheduler.busy

    def reset_cache(self) -> bool | None:
        """Forget every chunk."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def shutdown(self) -> None:
        """Write down what is not on a tier yet."""
        if self._scheduler is not None:
            self._scheduler.library.close()
            log.info("lmc: the store is closed, all that was to be written is written")

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks that came to memory ("CPU") or disk ("STORAGE"), or went."""
        if self._scheduler is None or self._scheduler.events is None:
            return
        size = self._config.cache_config.block_size
        for change in self._scheduler.events.take():
            told, hashes = change.told, [maybe_convert_block_hash(h) for h in change.told.hashes]
            if not change.stored:
                yield BlockRemoved(block_hashes=[hashes[i] for i in change.blocks], medium=change.medium)
                continue
            for place in change.blocks:  # one event a block: its parent is another one than its neighbour's
                parent = told.hashes[place - 1] if place else told.parent
                yield BlockStored(
                    block_hashes=[hashes[place]],
                    parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                    token_ids=list(told.tokens[place * size : (place + 1) * size]),
                    block_size=size,
                    lora_id=told.lora_id,
                    medium=change.medium,
                    lora_name=told.lora_name,
                )

    # -- numbers -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> LmcStats | None:
        """What has been counted since the last time."""
        if self._scheduler is None:
            return None
        counts = self._scheduler.numbers()
        before, self._counted = self._counted, counts
        # A number that is zero is told once: a rate needs a value before the first that counts.
        found = {key: count - before.get(key, 0) for key, count in counts.items() if count != before.get(key)}
        return LmcStats(data=found)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LmcStats:
        """What the log line adds up."""
        return LmcStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LmcPromMetrics:
        """`lmc:*` in `/metrics`."""
        return LmcPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
