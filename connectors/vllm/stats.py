"""Numbers for vLLM's log line and `/metrics`: the changes since the last report, by the keys of `lmc.metrics`.

Gauges are sent as changes too, and histograms as lists of observations. So all numbers can be summed over steps, and
over several API servers. Each API server sees only some of the steps.
"""

import contextlib
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from lmc.connectors.vllm.guard import HookGuard
from lmc.connectors.vllm.vllm_api import KVConnectorPromMetrics, KVConnectorStats
from lmc.metrics import NAMES, parted

_registered: list[Any] = []  # metrics of the last engine in this process; the next engine replaces them, as vLLM does


class LmcStats(KVConnectorStats):
    """Changes by key; the keys are those of `lmc.metrics.flat`."""

    def reset(self) -> None:
        """Remove all changes."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the changes of another report."""
        for key, change in other.data.items():
            self.data[key] = self.data[key] + change if key in self.data else change
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the changes and the means of observations for the log line."""
        means = {key: sum(of) / len(of) if isinstance(of, list) else of for key, of in self.data.items() if of}
        return {
            _said(key): change if isinstance(change, int) else float(f"{change:.3g}") for key, change in means.items()
        }

    def is_empty(self) -> bool:
        """Return whether nothing has changed."""
        return not any(self.data.values())


class LmcPromMetrics(KVConnectorPromMetrics):
    """The metrics `lmc:*` in the engine's `/metrics`, with vLLM's labels before lmc's own."""

    def __init__(self, config: Any, types: Any, labelnames: list[str], labelvalues: dict[int, list[object]]) -> None:
        super().__init__(config, types, labelnames, labelvalues)
        while _registered:
            with contextlib.suppress(KeyError):  # The registry may have been emptied.
                REGISTRY.unregister(_registered.pop())
        self._metrics: dict[str, Any] = {}
        for name in NAMES.values():
            shape = {"name": f"lmc:{name.name}", "documentation": f"lmc: {name.what}"}
            labels = [*labelnames, *name.labels]
            if name.buckets:
                metric = self._histogram_cls(**shape, labelnames=labels, buckets=name.buckets)
            elif name.gauge:
                metric = self._gauge_cls(**shape, labelnames=labels, multiprocess_mode="sum")
            else:
                metric = self._counter_cls(**shape, labelnames=labels)
            self._metrics[name.name] = metric
            if isinstance(metric, (Counter, Gauge, Histogram)):  # Ray's own metrics are not in the registry.
                _registered.append(metric)
        self._children: dict[tuple[int, str], Any] = {}
        self._levels: dict[tuple[int, str], float] = {}  # current values of gauges
        self._guard = HookGuard(switches=False)
        for engine in labelvalues:
            for name in NAMES.values():
                if not name.labels:
                    self._add(engine, name.name, [] if name.buckets else 0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add changes to the metrics. An error would end the API server's task that returns all responses."""
        for key, change in transfer_stats_data.items():
            self._guard.run("observe", lambda key=key, change=change: self._add(engine_idx, key, change), None)  # type: ignore[misc]

    def _add(self, engine: int, key: str, change: float | list[float]) -> None:
        name, labels = parted(key)
        if name not in NAMES:
            return
        if (engine, key) not in self._children:
            self._children[engine, key] = self._metrics[name].labels(*self.per_engine_labelvalues[engine], *labels)
        child = self._children[engine, key]
        if isinstance(change, list):
            for observed in change:
                child.observe(observed)
        elif NAMES[name].gauge:
            level = self._levels[engine, key] = self._levels.get((engine, key), 0) + change
            child.set(level)
        else:
            child.inc(change)


def _said(key: str) -> str:
    name, labels = parted(key)
    metric = NAMES.get(name)
    change = "change of " if metric and metric.gauge else "mean " if metric and metric.buckets else ""
    return f"lmc {change}{' '.join((name.replace('_', ' '), *labels))}"
