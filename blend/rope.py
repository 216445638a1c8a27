"""Re-rotation of stored keys from the positions at which they were computed to those at which they are used.

RoPE rotates pairs of dimensions by an angle that grows with the position. So a rotation by the difference of two angles
moves a key without recomputing it (RoFormer, Su et al. 2021). The difference is taken from the model's own cos and sin
rows. This reproduces scaled frequencies (llama3), YaRN's magnitude factor, partial rotation and both pairings of
dimensions exactly as in the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lmc.errors import UnsupportedModel

# Frequencies of these types do not depend on the prompt's length, so a rotation by a difference is exact.
SHIFT_INVARIANT = ("default", "linear", "llama3", "yarn")


class KeyRotation(NamedTuple):
    """The rotation of T keys from their positions to others, as `Rotation.between` makes it.

    Dimensions from R on are not rotated; R is 0 in a layer without positions (NoPE).
    """

    cos: torch.Tensor  # [T, R/2]
    sin: torch.Tensor  # [T, R/2]
    interleaved: bool = False  # whether the dimensions (2i, 2i + 1) rotate together, instead of (i, i + R/2)

    def part(self, rows: slice) -> "KeyRotation":
        """Return the rotation of some of the keys."""
        return self._replace(cos=self.cos[rows], sin=self.sin[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The RoPE of a layer: the model's own table of cos and sin for the positions 0…N-1. Layers may share it."""

    cos: torch.Tensor  # [N, R/2]
    sin: torch.Tensor  # [N, R/2]
    interleaved: bool = False

    def same_as(self, other: "Rotation") -> bool:
        """Return whether both rotations have equal tables."""
        pairs = ((self.cos, other.cos), (self.sin, other.sin))
        return self.interleaved == other.interleaved and all(torch.equal(*pair) for pair in pairs)

    def between(self, old: torch.Tensor, new: torch.Tensor) -> KeyRotation:
        """Return the rotation that moves keys from the positions `old [T]` to the positions `new [T]`."""
        if not self.cos.shape[1]:
            none = torch.empty(len(old), 0, device=old.device)
            return KeyRotation(none, none)
        rows = ((self.cos[at], self.sin[at]) for at in (old, new))
        return KeyRotation(*rotation_between(*rows), self.interleaved)


UNROTATED = Rotation(torch.empty(0, 0), torch.empty(0, 0))  # of a layer without positions (NoPE)


def check_rope(parameters: Mapping[str, object]) -> None:
    """Raise `UnsupportedModel` for a RoPE whose keys cannot be moved exactly.

    `parameters` are those of one RoPE, or map kinds of layers to such parameters.
    """
    nested = [one for one in parameters.values() if isinstance(one, Mapping)]
    for one in nested:
        check_rope(one)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in SHIFT_INVARIANT:
        reason = "its frequencies depend on the length of the prompt, or lmc does not know them"
        supported = f"supported: {', '.join(SHIFT_INVARIANT)}"
        raise UnsupportedModel(f"RoPE of type {kind!r} cannot be re-rotated exactly: {reason} ({supported})")


def rotation_between(
    old: tuple[torch.Tensor, torch.Tensor], new: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the rotation, in float32, that moves keys from old to new positions.

    The arguments are rows of the model's own cos and sin. The result is divided by the rows' squared magnitude, because
    stored keys already have that factor. The magnitude is 1 unless YaRN scales the rows. Equal rows give exactly
    (1, 0), so an unmoved key keeps its bits.
    """
    co, so, cn, sn = (t.float() for t in (*old, *new))
    magnitude = co * co + so * so
    return (cn * co + sn * so) / magnitude, (sn * co - cn * so) / magnitude


def rotate(keys: torch.Tensor, rotation: KeyRotation, out: torch.Tensor) -> None:
    """Rotate `keys [H, T, D]` into `out`, computed in float32. Dimensions from R on are copied.

    Pairs are (i, i + R/2) as in GPT-NeoX and Llama, or (2i, 2i + 1) if interleaved, as in GPT-J. `out [H, T, D]` must
    not overlap `keys`. With an `out` in float32, no result is allocated.
    """
    (cos, sin, interleaved), half = rotation, rotation.cos.shape[-1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    if 2 * half < keys.shape[-1]:
        out[..., 2 * half :] = keys[..., 2 * half :]
    a, b = keys[..., first].float(), keys[..., second].float()
    for one, other, sign, into in ((a, b, -1, out[..., first]), (b, a, 1, out[..., second])):
        if out.dtype is torch.float32:
            torch.mul(one, cos, out=into).addcmul_(other, sin, value=sign)
        else:
            into.copy_((one * cos).addcmul_(other, sin, value=sign))
