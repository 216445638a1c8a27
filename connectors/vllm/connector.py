"""`LMCConnector` implements vLLM's connector interface.

It translates between vLLM's terms and lmc's terms, and leaves decisions to `Scheduler` and `Worker`.

vLLM creates one connector in the scheduler's process and one in each worker. They share only the slab, and exchange
metadata, even if both are in one process.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from lmc.blend.learn_prefix import learn_prefix
from lmc.blend.markers import Markers
from lmc.config.settings import Settings
from lmc.connectors.vllm import multi, vllm_api
from lmc.connectors.vllm.guard import HookGuard
from lmc.connectors.vllm.messages import StepPlan, StepReport, Table, WorkerFacts
from lmc.connectors.vllm.model_identity import model_identity
from lmc.connectors.vllm.model_kinds import (
    describe_sharing_layers,
    objection,
    price_of_one_table,
    states_of,
    use_one_table,
    windows_of,
)
from lmc.connectors.vllm.plugin import join_log, loaded_draft_model, loaded_model
from lmc.connectors.vllm.scheduler.admin import Administration, serve_if_wanted
from lmc.connectors.vllm.scheduler.kv_groups import KVGroups
from lmc.connectors.vllm.scheduler.scheduler import Scheduler
from lmc.connectors.vllm.start import (
    Setup,
    check_chunk_size,
    layers_of_stages,
    open_engine,
    publisher_if_wanted,
    settings_of_engine,
    with_fitting_chunks,
)
from lmc.connectors.vllm.stats import LmcPromMetrics, LmcStats
from lmc.connectors.vllm.worker.worker import Worker
from lmc.documents.publisher import DocumentPublisher
from lmc.engine import CacheEngine
from lmc.errors import ConfigError, InputError
from lmc.http.address import check_addresses
from lmc.metrics import key
from lmc.open_store import check_server
from lmc.storage.places import place_of
from lmc.storage.tiers.opening import described

T = TypeVar("T")

log = logging.getLogger(__name__)

COUNT_SECONDS = 1.0  # time between two reports of numbers while requests only run
# Maximal number of steps that an engine without requests makes until its workers have sent their facts.
MAX_WAIT_STEPS = 100


class Handshake(vllm_api.KVConnectorHandshakeMetadata):
    """Carries a worker's facts to the scheduler; None if lmc failed at the worker's start."""

    def __init__(self, facts: WorkerFacts | None) -> None:
        self.facts = facts


class Metadata(vllm_api.KVConnectorMetadata):
    """Carries a step's plan to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class WorkerMetadata(vllm_api.KVConnectorWorkerMetadata):
    """Carries the workers' reports to the scheduler."""

    def __init__(self, report: StepReport, facts: tuple[WorkerFacts, ...] = ()) -> None:
        self.report = report
        self.facts = facts  # facts of workers that report for the first time, if there are other connectors

    def aggregate(self, other: "WorkerMetadata") -> "WorkerMetadata":
        """Merge the reports of two ranks."""
        return WorkerMetadata(self.report.merge(other.report), (*self.facts, *other.facts))


class LMCConnector(vllm_api.KVConnectorBase_V1, vllm_api.SupportsHMA):
    """Exact KV offload and CacheBlend for an unmodified vLLM.

    An engine whose model lmc does not support starts as well, and so does one in which lmc fails at the start: both
    sides of lmc are then idle.
    """

    _objection = ""  # why lmc does nothing
    _is_alone = False  # whether the worker has registered as the engine's only connector
    _wait_steps = 0  # remaining steps that the engine makes, even without requests, to get the workers' facts
    _worker: Worker | None = None
    _scheduler: Scheduler | None = None

    def __init__(self, vllm_config: vllm_api.VllmConfig, role: vllm_api.KVConnectorRole, kv_cache_config: Any) -> None:
        """Read the settings. Raises `ConfigError` if they do not fit this engine, `TierUnusable` without its server."""
        join_log()
        is_scheduler = role is vllm_api.KVConnectorRole.SCHEDULER
        if is_scheduler:
            vllm_api.warn_if_untested()
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._config = vllm_config
        parallel = vllm_config.parallel_config
        engines, number = parallel.data_parallel_size, parallel.data_parallel_index
        self.settings = settings_of_engine(Settings.load(transfer.kv_connector_extra_config), engines, number)
        if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
            raise ConfigError("lmc does not support context parallelism: start vLLM without it, or without lmc")
        self._windows: tuple[int, ...] = ()
        self._states: frozenset[int] = frozenset()
        self._stop_admin: Callable[[], None] | None = None
        self._publisher: DocumentPublisher | None = None
        self._facts: WorkerFacts | None = None
        self._reports_facts = False
        self._early_requests: list[Any] = []
        self._early_facts: dict[tuple[int, int], WorkerFacts] = {}
        self._counted: dict[str, float] = {}
        self._counts_at = 0.0  # time of the next report of numbers, unless there is news earlier
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()  # requests whose load has failed, if layers have windows
        # With tensor parallelism, a worker raises its errors: if it skipped work, the other ranks would wait forever.
        among_ranks = parallel.tensor_parallel_size > 1 and not is_scheduler
        self._guard = HookGuard(raises=among_ranks, switches=is_scheduler)
        with self._guard.part_of_start(self._disable):
            self._examine_model(kv_cache_config, is_scheduler=is_scheduler)

    def _examine_model(self, kv_cache_config: Any, *, is_scheduler: bool) -> None:
        """Decide whether and how lmc serves the engine's model, and create the worker's side."""
        config, block_size = self._config, self._config.cache_config.block_size
        self._objection = objection(config.model_config, kv_cache_config)
        if self._objection:
            if is_scheduler:
                log.warning("lmc is disabled for this model: %s", self._objection)
            return
        self._windows, self._states = windows_of(kv_cache_config), states_of(kv_cache_config)
        if is_scheduler:
            check_server(self.settings)
        use_one_table(config)
        if is_scheduler and len(self._windows) == 1 and (price := price_of_one_table(config.model_config)):
            log.warning(price)
        if self._states:
            self.settings = with_fitting_chunks(self.settings, block_size)
        check_chunk_size(self.settings, block_size)
        transfer = config.kv_transfer_config
        if not is_scheduler:
            describe_sharing_layers(config, kv_cache_config)
            self._worker = Worker(config, kv_cache_config, blends=self.settings.enable_blending)
        elif transfer.kv_load_failure_policy != "recompute":
            log.warning(
                "kv_load_failure_policy is %r, so a failed load will fail its request: add "
                '"kv_load_failure_policy":"recompute" to --kv-transfer-config',
                transfer.kv_load_failure_policy,
            )

    def _disable(self) -> None:
        """Serve the engine without lmc, after an error at the start."""
        self._objection, self._worker = "lmc failed at its start", None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return false. vLLM calls this before it loads the model, so wrong settings and a missing server raise early.

        Raises `ConfigError` or `TierUnusable`. vLLM does not call it if it uses no full CUDA graphs, as on a CPU.
        """
        settings = Settings.load(extra_config)
        check_addresses(settings)
        check_server(settings)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: vllm_api.VllmConfig) -> str | None:
        """Return None, because lmc supports any layout. vLLM calls this just before it groups layers by cache type."""
        with HookGuard().part_of_start(lambda: None):  # Its error is raised again when the connector is created.
            use_one_table(vllm_config)
        return None

    # -- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Examine the engine's KV cache and model."""
        if self._worker is None:
            return
        with self._guard.part_of_start(self._disable):
            others = multi.neighbours(self, vllm_api.get_kv_transfer_group())
            self._is_alone = others is None
            why_not = multi.blending_objection(others or [])
            self._facts = self._worker.register(kv_caches, loaded_model(), loaded_draft_model(), why_not)
            self._reports_facts = not self._is_alone

    def get_handshake_metadata(self) -> Handshake | None:
        """Return this worker's facts for the scheduler; None if there are other connectors, or if lmc is idle."""
        return Handshake(self._facts) if self._is_alone else None

    def unregister_kv_caches(self) -> None:
        """End all loads and learning, because the engine is about to free its KV cache, for example to sleep."""
        worker = self._worker
        if worker is not None:  # A job that raised an error is closed by then, and a second attempt ends the others.
            self._guard.run("unregister_kv_caches", worker.end_all, None, worker.end_all)

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        """Run slices of the loads, blends and learning jobs that are under way."""
        worker = self._worker
        if worker is not None:
            plan = self._get_connector_metadata().plan
            self._guard.run("start_load_kv", lambda: worker.work(plan), None, lambda: worker.fail_work(plan))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads run between the engine's forward passes."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **named: Any) -> None:
        """Do nothing: `wait_for_save` copies blocks that earlier steps have filled."""

    def wait_for_save(self) -> None:
        """Copy blocks that earlier steps have filled. A second call in the same step copies nothing."""
        worker = self._worker
        if worker is not None:
            plan = self._get_connector_metadata().plan
            saves, plan.saves = plan.saves, []
            self._guard.run("wait_for_save", lambda: worker.save(saves), None, lambda: worker.fail_saves(saves))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose load has ended, including requests that were aborted during the load.

        In a step without tokens, this method also saves blocks, because vLLM 0.30 does not call `wait_for_save` there.
        """
        worker = self._worker
        if worker is None:
            return None, None
        plan = self._get_connector_metadata().plan
        if not plan.scheduled:
            self.wait_for_save()
        self._bad_blocks, self._failed = set(), set()
        if not finished_req_ids and not worker.ends_loads:
            return None, None
        # A load that begins in this step belongs to a new request, which may have the id of one that has ended.
        ended_ids = finished_req_ids - {job.request for job in plan.loads}
        self._guard.run("get_finished", lambda: worker.cancel(ended_ids), None)
        ended = self._guard.run("get_finished", worker.outcome, dict[str, Table]())
        if any(self._windows):  # The blocks before an invalid block are not all kept.
            self._failed = {request for request, bad in ended.items() if bad}
        else:
            self._bad_blocks = {block for bad in ended.values() for block in bad}
        return None, set(ended)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return what `get_finished` returns, with the requests whose load has failed if layers have windows."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._failed
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of the loads that failed in this step, if the engine keeps all blocks of a prompt.

        Otherwise it computes the whole prompt of a failed load.
        """
        return self._bad_blocks

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Return the jobs that have ended since the last report. The first report may include this worker's facts."""
        worker = self._worker
        if worker is None or not (worker.has_news or self._guard.has_new_errors or self._reports_facts):
            return None
        report = self._guard.run("build_connector_worker_meta", worker.report, StepReport())
        report.errors = self._guard.new_errors()
        facts = (self._facts,) if self._facts and self._reports_facts else ()
        self._reports_facts = False
        return WorkerMetadata(report, facts) if report or facts else None

    # -- scheduler ---------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Store the block pool. lmc holds blocks while they are copied, and borrows blocks to learn documents."""
        self._pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], vllm_api.KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the store if the metadata has the workers' facts; otherwise the first reports bring them.

        If there are other connectors, the metadata may belong to another connector, or be empty. An engine that wakes
        up passes the metadata again.
        """
        if self._objection or self._scheduler is not None:
            return
        ours = {rank: given.facts for rank, given in metadata.items() if isinstance(given, Handshake)}
        if ours:
            with self._guard.part_of_start(self._disable):
                self._open(ours)
        else:
            self._wait_steps = MAX_WAIT_STEPS

    def _open(self, facts: Mapping[tuple[int, int], WorkerFacts | None]) -> None:
        """Open the store, now that all workers have reported."""
        workers = [worker for rank in sorted(facts) if (worker := facts[rank])]
        cache, settings = self._config.cache_config, self.settings
        if len(facts) != (ranks := self._rank_count()):
            raise ConfigError(
                f"lmc sees {len(facts)} of {ranks} workers, but needs one scheduler for all ranks: use an executor "
                "of kind mp or ray, not external_launcher"
            )
        if len(workers) < ranks:
            self._give_up("it failed at the start of a worker, whose log has the error")
            return
        if self._pool.hash_block_size != cache.block_size:
            log.warning("lmc is disabled, because --prefix-match-unit is not the block size of %d", cache.block_size)
            return
        model = model_identity(self._config, [facts.weights for facts in workers])
        refused = next((facts.refused for facts in workers if facts.refused), "")
        if refused and settings.enable_blending:
            log.warning("blending is off: %s. Exact prefixes are still stored and loaded.", refused)
        # Without blending, `lmc explain` still needs a tokenizer: it says why a prompt given as text is not blended.
        tokenizer = self._tokenizer() if not refused or settings.admin else None
        markers = self._markers(tokenizer) if tokenizer and not refused else None
        prefix = learn_prefix(tokenizer, settings, markers) if markers else ()
        model_config = self._config.model_config
        names: dict[str, Any] = {
            "name": str(model_config.served_model_name or model_config.model),
            "tokenizer": str(model_config.tokenizer or ""),
        }
        groups = KVGroups(self._pool, cache.block_size, self._windows, self._states)
        hashing = cache.prefix_caching_hash_algo
        engine = open_engine(settings, workers, groups, model, hashing, prefix=prefix, **names)
        try:
            self._begin(engine, groups, workers, tokenizer, markers, refused)
        except Exception:
            if self._publisher:
                self._publisher.close()
            engine.close()
            raise

    def _begin(
        self,
        engine: CacheEngine,
        groups: KVGroups,
        workers: Sequence[WorkerFacts],
        tokenizer: Any,
        markers: Markers | None,
        refused: str,
    ) -> None:
        """Create the scheduler over the open store, and start the endpoints that the settings name addresses for."""
        cache, speculative = self._config.cache_config, self._config.speculative_config
        hashing = cache.prefix_caching_hash_algo
        log.info("%s", self._summary(engine, blends=not refused))
        setup = Setup(
            engine=engine,
            groups=groups,
            stages=layers_of_stages(workers),
            ranks=len(workers),
            markers=markers,
            tokenizer=tokenizer,
            blends=not refused,
            refused=refused,
            batch_tokens=self._config.scheduler_config.max_num_batched_tokens,
            decode_tokens=1 + (speculative.num_speculative_tokens if speculative else 0),
            by_priority=self._config.scheduler_config.policy == "priority",
            longest=self._config.model_config.max_model_len,
            caches_prefixes=bool(cache.enable_prefix_caching),
            announces=bool(self._config.kv_events_config and self._config.kv_events_config.enable_kv_cache_events),
            extra_keys=_extra_keys,
            hash_blocks=vllm_api.get_request_block_hasher(cache.block_size, vllm_api.get_hash_fn_by_name(hashing)),
            trace=_trace if self._config.observability_config.otlp_traces_endpoint else None,
            counts_images=self._counts_images(),
        )
        scheduler, number = Scheduler(setup), self._config.parallel_config.data_parallel_index
        self._publisher = publisher_if_wanted(engine, number)
        administration = Administration(setup, scheduler.recent, number, lambda: self._guard.status)
        self._stop_admin = serve_if_wanted(administration)
        self._scheduler = scheduler

    def _counts_images(self) -> bool:
        """Return whether images are numbered instead of hashed, because neither images nor prefixes are cached."""
        multimodal = self._config.model_config.multimodal_config
        caches = self._config.cache_config.enable_prefix_caching
        return bool(multimodal and multimodal.mm_processor_cache_gb == 0 and not caches)

    def _summary(self, engine: CacheEngine, *, blends: bool) -> str:
        """Return a log line that describes the configuration of lmc."""
        settings = self.settings
        reason = "no blending" if settings.enable_blending else "no blending (enable_blending is false)"
        mode = f"blending by {settings.blend_method} {settings.blend_recompute_ratios:g}" if blends else reason
        place = f"({settings.max_local_cpu_size:g} GB), {described(settings)}"
        if settings.server:
            place = f"of the cache server at {settings.server}"
        capacity = f"{engine.store.slots} chunks of {engine.chunk_size} tokens in memory"
        found = f"{engine.recall.count} chunks found{'' if engine.recall.ended else ' so far'}"
        return f"lmc: {mode}, {capacity} {place}, {found}"

    def _tokenizer(self) -> Any:
        tokenizer = vllm_api.cached_tokenizer_from_config(self._config.model_config)
        if tokenizer is None:
            log.warning(
                "prompts are not split at the separator, because the engine lacks a tokenizer (skip_tokenizer_init); "
                "requests must list their documents (kv_transfer_params, lmc.documents)"
            )
        return tokenizer

    def _markers(self, tokenizer: Any) -> Markers:
        try:
            return Markers.of(tokenizer, self.settings.blend_special_str)
        except InputError as error:
            raise ConfigError(str(error)) from error

    def _guarded(self, hook: str, do: Callable[[], T], otherwise: T, repair: Callable[[], object] | None = None) -> T:
        """Run a hook of the scheduler's side. After too many errors, lmc is switched off."""
        result = self._guard.run(hook, do, otherwise, repair)
        if self._guard.off and self._scheduler is not None and not self._scheduler.off:
            self._guard.run("switch off", self._scheduler.switch_off, None)
        return result

    def on_new_request(self, request: Any) -> None:
        """Find the stored chunks of a new request."""
        scheduler = self._scheduler
        if scheduler is not None:
            name = request.request_id
            self._guarded("on_new_request", lambda: scheduler.arrive(request), None, lambda: scheduler.abandon(name))
        elif self._wait_steps:
            self._early_requests.append(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens will be loaded, and whether asynchronously. With None, vLLM asks again later."""
        scheduler = self._scheduler
        if scheduler is None:
            return 0, False
        nothing: int | None = 0
        tokens = self._guarded(
            "get_num_new_matched_tokens",
            lambda: scheduler.claim(request, num_computed_tokens),
            nothing,
            lambda: scheduler.abandon(request.request_id),
        )
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Prepare the load into the blocks that the engine has allocated."""
        scheduler = self._scheduler
        if scheduler is None or not num_external_tokens:
            return
        tables = blocks.get_block_ids()
        self._guarded(
            "update_state_after_alloc",
            lambda: scheduler.allocated(request, tables, num_external_tokens),
            None,
            lambda: scheduler.fail_load(request.request_id, tables),
        )

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return the number of loaded tokens by their source, a `CacheHitSource`."""
        scheduler = self._scheduler
        if scheduler is None:
            return {}
        tokens_by_source: Counter[Any] = Counter()
        places = self._guarded(
            "get_external_cache_hit_sources",
            lambda: scheduler.sources(request, num_external_tokens),
            dict[str, int](),
        )
        for place, count in places.items():
            tokens_by_source[vllm_api.CacheHitSource[place_of(place).hit_source]] += count
        return dict(tokens_by_source)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """Return the step's plan."""
        scheduler = self._scheduler
        if scheduler is None:
            self._wait_for_facts()
            return Metadata(StepPlan())
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        scheduled = scheduler_output.num_scheduled_tokens
        plan = self._guarded(
            "build_connector_meta",
            lambda: scheduler.plan(scheduled, lambda request: state.get_block_ids(request) or ([],)),
            None,
        )
        if plan is None:
            plan = scheduler.take_plan()
            plan.scheduled = sum(scheduled.values())
        return Metadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' reports."""
        scheduler = self._scheduler
        metadata = connector_output.kv_connector_worker_meta
        if scheduler is None:
            if isinstance(metadata, WorkerMetadata):
                self._guarded(
                    "update_connector_output",
                    lambda: self._hear(metadata.facts),
                    None,
                    lambda: self._give_up("its store could not be opened"),
                )
            return
        report = metadata.report if isinstance(metadata, WorkerMetadata) else StepReport()
        received = connector_output.finished_recving or set()
        if not report and not received:
            return
        if report.errors:
            self._guard.add("worker", report.errors)
        self._guarded(
            "update_connector_output",
            lambda: scheduler.reported(report, received),
            None,
            lambda: scheduler.recover(report, received),
        )

    def _hear(self, facts: Iterable[WorkerFacts]) -> None:
        """Collect the facts in the workers' first reports, and open the store when every worker has sent them."""
        self._early_facts |= {worker.rank: worker for worker in facts}
        if len(self._early_facts) < self._rank_count():
            return
        complete, self._early_facts = self._early_facts, {}  # After an error, later reports do not open it again.
        self._open(complete)
        for request in self._early_requests:  # Requests that have already begun are left to the engine.
            if not request.num_computed_tokens and not request.is_finished():
                self.on_new_request(request)
        self._early_requests.clear()

    def _wait_for_facts(self) -> None:
        """Count a step without the facts of all workers, and give up after `MAX_WAIT_STEPS` steps."""
        if self._wait_steps == 1:
            self._give_up(f"only {len(self._early_facts)} of {self._rank_count()} workers sent their facts")
        self._wait_steps = max(0, self._wait_steps - 1)

    def _give_up(self, reason: str) -> None:
        """Serve the engine without lmc."""
        log.warning("lmc was disabled, because %s", reason)
        self._early_requests.clear()
        self._wait_steps = 0

    def _rank_count(self) -> int:
        """Return the number of workers."""
        parallel = self._config.parallel_config
        count: int = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return count

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save the last blocks of an ended request, and return facts for its response.

        The engine may free the blocks at once: blocks that are still being copied are held by their reference count.
        """
        facts: dict[str, Any] | None = None
        if (scheduler := self._scheduler) is not None:
            name = request.request_id
            facts = self._guarded(
                "request_finished", lambda: scheduler.finished(request, block_ids), facts, lambda: scheduler.drop(name)
            )
        return False, {"lmc": facts} if facts else None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Call `request_finished_all_groups` with the only block table."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """Return whether lmc needs steps to save or to learn, even without requests."""
        scheduler = self._scheduler
        if scheduler is None:
            return self._wait_steps > 0
        return self._guarded("has_pending_push_work", lambda: scheduler.busy, False)

    def reset_cache(self) -> bool | None:
        """Remove every chunk. If that fails, lmc is switched off, because its chunks may belong to other weights."""
        scheduler = self._scheduler
        if scheduler is None:
            return True

        def reset() -> bool:
            scheduler.reset()
            return True

        return self._guarded("reset_cache", reset, False, scheduler.switch_off)

    def shutdown(self) -> None:
        """Write chunks that the tiers lack, and close the store. An error in one part does not keep others open."""
        if self._scheduler is None:
            return
        for close in (self._stop_admin, self._scheduler.close, self._publisher and self._publisher.close):
            if close:
                self._guard.run("shutdown", close, None)
        if not self._guard.errors["shutdown"]:
            log.info("lmc: closed the store, and all chunks are written")

    def take_events(self) -> Iterable[Any]:
        """Return events for blocks that appeared in or left memory ("CPU") or disk ("STORAGE")."""
        if self._scheduler is None or self._scheduler.events is None:
            return ()
        return self._guarded("take_events", lambda: list(self._events()), [])

    def _events(self) -> Iterator[Any]:
        assert self._scheduler is not None
        size = self._config.cache_config.block_size
        for change in self._scheduler.take_events():
            details, hashes = change.details, [vllm_api.maybe_convert_block_hash(h) for h in change.details.hashes]
            if not change.stored:
                yield vllm_api.BlockRemoved(block_hashes=[hashes[i] for i in change.blocks], medium=change.medium)
                continue
            for place in change.blocks:  # Each block has its own parent, and therefore its own event.
                parent = details.hashes[place - 1] if place else details.parent
                yield vllm_api.BlockStored(
                    block_hashes=[hashes[place]],
                    parent_block_hash=None if parent is None else vllm_api.maybe_convert_block_hash(parent),
                    token_ids=list(details.tokens[place * size : (place + 1) * size]),
                    block_size=size,
                    lora_id=details.lora_id,
                    medium=change.medium,
                    lora_name=details.lora_name,
                    extra_keys=[details.extra_keys[place]] if any(details.extra_keys) else None,
                )

    # -- numbers -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> LmcStats | None:
        """Return the changes of all numbers since the last report; None if it is not time for a report.

        vLLM calls this in every step. Numbers are reported when a request or a job has ended, otherwise once a second.
        """
        now = time.monotonic()
        if self._scheduler is None:
            return None
        if now < self._counts_at and not self._scheduler.has_news and not self._guard.has_new_errors:
            return None
        self._scheduler.has_news, self._counts_at = False, now + COUNT_SECONDS
        self._guard.new_errors()
        numbers = self._guarded("get_kv_connector_stats", self._scheduler.numbers, dict[str, float]())
        observed = self._guarded("get_kv_connector_stats", self._scheduler.take_observed, dict[str, list[float]]())
        numbers |= {key("errors", (hook,)): count for hook, count in self._guard.errors.items()}
        before, self._counted = self._counted, {**self._counted, **numbers}
        # Zeros are reported once, because the rate of a metric needs a value before the first count.
        counted = self._counted.items()
        changes = {name: count - before.get(name, 0) for name, count in counted if count != before.get(name)}
        return LmcStats(data=changes | observed)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LmcStats:
        """Return numbers for the log line."""
        return LmcStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> LmcPromMetrics:
        """Return the metrics `lmc:*` of `/metrics`."""
        return LmcPromMetrics(*arguments)


def _trace(request: Any, name: str, start: float, stop: float, attributes: Mapping[str, Any]) -> None:
    """Send an OpenTelemetry span of a request's trace, from `start` to `stop` in seconds since 1970."""
    context = vllm_api.extract_trace_context(request.trace_headers)
    vllm_api.instrument_manual(name, int(start * 1e9), int(stop * 1e9), dict(attributes), context)


def _extra_keys(request: Any, start: int, stop: int) -> tuple[Any, ...] | None:
    """Return what the hash of a request's block covers in addition to tokens, in the form of the engine's events."""
    keys, _ = vllm_api.generate_block_hash_extra_keys(request, start, stop, 0)
    published = vllm_api.to_event_extra_keys([keys])
    return published[0] if published else None
