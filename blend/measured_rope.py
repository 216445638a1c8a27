"""Finds how a layer rotates its keys, by its keys at two positions.

Models of transformers compute cos and sin once and pass them to their layers. How a layer pairs dimensions is not said
anywhere, so each possible rotation is compared with what the layer does.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lmc.blend.kernels.shift import rotated
from lmc.blend.rope import UNROTATED, KeyRotation, Rotation
from lmc.blend.tolerances import FLOOR, difference
from lmc.errors import UnsupportedModel

PROBED = 7  # position at which the keys of a layer are compared with those at position 0


class Angles(NamedTuple):
    """The model's own cos and sin of some positions, `[T, R]` each, for one kind of layer."""

    cos: torch.Tensor
    sin: torch.Tensor
    joined: bool = False  # whether the model has them as complex numbers

    @classmethod
    def of(cls, found: Any) -> "Angles":
        """Return the angles that a model's RoPE returns for positions `[1, T]`."""
        joined = isinstance(found, torch.Tensor)
        cos, sin = (found.real, found.imag) if joined else found
        return cls(cos[0], sin[0], joined)

    @classmethod
    def together(cls, parts: "Sequence[Angles]") -> "Angles":
        """Return the angles of consecutive positions as one."""
        return parts[0]._replace(cos=torch.cat([one.cos for one in parts]), sin=torch.cat([one.sin for one in parts]))

    def at(self, positions: torch.Tensor | slice) -> "Angles":
        """Return the rows at `positions [T]`."""
        return self._replace(cos=self.cos[positions], sin=self.sin[positions])

    def embeddings(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return them as the model's layers take them."""
        cos, sin = self.cos[None], self.sin[None]
        return torch.complex(cos, sin) if self.joined else (cos, sin)


def rotations_of(angles: Angles) -> Iterator[Rotation]:
    """Yield the rotations that a model may make of its cos and sin: they have each angle twice, in two orders, or once.

    Either of the two ways to pair dimensions goes with each.
    """
    half = angles.cos.shape[-1] // 2
    for columns in (slice(0, half), slice(0, None, 2), slice(None)):
        for interleaved in (False, True):
            yield Rotation(angles.cos[:, columns], angles.sin[:, columns], interleaved)


def way_between(first: torch.Tensor, moved: torch.Tensor, rotations: Sequence[KeyRotation]) -> int | None:
    """Return the index of the rotation that makes `moved` of the keys `first [T, H, D]`; None if they are equal.

    Raises `UnsupportedModel` if there is none.
    """
    allowed = FLOOR[first.dtype]
    if difference(first, moved) <= allowed:
        return None
    for way, rotation in enumerate(rotations):
        fits = 2 * rotation.cos.shape[-1] <= first.shape[-1]
        if fits and difference(rotated(first, rotation), moved) <= allowed:
            return way
    raise UnsupportedModel("the model's keys at two positions are not rotations of each other")


def rotations_by_layer(kinds: Sequence[Any], ways: Sequence[int | None], angles: dict[Any, Angles]) -> list[Rotation]:
    """Return the rotation of each layer, from the kind of its angles and the index in `rotations_of`."""
    made: dict[tuple[Any, int], Rotation] = {}
    for kind, way in zip(kinds, ways, strict=True):
        if way is not None and (kind, way) not in made:
            made[kind, way] = list(rotations_of(angles[kind]))[way]
    return [UNROTATED if way is None else made[kind, way] for kind, way in zip(kinds, ways, strict=True)]
