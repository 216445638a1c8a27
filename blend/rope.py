"""Re-rotation of stored keys from the positions at which they were computed to those at which they are used.

RoPE rotates pairs of dimensions by an angle that grows with the position. So a rotation by the difference of two angles
moves a key without recomputing it (RoFormer, Su et al. 2021). The difference is taken from the model's own cos and sin
rows. This reproduces scaled frequencies (llama3), YaRN's magnitude factor, partial rotation and both pairings of
dimensions exactly as in the model.
"""

from collections.abc import Mapping

import torch

from lmc.errors import UnsupportedModel

# Frequencies of these types do not depend on the prompt's length, so a rotation by a difference is exact.
SHIFT_INVARIANT = ("default", "linear", "llama3", "yarn")
Turn = tuple[torch.Tensor, torch.Tensor]  # cos and sin [T, R/2]


def check_rope(parameters: Mapping[str, object]) -> None:
    """Raise `UnsupportedModel` for a RoPE whose keys cannot be moved exactly."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in SHIFT_INVARIANT:
        reason = "its frequencies depend on the length of the prompt, or lmc does not know them"
        supported = f"supported: {', '.join(SHIFT_INVARIANT)}"
        raise UnsupportedModel(f"RoPE of type {kind!r} cannot be re-rotated exactly: {reason} ({supported})")


def turn_between(old: Turn, new: Turn) -> Turn:
    """Return the rotation, in float32, that moves keys from old to new positions.

    The arguments are rows of the model's own cos and sin. The result is divided by the rows' squared magnitude, because
    stored keys already have that factor. The magnitude is 1 unless YaRN scales the rows. Equal rows give exactly
    (1, 0), so an unmoved key keeps its bits.
    """
    co, so, cn, sn = (t.float() for t in (*old, *new))
    magnitude = co * co + so * so
    return (cn * co + sn * so) / magnitude, (sn * co - cn * so) / magnitude


def rotate(keys: torch.Tensor, turn: Turn, out: torch.Tensor, *, interleaved: bool = False) -> None:
    """Rotate `keys [H, T, D]` into `out`, computed in float32. Dimensions from R on are copied.

    Pairs are (i, i + R/2) as in GPT-NeoX and Llama, or (2i, 2i + 1) if `interleaved`, as in GPT-J. `out [H, T, D]` must
    not overlap `keys`. With an `out` in float32, no result is allocated.
    """
    (cos, sin), half = turn, turn[0].shape[-1]
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
