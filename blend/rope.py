"""Re-rotation of stored keys from the positions they were computed at to the positions they are used at.

RoPE rotates pairs of dimensions by an angle that grows with the position, so a rotation by the difference of two angles
moves a key without computing it anew (RoFormer, Su et al. 2021). The difference is taken from the model's own cos and
sin rows, which makes scaled frequencies (llama3), YaRN's magnitude factor, partial rotation and both ways of pairing
dimensions come out as in the model.
"""

from collections.abc import Mapping

import torch

from lmc.errors import UnsupportedModel

# With these types frequencies do not depend on the prompt's length, so that a rotation by a difference is exact.
SHIFT_INVARIANT = ("default", "linear", "llama3", "yarn")


def check_rope(parameters: Mapping[str, object]) -> None:
    """Raise `UnsupportedModel` for a RoPE whose keys cannot be moved exactly."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in SHIFT_INVARIANT:
        raise UnsupportedModel(
            f"RoPE of type {kind!r} cannot be re-rotated exactly: its frequencies depend on the length of the prompt, "
            f"or lmc does not know them (supported: {', '.join(SHIFT_INVARIANT)})"
        )


def turn_between(
    cos_old: torch.Tensor, sin_old: torch.Tensor, cos_new: torch.Tensor, sin_new: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, float32 `[T, R/2]`, of the rotation that moves keys from old to new positions.

    The arguments are rows `[T, R/2]` of the model's cos and sin. The result is divided by the rows' squared magnitude,
    which is 1 except where YaRN scales them, because stored keys have that factor already. Equal rows give exactly
    (1, 0), so that a key that does not move keeps its bits.
    """
    co, so, cn, sn = (t.float() for t in (cos_old, sin_old, cos_new, sin_new))
    magnitude = co * co + so * so
    return (cn * co + sn * so) / magnitude, (sn * co - cn * so) / magnitude


def rotate(
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate `keys [H, T, D]` by `cos, sin [T, R/2]`, computed in float32; dimensions from R on stay as they are.

    Pairs are (i, i + R/2) as in GPT-NeoX and Llama, or (2i, 2i + 1) if `interleaved`, as in GPT-J. With `out`, of the
    same shape and dtype and not overlapping, nothing is allocated for float32.
    """
    out = torch.empty_like(keys) if out is None else out
    half = cos.shape[-1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    if 2 * half < keys.shape[-1]:
        out[..., 2 * half :] = keys[..., 2 * half :]
    a, b = keys[..., first].float(), keys[..., second].float()
    if out.dtype is torch.float32:
        torch.mul(a, cos, out=out[..., first]).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out[..., second]).addcmul_(a, sin)
    else:
        out[..., first] = (a * cos).addcmul_(b, sin, value=-1)
        out[..., second] = (b * cos).addcmul_(a, sin)
    return out
