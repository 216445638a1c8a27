"""Chooses the kernels: those in Triton on NVIDIA GPUs, and those in torch everywhere else.

LMC_KERNELS=auto      Triton on an NVIDIA GPU of compute capability 8.0 or later, if Triton is installed; with a
                      quantised KV cache of 8.9 or later
LMC_KERNELS=triton    Triton; on a CPU only with TRITON_INTERPRET=1, for tests
LMC_KERNELS=torch     torch
"""

import os
from importlib.util import find_spec

import torch

from lmc.blend.kernels import attention, place, shift
from lmc.blend.kernels.operations import Kernels
from lmc.config.settings import KERNELS
from lmc.errors import ConfigError

VARIABLE = "LMC_KERNELS"
MIN_CAPABILITY = (8, 0)  # lowest compute capability for which the tests compile the kernels
MIN_QUANTISED = (8, 9)  # the lowest one whose GPUs convert numbers of fp8_e4m3

TORCH = Kernels.of(attention, place, shift, in_pages=False)


def kernels_of(device: torch.device, *, quantised: bool = False) -> Kernels:
    """Return the kernels for a device, and for a KV cache that may be `quantised`.

    Raises `ConfigError` if LMC_KERNELS is invalid or cannot be satisfied.
    """
    choice = os.environ.get(VARIABLE, "") or "auto"
    if choice not in KERNELS:
        raise ConfigError(f"invalid {VARIABLE} = {choice}: use one of {', '.join(KERNELS)}")
    if choice == "torch" or (choice == "auto" and not _compiles_for(device, quantised=quantised)):
        return TORCH
    if find_spec("triton") is None:
        raise ConfigError(f"{VARIABLE} = {choice} needs Triton: pip install triton, or set {VARIABLE}=torch")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"{VARIABLE} = {choice} needs an NVIDIA GPU, but the model is on {device.type}: set {VARIABLE}=torch"
        )
    from lmc.blend.kernels import attention_triton, place_triton, shift_triton

    kernels = Kernels.of(attention_triton, place_triton, shift_triton, in_pages=True)
    return kernels.on(device) if device.type == "cuda" else kernels


def _compiles_for(device: torch.device, *, quantised: bool) -> bool:
    if device.type != "cuda" or torch.version.hip or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (MIN_QUANTISED if quantised else MIN_CAPABILITY)
