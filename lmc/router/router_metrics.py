"""The metrics of a router, for Prometheus."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lmc.metrics import Name
from lmc.router.engines import Engines

DECISION_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
ROUTING_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.025, 0.05, 0.1)
FIRST_BYTE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BREAKER_STATES = {"closed": 0, "half-open": 1, "open": 2}

ENGINE_LABELS = ("engine",)
SENT_REQUESTS = Name("router_requests", "requests sent to engines, by the reason of the choice", ("engine", "why"))
ANSWERS = Name("router_answers", "answers to clients, by status", ("status",))
EXPECTED = Name("router_expected_tokens", "tokens that engines were expected to reuse", ENGINE_LABELS)
REPORTED = Name("router_reported_tokens", "tokens that engines reported as reused", ENGINE_LABELS)
COUNTED_PROMPT_TOKENS = Name("router_prompt_tokens", "prompt tokens, as counted by engines", ENGINE_LABELS)
RETRIES = Name("router_retries", "requests retried at another engine after this one failed", ENGINE_LABELS)
BROKEN = Name("router_broken_answers", "answers that broke off after they began", ENGINE_LABELS)
CLIENTS_LEFT = Name("router_clients_left", "requests whose client disconnected before the end")
REFUSED = Name("router_refused", "requests answered with 429")
DECISION = Name("router_decision_seconds", "time to choose an engine", buckets=DECISION_BUCKETS)
ROUTING_SECONDS = Name(
    "router_overhead_seconds", "time from arrival until a request is sent to an engine", buckets=ROUTING_BUCKETS
)
FIRST_BYTE = Name(
    "router_first_byte_seconds", "time from arrival to the first byte of an answer", buckets=FIRST_BYTE_BUCKETS
)
LOAD = Name("router_engine_requests", "requests in flight at an engine", ENGINE_LABELS, gauge=True)
USABLE = Name("router_engine_usable", "1 if an engine can get requests, else 0", ENGINE_LABELS, gauge=True)
BREAKERS = Name(
    "router_engine_breaker",
    "state of an engine's circuit breaker: 0 closed, 1 half-open, 2 open",
    ENGINE_LABELS,
    gauge=True,
)
INDEXED = Name("router_index_entries", "documents and prefixes of prompts in the index", gauge=True)
ENGINE_INDEXED = Name(
    "router_engine_index_entries", "index entries of an engine's cache, by kind", ("engine", "kind"), gauge=True
)
IS_REPORTED = Name(
    "router_engine_told", "1 if events report the contents of an engine's cache, else 0", ENGINE_LABELS, gauge=True
)
FOUND = Name(
    "router_documents",
    "documents of prompts so far, by how they were found",
    ("how",),
    gauge=True,
)
UNSEARCHED = Name("router_unsearched", "prompts not searched for documents in time, so far", gauge=True)
UNPLACED = Name("router_index_unplaced", "reported blocks with an unknown parent, so far", gauge=True)
UNREADABLE = Name("router_index_unreadable", "unreadable batches of events, so far", gauge=True)
LAG = Name("router_event_lag_seconds", "age of an engine's last batch of events at arrival", ENGINE_LABELS, gauge=True)
ROUTER_METRICS = (
    SENT_REQUESTS, ANSWERS, EXPECTED, REPORTED, COUNTED_PROMPT_TOKENS, RETRIES, BROKEN, CLIENTS_LEFT, REFUSED,
    DECISION, ROUTING_SECONDS, FIRST_BYTE, LOAD, USABLE, BREAKERS, INDEXED, ENGINE_INDEXED, IS_REPORTED, UNPLACED,
    UNREADABLE, LAG, FOUND, UNSEARCHED,
)  # fmt: skip


class RouterMetrics:
    """Counts what a router does. All names begin with `lmc_router_`."""

    def __init__(self, name_of: Callable[[str], str] = str) -> None:
        """`name_of` returns the label of an engine by its URL."""
        self._name_of = name_of
        self.registry = CollectorRegistry()
        self._made = {name: self._make(name) for name in ROUTER_METRICS}
        self._series: dict[tuple[Name, tuple[str, ...]], Any] = {}

    def count(self, name: Name, *labels: str, n: float = 1) -> None:
        """Add to a counter."""
        self._of(name, labels).inc(n)

    def observe(self, name: Name, seconds: float) -> None:
        """Add a time to a histogram."""
        self._made[name].observe(seconds)

    def set(self, name: Name, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._of(name, labels).set(value)

    def text(self, engines: Engines, now: float) -> bytes:
        """Return all metrics in Prometheus' format. Metrics of removed engines are dropped."""
        for name, labels in list(self._series):
            if name.labels[:1] == ENGINE_LABELS and labels[0] not in engines:
                self._made[name].remove(*self._shown(name, labels))
                del self._series[name, labels]
        for engine in engines:
            state = engine.breaker.state(now)
            self.set(LOAD, engine.candidate.load, engine.url)
            self.set(USABLE, engine.usable(now), engine.url)
            self.set(BREAKERS, BREAKER_STATES[state], engine.url)
        return generate_latest(self.registry)

    def _of(self, name: Name, labels: tuple[str, ...]) -> Any:
        if (name, labels) not in self._series:
            shown = self._shown(name, labels)
            self._series[name, labels] = self._made[name].labels(*shown) if labels else self._made[name]
        return self._series[name, labels]

    def _shown(self, name: Name, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return labels with the name of the engine instead of its URL."""
        return (self._name_of(labels[0]), *labels[1:]) if name.labels[:1] == ENGINE_LABELS else labels

    def _make(self, name: Name) -> Any:
        title = f"lmc_{name.name}"
        if name.buckets:
            return Histogram(title, name.what, name.labels, buckets=name.buckets, registry=self.registry)
        return (Gauge if name.gauge else Counter)(title, name.what, name.labels, registry=self.registry)
