"""A store's metrics for Prometheus, and an endpoint for programs without their own server.

    register(cached.engine)       # lmc_* of this store, in this process's registry
    serve_metrics(9400)           # http://127.0.0.1:9400/metrics

Both connectors use these names, labels and help texts. This module counts nothing: a scrape reads the store's counts.
A vLLM server exports the same metrics as `lmc:*` (`connectors/vllm/stats.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmc.errors import InputError
from lmc.storage.places import PLACES, place_of
from lmc.storage.stats import StoreStats, Verb

Labels = tuple[str, ...]  # values, in the order of `Name.labels`
BYTE_DIRECTIONS: tuple[Verb, ...] = ("read", "write")  # directions of bytes
TIMED_OPERATIONS: tuple[Verb, ...] = (*BYTE_DIRECTIONS, "lookup")  # operations whose seconds are counted


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a metric, between `lmc_` or `lmc:` and a counter's `_total`."""

    name: str
    what: str
    labels: Labels = ()
    gauge: bool = False
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram


OF_STORES = (
    Name("hits", "lookups of chunks that found the chunk, by tier", ("place",)),
    Name("misses", "lookups of chunks that found nothing, or no free slot"),
    Name("bytes", "bytes read from or written to a tier", ("tier", "direction")),
    Name("seconds", "time spent in a tier, summed over threads", ("tier", "direction")),
    Name("written_chunks", "chunks stored on a tier", ("tier",)),
    Name(
        "dropped_writes",
        "chunks that were not written to a tier, because the write queue was full or the tier was unusable",
    ),
    Name("failures", "failed operations of a tier; each is a miss or a lost write", ("tier",)),
    Name("corrupt_records", "records whose bytes differed from the written bytes; each is a miss", ("tier",)),
    Name("no_room", "chunks without a memory slot, because no slot was free or evictable"),
    Name("evictions", "evicted chunks, by tier", ("place",)),
    Name("document_evictions", "evicted chunks of documents, by tier; included in evictions", ("place",)),
    Name("write_queue_depth", "chunks waiting to be written to tiers", gauge=True),
    Name("chunks", "chunks in a tier now", ("place",), gauge=True),
    Name("chunk_tokens", "tokens of the chunks in a tier now", ("place",), gauge=True),
    Name("tier_usable", "1 if a tier is usable, 0 while it is skipped after repeated failures", ("tier",), gauge=True),
)

OF_REQUESTS = (  # A vLLM server counts all of them; `Prefills` of the transformers connector counts some.
    Name("requests", "requests that arrived at lmc"),
    Name("loads", "requests for which exact pages were loaded"),
    Name("loads_skipped", "requests whose load was skipped or ended early, because prefill was expected to be faster"),
    Name("blends", "requests whose documents were blended"),
    Name("blends_continued", "requests that continued from an earlier blend in the engine's own cache"),
    Name("backfills", "blended conversations recomputed exactly while the engine was idle"),
    Name("blends_skipped", "requests that were not blended because prefill was expected to be faster"),
    Name("refused", "requests served without the blend or the learning that they requested"),
    Name("errors", "errors of lmc that its guard caught, by hook of the engine", ("hook",)),
    Name("switched_off", "1 if lmc switched itself off after errors, else 0", gauge=True),
    Name("attached", "1 if the store is that of a cache server, which counts the same chunks, else 0", gauge=True),
    Name("failed_loads", "failed loads, which the engine computed instead"),
    *(Name(f"tokens_from_{place.name}", f"tokens whose KV came from {place.title}") for place in PLACES),
    Name("token_layers", "tokens computed by blends, summed over layers"),
    Name("stored_chunks", "chunks stored by requests"),
    Name("stored_tokens", "tokens stored by requests"),
    Name("documents_known", "documents in prompts that were already stored"),
    Name("documents_unknown", "documents in prompts that were not stored"),
    Name("documents_learned", "documents learned"),
    Name("repeated_documents", "texts queued to be learned because prompts repeat them (blend_find: repeated)"),
    Name("repeated_tokens", "reused tokens of documents that were learned because prompts repeat them"),
    Name("capacity_tokens", "document tokens that fit into a tier", ("place",), gauge=True),
    Name("layers", "layers of the model, the divisor of token_layers", gauge=True),
)

SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
SHARE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
TOKEN_BUCKETS = (0.0, 64.0, 256.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 131072.0)
HISTOGRAMS = (  # of requests to a vLLM server; the label `mode` is full, exact, blend or learn
    Name("ttft_seconds", "time from a request's arrival to its first token", ("mode",), buckets=SECONDS_BUCKETS),
    Name("load_seconds", "time in which workers loaded or blended a request's KV", ("mode",), buckets=SECONDS_BUCKETS),
    Name("budget", "share of the reused tokens that a blend recomputed", buckets=SHARE_BUCKETS),
    Name("reused_tokens", "tokens of a prompt whose KV came from the store", ("mode",), buckets=TOKEN_BUCKETS),
)

NAMES = {name.name: name for name in (*OF_STORES, *OF_REQUESTS, *HISTOGRAMS)}


def values(stats: StoreStats) -> dict[str, dict[Labels, float]]:
    """Return the counts of a store, by the names of `OF_STORES` and their labels.

    A count without any event is zero. Without this zero, a rate would miss the first corrupt record. What is present in
    a tier that hosts share is not counted.
    """
    tiers, places = stats.usable, [*stats.evictions, *stats.usable]
    counted = [place for place in places if place_of(place).medium]
    return {
        "hits": _each(places, stats.hits),
        "misses": {(): stats.misses},
        "bytes": {
            (tier, direction): stats.bytes.get((tier, direction), 0) for tier in tiers for direction in BYTE_DIRECTIONS
        },
        "seconds": {
            (tier, direction): stats.seconds.get((tier, direction), 0.0)
            for tier in tiers
            for direction in TIMED_OPERATIONS
        },
        "written_chunks": _each(tiers, stats.writes),
        "dropped_writes": {(): stats.dropped_writes},
        "failures": _each(tiers, stats.failed),
        "corrupt_records": _each(tiers, stats.corrupt),
        "no_room": {(): stats.no_room},
        "evictions": _each((), stats.evictions),
        "document_evictions": _each((), stats.document_evictions),
        "write_queue_depth": {(): stats.queued},
        "chunks": _each(counted, {place: chunks for place, (chunks, _) in stats.present.items()}),
        "chunk_tokens": _each(counted, {place: tokens for place, (_, tokens) in stats.present.items()}),
        "tier_usable": _each((), stats.usable),
    }


def flat(stats: StoreStats) -> dict[str, float]:
    """Return the counts of `values` as plain data for other processes, with keys such as `bytes|disk|read`."""
    return {key(name, labels): value for name, by in values(stats).items() for labels, value in by.items()}


def key(name: str, labels: Labels) -> str:
    """Return a metric's key in plain data: its name and labels, joined by `|`."""
    return "|".join((name, *labels))


def parted(flat_key: str) -> tuple[str, Labels]:
    """Return the metric's name and the labels of a key that `key` has made."""
    name, *labels = flat_key.split("|")
    return name, tuple(labels)


class Counted(Protocol):
    """A store or an engine, whose metrics can be registered."""

    def stats(self) -> StoreStats:
        """Return the store's counts since its start."""


class StoreCollector(Collector):
    """The metrics `lmc_*` of one store, read from the store at every scrape."""

    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Return the metric names, without reading the store."""
        return [_family(name) for name in OF_STORES]

    def collect(self) -> Iterator[Metric]:
        """Return all metrics with their current values."""
        counts = values(self._stats())
        for name in OF_STORES:
            family = _family(name)
            for labels, value in counts[name.name].items():
                family.add_metric(labels, value)
            yield family


def register(of: Counted, registry: CollectorRegistry = REGISTRY) -> StoreCollector:
    """Export the metrics of a store or an engine in a registry.

    `registry.unregister` with the returned collector ends this.
    Raises `InputError` if the registry exports a store already.
    """
    collector = StoreCollector(of.stats)
    try:
        registry.register(collector)
    except ValueError as error:
        raise InputError("the registry already exports a store: unregister it, or use another registry") from error
    return collector


def serve_metrics(port: int, host: str = "127.0.0.1", registry: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Serve `http://host:port/metrics` from a thread, and return the function that stops it.

    The endpoint has no password. Therefore only this machine can reach it, unless `host` is set to another address.
    Raises `InputError` if the port cannot be opened.
    """
    try:
        server, thread = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        raise InputError(f"cannot serve metrics at {host}:{port}: {error.strerror}; choose another port") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _each(labels: Iterable[str], counts: Mapping[str, float]) -> dict[Labels, float]:
    return {(label,): counts.get(label, 0) for label in dict.fromkeys((*labels, *counts))}


def _family(name: Name) -> CounterMetricFamily | GaugeMetricFamily:
    family = GaugeMetricFamily if name.gauge else CounterMetricFamily
    return family(f"lmc_{name.name}", f"lmc: {name.what}", labels=name.labels)
