"""A store's numbers for Prometheus: names, labels and help texts of both connectors, and an endpoint for programs without a server.

    register(cached.engine)       # lmc_* of this store, in this process's registry
    serve_metrics(9400)           # http://127.0.0.1:9400/metrics

Nothing is counted here: a scrape asks the store. A vLLM server has the same under `lmc:*` (`connectors/vllm/stats.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmc.errors import InputError
from lmc.storage.stats import StoreStats, Verb
from lmc.storage.store import Store

if TYPE_CHECKING:
    from lmc.engine import CacheEngine

Labels = tuple[str, ...]  # values, in the order of `Name.labels`
MOVED: tuple[Verb, ...] = ("read", "write")  # directions of bytes
TIMED: tuple[Verb, ...] = (*MOVED, "lookup")  # and of seconds


@dataclass(frozen=True, slots=True)
class Name:
    """A metric: behind `lmc_` or `lmc:`, and a counter's before `_total`."""

    name: str
    what: str
    labels: Labels = ()
    gauge: bool = False


OF_STORES = (
    Name("hits", "chunks that were found, by place", ("place",)),
    Name("misses", "chunks that were wanted and not found, or had no room"),
    Name("bytes", "bytes read from and written to a tier", ("tier", "direction")),
    Name("seconds", "time spent in a tier, summed over threads", ("tier", "direction")),
    Name("written_chunks", "chunks stored on a tier", ("tier",)),
    Name("dropped_writes", "chunks that were not written down: the queue was full, or the tier not usable"),
    Name("failures", "operations that a tier failed at, each a miss or a write that did not happen", ("tier",)),
    Name("corrupt_records", "records whose bytes were not what had been written, each a miss", ("tier",)),
    Name("no_room", "chunks that found every slot of the memory held"),
    Name("evictions", "chunks evicted, by place", ("place",)),
    Name("write_queue_depth", "chunks that wait to be copied or written", gauge=True),
    Name("tier_usable", "1, or 0 while a tier that keeps failing is left alone", ("tier",), gauge=True),
)

OF_REQUESTS = (  # a vLLM server has all of them, `Prefills` some
    Name("requests", "requests seen"),
    Name("loads", "requests for which exact pages were loaded"),
    Name("loads_skipped", "loads that were not begun because computing was expected to be faster"),
    Name("blends", "requests whose documents were blended"),
    Name("refused", "requests served exactly although they asked for more"),
    Name("failed_loads", "loads that failed and were computed by the engine instead"),
    Name("tokens_from_host", "tokens whose KV came from memory"),
    Name("tokens_from_disk", "tokens whose KV came from disk"),
    Name("tokens_from_redis", "tokens whose KV came from Redis"),
    Name("token_layers", "tokens computed by blends, times layers"),
    Name("stored_chunks", "chunks stored"),
    Name("stored_tokens", "tokens stored"),
    Name("layers", "layers of the model: what to divide token_layers by", gauge=True),
)

NAMES = {name.name: name for name in (*OF_STORES, *OF_REQUESTS)}


def values(stats: StoreStats) -> dict[str, dict[Labels, float]]:
    """What a store has counted, by the names of `OF_STORES` and their labels; zeros for all that may still happen.

    The zeros are not for looks: a rate is blind to a counter's first value, and so to the first corrupt record.
    """
    tiers, places = stats.usable, [*stats.evictions, *stats.usable]
    return {
        "hits": _each(places, stats.hits),
        "misses": {(): stats.misses},
        "bytes": {(tier, way): stats.bytes.get((tier, way), 0) for tier in tiers for way in MOVED},
        "seconds": {(tier, way): stats.seconds.get((tier, way), 0.0) for tier in tiers for way in TIMED},
        "written_chunks": _each(tiers, stats.writes),
        "dropped_writes": {(): stats.dropped_writes},
        "failures": _each(tiers, stats.failed),
        "corrupt_records": _each(tiers, stats.corrupt),
        "no_room": {(): stats.no_room},
        "evictions": _each((), stats.evictions),
        "write_queue_depth": {(): stats.queued},
        "tier_usable": _each((), stats.usable),
    }


def flat(stats: StoreStats) -> dict[str, float]:
    """The same as plain data that may travel between processes: `bytes|disk|read`, `misses`, …"""
    return {key(name, labels): value for name, by in values(stats).items() for labels, value in by.items()}


def key(name: str, labels: Labels) -> str:
    """A number's name in plain data."""
    return "|".join((name, *labels))


def parted(flat_key: str) -> tuple[str, Labels]:
    """The inverse of `key`."""
    name, *labels = flat_key.split("|")
    return name, tuple(labels)


class StoreCollector(Collector):
    """`lmc_*` of one store, asked for at every scrape."""

    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """The names, without asking the store."""
        return [_family(name) for name in OF_STORES]

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        found = values(self._stats())
        for name in OF_STORES:
            family = _family(name)
            for labels, value in found[name.name].items():
                family.add_metric(labels, value)
            yield family


def register(of: "CacheEngine | Store", registry: CollectorRegistry = REGISTRY) -> StoreCollector:
    """Let a registry show a store, until `registry.unregister` of what this returns; raise `InputError` if it shows one already."""
    store = of if isinstance(of, Store) else of.store_of_chunks
    collector = StoreCollector(store.stats)
    try:
        registry.register(collector)
    except ValueError as error:
        raise InputError(
            "this registry shows a store already: unregister that one, or use a registry for each"
        ) from error
    return collector


class Reported(Protocol):
    """What `Prefills` reads of a report of `CachedModel.prefill`."""

    @property
    def how(self) -> str:
        """What was done."""

    @property
    def computed(self) -> tuple[int, ...]:
        """Tokens computed in each layer."""

    @property
    def skipped(self) -> int:
        """Loads that were not begun."""


class Prefills:
    """Requests of a program without a server: `add` every report."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._requests, self._blends, self._skipped, self._computed = (
            prometheus_client.Counter(f"lmc_{name}", NAMES[name].what, registry=registry)
            for name in ("requests", "blends", "loads_skipped", "token_layers")
        )
        self._layers = prometheus_client.Gauge("lmc_layers", NAMES["layers"].what, registry=registry)

    def add(self, report: Reported) -> None:
        """One prefill more."""
        self._requests.inc()
        self._skipped.inc(report.skipped > 0)
        self._layers.set(len(report.computed))
        if report.how == "blend":
            self._blends.inc()
            self._computed.inc(sum(report.computed))


def serve_metrics(port: int, host: str = "127.0.0.1", registry: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Answer at `http://host:port/metrics` from a thread; returns what ends it. Raise `InputError` if the port cannot be had.

    Only this machine can ask unless `host` says otherwise: there is no password.
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
