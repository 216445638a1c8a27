"""torchvision for vLLM's multimodal models: a plugin of pytest, for a process of its own.

`make` keeps torchvision in a folder of its own, because other tests run without it, as most of vLLM's CPU users do. Its
compiled operations need CUDA. No model here calls them, but torchvision wants two of them to exist.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(sys.prefix) / "vision"))
OPERATIONS = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    OPERATIONS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
