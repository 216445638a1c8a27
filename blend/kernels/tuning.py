"""How attention and scores are cut into programs, for each GPU architecture.

No GPU has measured these numbers yet. They are estimates from the compiled code (docs/gpu.md). `bench/gpu/sweep.py`
measures others, and prints the fastest ones in the form of this table.
"""

from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

import torch

Kind = Literal[
    "many rows",
    "few rows",
    "few rows, window",
    "few rows, hidden tokens",
    "few rows, heads of 64",
    "few rows, heads of 64, window",
    "heads of 256",
    "heads of 512",
    "heads of 512, window",
    "latent",
    "latent, quantised",
    "latent, hidden tokens",
    "float32, heads of 64",
    "float32",
    "scores",
    "scores, heads of 64",
    "scores, heads of 256",
    "scores, wider heads",
    "scores, wider heads, quantised",
    "scores, float32",
    "scores, float32, heads of 256",
]


class Tile(NamedTuple):
    """The size of a program."""

    rows: int  # queries of one KV head; for scores, tokens
    keys: int  # per step
    warps: int
    stages: int = 3  # of the software pipeline: two buffers of keys and values with 3, three with 5


class Tuning(NamedTuple):
    """How the kernels are cut into programs on one architecture."""

    programs: int  # minimal number of programs that keep a GPU busy until the last one ends
    steps: int  # maximal number of steps of a program, if programs share keys
    fewest_keys: int  # minimal number of keys per program, if programs share keys
    many: int  # minimum number of programs for the tiles of "many rows"
    tiles: Mapping[Kind, Tile]

    def shares(self, programs: int, keys: int, step: int) -> int:
        """Return how many programs share the `keys` of the same rows. A step of a program reads `step` keys.

        Rows of a blend lie anywhere in a prompt, so programs take very different times. Without enough of them, the
        longest one would run alone at the end.
        """
        if programs >= self.programs:
            return 1
        wanted = max(-(-self.programs // programs), -(-keys // (self.steps * step)))
        return max(1, min(wanted, keys // self.fewest_keys))


AMPERE = Tuning(
    programs=4 * 108,
    steps=64,
    fewest_keys=512,
    many=256,
    tiles={
        "many rows": Tile(128, 32, 8),  # With 64 keys, it spills registers in Triton 3.8.
        "few rows": Tile(64, 64, 4),
        "few rows, window": Tile(64, 32, 4),  # for the same reason
        "few rows, hidden tokens": Tile(64, 32, 4),
        "few rows, heads of 64": Tile(64, 64, 4),
        "few rows, heads of 64, window": Tile(64, 32, 4),
        "heads of 256": Tile(64, 32, 8),
        "heads of 512": Tile(32, 16, 8),
        "heads of 512, window": Tile(16, 16, 4),  # With 8 warps, it spills registers in Triton 3.9.
        "latent": Tile(64, 16, 8),
        "latent, quantised": Tile(32, 32, 8),
        "latent, hidden tokens": Tile(32, 16, 8),
        "float32, heads of 64": Tile(32, 16, 4),
        "float32": Tile(16, 16, 8),
        "scores": Tile(64, 64, 4),
        "scores, heads of 64": Tile(64, 64, 4),
        "scores, heads of 256": Tile(64, 16, 4),
        "scores, wider heads": Tile(16, 32, 8),
        "scores, wider heads, quantised": Tile(16, 32, 4),
        "scores, float32": Tile(16, 32, 4, stages=1),  # With more warps or stages, it spills registers in Triton 3.8.
        "scores, float32, heads of 256": Tile(16, 32, 8, stages=2),  # for the shared memory of GPUs of 8.6
    },
)
# One program of "many rows" fits into a multiprocessor, which has room for a third buffer of keys and values.
HOPPER = AMPERE._replace(
    programs=4 * 132,
    tiles={
        **AMPERE.tiles,
        "many rows": Tile(128, 64, 8, stages=5),
        "few rows, window": Tile(64, 64, 4),
        "few rows, heads of 64, window": Tile(64, 64, 4),
    },
)
# With 32 keys, hidden tokens spill registers in Triton 3.6, because the assembler limits a thread to 128 registers.
BLACKWELL = HOPPER._replace(tiles={**HOPPER.tiles, "few rows, hidden tokens": Tile(64, 64, 4)})
# Consumer Blackwell has the shared memory of Ampere, but its code needs more registers for the same tile: each tile of
# Ampere that spills in Triton 3.6 or 3.9 has more warps or fewer rows here. Programs for heads of 64 keep 4 warps,
# because 8 warps would compute each product of 64 rows twice.
CONSUMER_BLACKWELL = AMPERE._replace(
    tiles={
        **AMPERE.tiles,
        "few rows": Tile(64, 64, 8),
        "few rows, window": Tile(64, 64, 8),
        "latent": Tile(32, 32, 8),
        "scores": Tile(32, 64, 4),
        "scores, heads of 64": Tile(64, 64, 8),
    },
)


@cache
def tuning_for(capability: int) -> Tuning:
    """Return the tuning for a compute capability (90 for 9.0).

    GPUs of 8.6 use the tuning of 8.0, and GPUs of 8.9 that of 12.0: they have as little shared memory, and converting
    fp8 takes registers. With the tiles of 8.0, programs for caches in fp8 spill in Triton 3.9.
    """
    if capability >= 120 or capability == 89:
        return CONSUMER_BLACKWELL
    if capability >= 100:
        return BLACKWELL
    return HOPPER if capability >= 90 else AMPERE


@cache
def tuning_of(device: torch.device) -> Tuning:
    """Return the tuning for a device. Without a GPU, as in Triton's interpreter, it is that of Hopper."""
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return tuning_for(10 * major + minor)
