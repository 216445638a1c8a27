"""Watches what a blend launches on a GPU and what would wait for it, on a CPU, where nothing has to wait."""

from contextlib import contextmanager

import torch
from test_copies import execute
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lmc.blend.kernels import attention_triton, place_triton, shift_triton

WAITS = {"cpu", "item", "tolist", "__int__", "__bool__", "__float__", "__index__", "nonzero", "unique",
         "unique_consecutive", "isin", "masked_select", "argwhere", "numpy", "bincount"}  # fmt: skip
KERNELS = [
    (attention_triton, "_attend"), (attention_triton, "_paid"), (attention_triton, "_join"),
    (place_triton, "_place"), (place_triton, "_gather"),
    (place_triton, "_deviation"), (shift_triton, "_rotated"), (shift_triton, "_mean"), (shift_triton, "_alike"),
    (shift_triton, "_changes"), (shift_triton, "_correct"),
]  # fmt: skip


class Watch:
    """What has been launched since the last look, and what would have waited."""

    def __init__(self) -> None:
        self.launched, self.waited, self._on = [], [], False
        watch = self

        class Waits(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if watch._on:
                    watch.called(function.__name__, args, kwargs or {})
                return function(*args, **(kwargs or {}))

        class Launches(TorchDispatchMode):
            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                made = operation(*args, **(kwargs or {}))
                if watch._on and not operation.is_view and "empty" not in str(operation):
                    watch.launched.append(str(operation))
                return made

        self.modes = Waits(), Launches()

    def called(self, name: str, args, kwargs) -> None:
        masked = name in ("__getitem__", "__setitem__") and _has_mask(args[1])
        from_host = name == "tensor" or (name in ("as_tensor", "to") and "device" in kwargs)
        if name in WAITS or masked or from_host:
            self.waited.append(name)

    @contextmanager
    def set(self, on: bool):
        before, self._on = self._on, on
        try:
            yield
        finally:
            self._on = before

    def take(self) -> tuple[list[str], list[str]]:
        found, self.launched, self.waited = (self.launched, self.waited), [], []
        return found


def _has_mask(index) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)


class Counted:
    """A kernel, each call of which is one launch."""

    def __init__(self, kernel, watch: Watch) -> None:
        self._kernel, self._watch = kernel, watch

    def __getitem__(self, grid):
        def run(*args, **named):
            self._watch.launched.append(self._kernel.__name__)
            with self._watch.set(False):
                self._kernel[grid](*args, **named)

        return run


def watch_kernels(monkeypatch) -> Watch:
    """Watch the kernels in Triton, and copies as a GPU makes them."""
    monkeypatch.setenv("LMC_KERNELS", "triton")
    watch = Watch()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Counted(getattr(module, name), watch))

    def submitted(copies) -> None:
        watch.launched.append("copies")
        execute(copies)

    monkeypatch.setattr(place_triton, "submit_of", lambda device: submitted)
    monkeypatch.setattr(place_triton, "can_submit", lambda memory: True)
    return watch


def watched(watch: Watch, slices) -> list[tuple[int, list[str], list[str]]]:
    """Run a blend, and return for each of its slices the layer, what was launched and what would have waited."""
    with torch.inference_mode(), watch.modes[0], watch.modes[1], watch.set(True):
        return [(done.layer, *watch.take()) for done in slices]
