"""Watches what a blend launches on a GPU and what would wait for it, on a CPU, where nothing has to wait.

Or it takes the values from tensors, on torch's meta device, so that reading one fails.
"""

import sys
from collections import defaultdict
from contextlib import contextmanager

import torch
from test_copies import execute
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmc.blend.blender import Blender
from lmc.blend.kernels import attention_triton, place_triton, shift_triton
from lmc.copies import Uploads, sent

WAITS = {"cpu", "item", "tolist", "__int__", "__bool__", "__float__", "__index__", "nonzero", "unique",
         "unique_consecutive", "isin", "masked_select", "argwhere", "numpy", "bincount"}  # fmt: skip
KERNELS = [
    (attention_triton, "_attend"), (attention_triton, "_paid"), (attention_triton, "_join"),
    (place_triton, "_place"), (place_triton, "_gather"),
    (place_triton, "_deviation"), (shift_triton, "_rotated"), (shift_triton, "_mean"), (shift_triton, "_alike"),
    (shift_triton, "_invert"),
    (shift_triton, "_changes"), (shift_triton, "_correct"),
]  # fmt: skip
# Ways to read a value of keys `[H, N, D]`.
READS = {
    "cpu": lambda keys: keys.cpu(),
    "to": lambda keys: keys.to("cpu"),
    "item": lambda keys: keys[0, 0, 0].item(),
    "tolist": lambda keys: keys.tolist(),
    "int": lambda keys: int(keys[0, 0, 0]),
    "if": lambda keys: bool(keys[0, 0, 0] > 0),
    "nonzero": lambda keys: keys.nonzero(),
    "unique": lambda keys: keys.unique(),
    "mask": lambda keys: keys[keys > 0],
    "masked_select": lambda keys: keys.masked_select(keys > 0),
}
# Ways to send numbers to the device of keys that wait for all that it has been given before.
SENDS = {
    "tensor": lambda keys: torch.tensor([1], device=keys.device),
    "to": lambda keys: torch.ones(1).to(keys.device),
    "index": lambda keys: keys[torch.zeros(1, dtype=torch.long)],
    "copy": lambda keys: keys[0, 0, :1].copy_(torch.ones(1)),
    "add": lambda keys: keys[0, 0, :1] + torch.ones(1),
}


class Watch:
    """What has been launched since the last look, and what would have waited."""

    def __init__(self) -> None:
        self.launched, self.waited, self.on = [], [], False
        self.named = []  # what kernels were launched with by name: the kernel's name and its arguments
        watch = self

        class Waits(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if watch.on:
                    watch.called(function.__name__, args, kwargs or {})
                return function(*args, **(kwargs or {}))

        class Launches(TorchDispatchMode):
            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                made = operation(*args, **(kwargs or {}))
                if watch.on and not operation.is_view and "empty" not in str(operation):
                    watch.launched.append(str(operation))
                return made

        self.modes = Waits(), Launches()

    def called(self, name: str, args, kwargs) -> None:
        indexed = _tensors(args[1]) if name in ("__getitem__", "__setitem__") else []
        masked = any(one.dtype is torch.bool for one in indexed)
        to_device = "device" in kwargs or (len(args) > 1 and isinstance(args[1], str | torch.device))
        from_host = name == "tensor" or (name in ("as_tensor", "to") and to_device and not kwargs.get("non_blocking"))
        number = bool(indexed) and name == "__setitem__" and not isinstance(args[2], torch.Tensor)
        if name in WAITS or masked or number or from_host:
            self.waited.append(name)

    @contextmanager
    def set(self, on: bool):
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before

    def take(self) -> tuple[list[str], list[str]]:
        found, self.launched, self.waited = (self.launched, self.waited), [], []
        return found


def _tensors(index) -> list[torch.Tensor]:
    return [part for part in (index if isinstance(index, tuple) else (index,)) if isinstance(part, torch.Tensor)]


class Counted:
    """A kernel, each call of which is one launch. It computes nothing: its outputs stay as they were allocated.

    Scores are 0. They decide which rows are computed, which must be the same each time.
    """

    def __init__(self, name: str, kernel, watch: Watch) -> None:
        self._name, self._watch = name, watch
        self._scores = kernel.arg_names.index("paid") if name == "_paid" else None  # the argument for the scores

    def __getitem__(self, grid):
        def launch(*given, **named):
            self._watch.launched.append(self._name)
            self._watch.named.append((self._name, named))
            if self._scores is not None:
                with self._watch.set(False):
                    given[self._scores].zero_()

        return launch


def watch_kernels(monkeypatch) -> Watch:
    """Watch the kernels in Triton, and copies as a GPU makes them."""
    monkeypatch.setenv("LMC_KERNELS", "triton")
    watch = Watch()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Counted(name, getattr(module, name), watch))

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


def kernels_without_values(monkeypatch) -> None:
    """Let kernels in Triton do nothing; their outputs are allocated before they are launched."""
    monkeypatch.setenv("LMC_KERNELS", "triton")
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, defaultdict(lambda: lambda *given, **named: None))
    monkeypatch.setattr(place_triton, "submit_of", lambda device: lambda copies: None)
    monkeypatch.setattr(place_triton, "can_submit", lambda memory: True)


class Waited(AssertionError):
    """The host would have waited for a GPU."""


class NoWaits(TorchFunctionMode):
    """With a device that has no values: what reads one fails anyway, and so does what would send numbers and wait.

    Uploads are counted.
    """

    uploads = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        given = tree_leaves((args, kwargs or {}))
        devices = {one.device.type for one in given if isinstance(one, torch.Tensor) and one.dim()}
        to_device = any(isinstance(one, str | torch.device) and torch.device(one).type == "meta" for one in given)
        sends = to_device and function.__name__ in ("tensor", "as_tensor", "to") and "meta" not in devices
        if (len(devices) > 1 or sends) and not self._uploads(sys._getframe(1).f_code):
            raise Waited(function.__name__)
        return function(*args, **(kwargs or {}))

    def _uploads(self, code) -> bool:
        upload = code in (sent.__code__, Uploads.send.__code__)
        self.uploads += upload
        return upload


class MetaBlender(Blender):
    """A blend whose device is torch's meta device. All tokens have the same score."""

    waits = 0

    def _on_host(self, evidence):
        self.waits += 1
        return torch.zeros(evidence.shape)
