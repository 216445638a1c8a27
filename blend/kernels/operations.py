"""The operations of each set of kernels.

The docstrings in `attention.py`, `place.py` and `shift.py` describe them.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch


class Kernels(NamedTuple):
    """The most expensive operations on keys and values."""

    attend: Callable[..., torch.Tensor]
    attend_and_score: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    stage: Callable[..., None]
    spread: Callable[..., None]
    place: Callable[..., None]
    gather: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    deviation: Callable[..., torch.Tensor]
    weights_of: Callable[..., torch.Tensor]
    changes_of: Callable[..., torch.Tensor]
    correct: Callable[..., None]
    in_pages: bool  # whether they read and write pages directly, without copies

    @classmethod
    def of(cls, attention: ModuleType, place: ModuleType, shift: ModuleType, *, in_pages: bool) -> "Kernels":
        """Return the functions of three modules as a set of kernels."""
        functions: dict[str, Any] = {**vars(attention), **vars(place), **vars(shift), "in_pages": in_pages}
        return cls(**{name: functions[name] for name in cls._fields})

    def on(self, device: torch.device) -> "Kernels":
        """Return kernels that run on this GPU. Otherwise, Triton would launch them on the current GPU."""
        guarded: dict[str, Any] = {name: partial(_on, device, one) for name, one in self._asdict().items()}
        return self._replace(**guarded | {"in_pages": self.in_pages})


def _on(device: torch.device, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with torch.cuda.device(device):
        return operation(*arguments, **options)
