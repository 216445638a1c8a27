"""No memory of a blend is used or freed too early by a stream, neither at its end nor if it is aborted."""

from types import SimpleNamespace

import pytest
import torch
from crossings import Crossings, streams_of
from part_memory import PartMemory
from test_paged_canvas import CORRECTED, PagedCanvas, blend_of, layers_over, length_of
from watching import KERNELS

from lmc.blend.blender import Blender
from lmc.blend.kernels import place_triton
from lmc.blend.kernels.choice import kernels_of
from lmc.connectors.vllm.worker.streams import LayerLoads

CPU, DOCUMENTS = torch.device("cpu"), 2


class Noted:
    """A kernel whose tensors are noted."""

    def __init__(self, name: str, kernel, crossings: Crossings) -> None:
        self._name, self._kernel, self._crossings = name, kernel, crossings

    def __getitem__(self, grid):
        def launch(*given, **named):
            tensors = [one for one in (*given, *named.values()) if isinstance(one, torch.Tensor)]
            self._crossings.used(self._name, *tensors)
            self._kernel[grid](*given, **named)

        return launch


def too_early(monkeypatch, slices: int | None, *, loads: bool = True) -> list[str]:
    """What is found when prompts are blended, or blends are aborted after some slices.

    With `loads`, exact pages before the documents are loaded, too.
    """
    monkeypatch.setenv("LMC_KERNELS", "triton")
    monkeypatch.setattr(
        "lmc.connectors.vllm.worker.tensor_parallel.get_tp_group", lambda: SimpleNamespace(world_size=1)
    )
    crossings = Crossings(CPU, monkeypatch)
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Noted(name, getattr(module, name), crossings))
    monkeypatch.setattr(place_triton, "submit_of", lambda device: crossings.submitted)
    monkeypatch.setattr(place_triton, "can_submit", lambda memory: True)
    layers, slabs = layers_over(kernels_of(CPU), 1, length_of(DOCUMENTS)), []

    def slab(part) -> PartMemory:
        slabs.append(PartMemory(part))
        return slabs[-1]

    with torch.inference_mode(), crossings:
        for _ in range(2):  # so that the second one uses the memory of the first
            blend(layers, slab, crossings, slices, loads=loads)
    assert crossings.crossed, "the control: streams are in use"
    return list(crossings.found)  # The slabs are freed after this.


def blend(layers, slab, crossings: Crossings, slices: int | None, *, loads: bool) -> None:
    """One blend, whose canvas is gone afterwards."""
    streams = streams_of(crossings)
    page, copied = torch.zeros(5, device=CPU), torch.arange(5, device=CPU)
    exact = LayerLoads(lambda layer: page.index_add_(0, copied, torch.ones(5)), 1, streams, used=[page, copied])
    has = {"through": False, "stream": crossings.load, "loads": exact if loads else None, "memory": slab}
    canvas, given, policy = blend_of(PagedCanvas, layers, DOCUMENTS, CORRECTED, **has)
    for count, _ in enumerate(Blender(canvas, given, policy).slices()):
        if count == slices:
            return


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("slices", [None, 0, 1, 3])
def test_no_memory_is_used_or_freed_too_early(monkeypatch, slices, loads):
    assert not too_early(monkeypatch, slices, loads=loads)


@pytest.mark.parametrize("forgotten", ["buffer", "tensor"])
def test_the_control_memory_that_is_not_recorded_is_found(monkeypatch, forgotten):
    """The buffers of staging are bytes; the tensors that loads read are not."""
    record = Crossings.recorded

    def forgetful(self, tensor, stream) -> None:
        if (tensor.dtype is torch.uint8) != (forgotten == "buffer"):
            record(self, tensor, stream)

    monkeypatch.setattr(Crossings, "recorded", forgetful)
    assert too_early(monkeypatch, 1)
