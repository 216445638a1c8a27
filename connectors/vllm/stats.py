"""Numbers for vLLM's own log line and `/metrics`: counters since the last time, by name."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "requests": "requests seen",
    "loads": "requests for which exact pages were loaded",
    "blends": "requests whose documents were blended",
    "refused": "requests served exactly although they asked for more",
    "failed_loads": "loads that failed and were computed by the engine instead",
    "tokens_from_host": "tokens whose KV came from memory",
    "tokens_from_disk": "tokens whose KV came from disk",
    "token_layers": "tokens computed by blends, times layers",
    "stored_chunks": "chunks stored",
    "stored_tokens": "tokens stored",
    "evicted_chunks": "chunks evicted from memory",
    "dropped_writes": "chunks that were not written down because the queue was full",
    "no_room": "chunks that found every slot of the memory held",
    "failed_tier_operations": "operations that a tier failed at, each a miss",
}


class LmcStats(KVConnectorStats):
    """Increments of `COUNTERS`."""

    def reset(self) -> None:
        """Nothing has happened."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's increments."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: what has happened in its interval."""
        return {f"lmc {name.replace('_', ' ')}": count for name, count in self.data.items() if count}

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())


class LmcPromMetrics(KVConnectorPromMetrics):
    """`lmc:*_total` in the engine's `/metrics`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, what in COUNTERS.items():
            counter = self._counter_cls(name=f"lmc:{name}", documentation=f"lmc: {what}", labelnames=labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add increments."""
        for name, count in transfer_stats_data.items():
            if name in self._counters and count:
                self._counters[name][engine_idx].inc(count)
