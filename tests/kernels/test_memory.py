"""What a blend takes beside the memory of a batch of rows is at most what its ranks ask each other for.

The layers of an 8B Llama's size are on torch's meta device, so that tensors have sizes and take no memory.
"""

from types import SimpleNamespace

import pytest
import test_paged_canvas as paged
import torch
from test_paged_canvas import MetaCanvas, blend_of, layers_over, length_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from watching import MetaBlender, kernels_without_values

from lmc.blend.kernels.choice import kernels_of
from lmc.blend.staging import SIDES
from lmc.connectors.vllm.worker.memory import UNUSED_BYTES, memory_for
from lmc.connectors.vllm.worker.native import NativeLayers

ROWS = 2048  # of a full batch


class Canvas(MetaCanvas):
    """A canvas that tells which job it is for."""

    @property
    def job(self):
        return self._job


class Peak(TorchDispatchMode):
    """The most bytes that the tensors made under it had at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self._alive = 0, {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self._alive[StorageWeakRef(storage).cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {name: (ref, size) for name, (ref, size) in self._alive.items() if not ref.expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return made


@pytest.fixture
def layers(monkeypatch):
    """A function to layers over pages for a prompt of some tokens, all of an 8B Llama's size."""
    for name, size in (("HEADS", 8), ("GROUP", 4), ("DIM", 128), ("QUERIES", 32), ("HIDDEN", 4096)):
        monkeypatch.setattr(paged, name, size)
    monkeypatch.setattr(paged.Attention, "head_size", 128)
    # The engine's own attention, for rows without a gap.
    monkeypatch.setattr(paged.Implementation, "forward", lambda *given: None)
    monkeypatch.setattr(NativeLayers, "_metadata", lambda self, batch, backend: None)
    monkeypatch.setattr(
        "lmc.connectors.vllm.worker.tensor_parallel.get_tp_group", lambda: SimpleNamespace(world_size=1)
    )
    kernels_without_values(monkeypatch)

    def made(length):
        return layers_over(kernels_of(torch.device("cpu")), 1, length, without_values=True)

    return made


def batch_bytes(canvas: MetaCanvas) -> int:
    """What a layer takes for a full batch of rows with gaps, as it is measured at the start."""
    with torch.inference_mode(), Peak() as peak:
        rows = canvas.begin(2 * torch.arange(ROWS))
        canvas.uploads.send()
        for batch in canvas.batches(rows):
            canvas.run(0, rows, batch)
    return peak.bytes


@pytest.mark.parametrize("ratio", [0.15, 1.0])
@pytest.mark.parametrize(("documents", "size"), [(8, 1024), (40, 128), (1, 6000)])
def test_a_blend_takes_no_more_than_its_ranks_ask_for(monkeypatch, layers, documents, size, ratio):
    monkeypatch.setattr(paged, "SIZE", size)
    over = layers(length_of(documents))
    policy = {"strategy": "union", "ratio": ratio, "correction": "shift"}
    with torch.inference_mode(), Peak() as peak:
        canvas, given, policy = blend_of(Canvas, over, documents, policy, through=False, rows=ROWS)
        for _ in MetaBlender(canvas, given, policy).slices():
            pass
    part = documents * size * over.shape.token_bytes
    taken = peak.bytes - over.depth * part  # less what is stored, which is not on the GPU
    # On a CPU there is no stream to copy stored parts on, and so there are no buffers for them.
    estimated = memory_for(over, canvas.job) - SIDES * part - UNUSED_BYTES
    assert taken <= batch_bytes(canvas) + estimated
