"""Prometheus counters of prefills, for a program without a server."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from lmc.connectors.transformers.report import Report
from lmc.metrics import NAMES


class Prefills:
    """Metrics such as `lmc_requests`, for a program that calls `add` with every report."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._requests, self._blends, self._skipped, self._computed = (
            Counter(f"lmc_{name}", NAMES[name].what, registry=registry)
            for name in ("requests", "blends", "loads_skipped", "token_layers")
        )
        self._layers = Gauge("lmc_layers", NAMES["layers"].what, registry=registry)

    def add(self, report: Report) -> None:
        """Count one prefill."""
        self._requests.inc()
        self._skipped.inc(report.skipped > 0)
        self._layers.set(len(report.computed))
        if report.how == "blend":
            self._blends.inc()
            self._computed.inc(sum(report.computed))
