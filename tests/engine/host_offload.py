"""vLLM's two connectors that offload blocks to host memory, on its CPU build: only their copies are replaced.

Without lmc, both raise an error there when they register KV caches: `OffloadingConnector` "CPU Offloading is currently
only supported on CUDA-alike and XPU GPUs", and `SimpleCPUOffloadConnector` "type object '_StreamPlaceholder' has no
attribute 'priority_range'". What they decide is vLLM's own code.
"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.simple_kv_offload import worker

OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 64 << 20,
        "spec_name": "CopyingSpec",
        "spec_module_path": "host_offload",
    },
}
SIMPLE = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
}


class CopyingWorker(OffloadingWorker):
    """Copies blocks when a transfer is submitted."""

    def __init__(self, caches: CanonicalKVCaches, chunks: int) -> None:
        self._blocks = [one.tensor for one in caches.tensors]
        self._stored = [torch.zeros(chunks, *blocks.shape[1:], dtype=blocks.dtype) for blocks in self._blocks]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, zip(self._blocks, self._stored, strict=True), src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, zip(self._stored, self._blocks, strict=True), src_spec, dst_spec)

    def _copy(self, job: int, pairs: Any, sources: Any, targets: Any) -> bool:
        for source, target in pairs:
            target[targets.block_ids] = source[sources.block_ids]
        self._ended.append(TransferResult(job, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None: ...


class CopyingSpec(CPUOffloadingSpec):
    """The tier in host memory, with chunks of one block."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> CopyingWorker:
        assert self.blocks_per_chunk == 1
        return CopyingWorker(kv_caches, self.num_chunks)


class Complete:
    """A stream or an event of copies that are complete when they are issued."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return True


class CopyingBackend:
    """Copies blocks when a copy is launched."""

    def init(self, blocks: dict[str, torch.Tensor], stored: dict[str, torch.Tensor], *_: Any) -> None:
        self._caches = {True: (blocks, stored), False: (stored, blocks)}

    def launch_copy(
        self, sources: list[int], targets: list[int], is_store: bool, event_idx: int, events_list: Any, **_: Any
    ) -> None:
        origin, goal = self._caches[is_store]
        for name in origin:
            goal[name][targets] = origin[name][sources]
        events_list.append((event_idx, Complete()))

    def shutdown(self) -> None: ...


class TorchWithoutStreams:
    """torch, whose streams and events are complete."""

    cuda = SimpleNamespace(Stream=Complete, current_stream=Complete)
    Event = Complete

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def copy_at_once(monkeypatch: Any) -> None:
    """Let `SimpleCPUOffloadConnector` copy blocks without a GPU."""
    monkeypatch.setattr(worker, "torch", TorchWithoutStreams())
    monkeypatch.setattr(worker, "DmaCopyBackend", CopyingBackend)
