"""Numbers for vLLM's own log line and `/metrics`: what has changed since the last time, by the keys of `lmc.metrics`.

Gauges travel as changes too: then a step's numbers are added up whatever they are, and so are those of several API servers, each
of which is told of some steps.
"""

import contextlib
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lmc.metrics import NAMES, parted

_registered: list[Any] = []  # of the last engine in this process: another one takes its place, as vLLM's own metrics do


class LmcStats(KVConnectorStats):
    """Changes by key, as `lmc.metrics.flat` names them."""

    def reset(self) -> None:
        """Nothing has happened."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's changes."""
        for key, change in other.data.items():
            self.data[key] = self.data.get(key, 0) + change
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: what has happened in its interval."""
        return {
            _said(key): change if isinstance(change, int) else float(f"{change:.3g}")
            for key, change in self.data.items()
            if change
        }

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())


class LmcPromMetrics(KVConnectorPromMetrics):
    """`lmc:*` in the engine's `/metrics`: vLLM's labels, and behind them ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        while _registered:
            with contextlib.suppress(KeyError):  # somebody has emptied the registry
                REGISTRY.unregister(_registered.pop())
        self._metrics: dict[str, Any] = {}
        for name in NAMES.values():
            shape = {"name": f"lmc:{name.name}", "documentation": f"lmc: {name.what}"}
            labels = [*labelnames, *name.labels]
            if name.gauge:
                metric = self._gauge_cls(**shape, labelnames=labels, multiprocess_mode="sum")
            else:
                metric = self._counter_cls(**shape, labelnames=labels)
            self._metrics[name.name] = metric
            if isinstance(metric, (Counter, Gauge)):  # Ray keeps its own books
                _registered.append(metric)
        self._children: dict[tuple[int, str], Any] = {}
        self._levels: dict[tuple[int, str], float] = {}  # gauges
        for engine in per_engine_labelvalues:
            for name in NAMES.values():
                if not name.labels:
                    self._add(engine, name.name, 0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add changes."""
        for key, change in transfer_stats_data.items():
            self._add(engine_idx, key, change)

    def _add(self, engine: int, key: str, change: float) -> None:
        name, labels = parted(key)
        if name not in NAMES:
            return
        if (engine, key) not in self._children:
            self._children[engine, key] = self._metrics[name].labels(*self.per_engine_labelvalues[engine], *labels)
        child = self._children[engine, key]
        if NAMES[name].gauge:
            level = self._levels[engine, key] = self._levels.get((engine, key), 0) + change
            child.set(level)
        else:
            child.inc(change)


def _said(key: str) -> str:
    name, labels = parted(key)
    change = "change of " if name in NAMES and NAMES[name].gauge else ""
    return f"lmc {change}{' '.join((name.replace('_', ' '), *labels))}"
