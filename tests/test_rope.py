"""Keys moved by re-rotation are the keys that the model would have computed at the new position."""

import pytest
import torch
from models import ROPES, random_model

from lmc.blend.rope import KeyRotation, Rotation, check_rope, rotate
from lmc.connectors.transformers.layers import DecoderLayers
from lmc.errors import UnsupportedModel

FULL = "full_attention"
OLD, NEW = torch.tensor([0, 1, 2, 63, 300, 7]), torch.tensor([41, 0, 900, 64, 12, 7])


def rotated_by_definition(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of transformers: rows `[T, R]`, x `[H, T, D]`."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def rotated(keys: torch.Tensor, rotation: KeyRotation) -> torch.Tensor:
    out = torch.empty_like(keys)
    rotate(keys, rotation, out)
    return out


@pytest.mark.parametrize("rope", ["plain", "linear", "llama3", "yarn"])
def test_a_moved_key_equals_the_key_computed_there(rope: str) -> None:
    layers = DecoderLayers(random_model(rope=rope))
    cos, sin, _ = layers.angles(1000)[FULL]
    raw = torch.randn(2, len(OLD), layers.shape.head_dim)
    half = layers.shape.head_dim // 2
    rotation = Rotation(cos[:, :half], sin[:, :half]).between(OLD, NEW)

    moved = rotated(rotated_by_definition(raw, cos[OLD], sin[OLD]), rotation)

    assert (moved - rotated_by_definition(raw, cos[NEW], sin[NEW])).abs().max() <= 1e-5


@pytest.mark.parametrize("rope", ["plain", "linear", "llama3", "yarn"])
def test_there_and_back_again_is_the_same_key(rope: str) -> None:
    cos, sin, _ = DecoderLayers(random_model(rope=rope)).angles(1000)[FULL]
    half = cos.shape[1] // 2
    keys = torch.randn(2, len(OLD), 2 * half)
    there = Rotation(cos[:, :half], sin[:, :half]).between(OLD, NEW)
    back = Rotation(cos[:, :half], sin[:, :half]).between(NEW, OLD)

    assert (rotated(rotated(keys, there), back) - keys).abs().max() <= 1e-5


def test_a_key_that_does_not_move_keeps_its_bits() -> None:
    cos, sin, _ = DecoderLayers(random_model(rope="yarn")).angles(1000)[FULL]
    half = cos.shape[1] // 2
    keys = torch.randn(2, len(OLD), 2 * half)
    stay = Rotation(cos[:, :half], sin[:, :half]).between(OLD, OLD)

    assert torch.equal(rotated(keys, stay), keys)


def test_bf16_keys_are_off_by_one_unit_in_the_last_place_at_most() -> None:
    cos, sin, _ = DecoderLayers(random_model()).angles(1000)[FULL]
    half = cos.shape[1] // 2
    raw = torch.randn(2, len(OLD), 2 * half)
    rotation = Rotation(cos[:, :half], sin[:, :half]).between(OLD, NEW)
    stored = rotated_by_definition(raw, cos[OLD], sin[OLD]).bfloat16()

    moved = rotated(stored, rotation)

    assert moved.dtype is torch.bfloat16
    wanted = rotated_by_definition(raw, cos[NEW], sin[NEW])
    assert (moved.float() - wanted).abs().max() <= wanted.abs().max() * 2**-7


@pytest.mark.parametrize("interleaved", [False, True])
def test_only_the_rotated_dimensions_turn(interleaved: bool) -> None:
    """Partial rotary: R = 4 of D = 10 dimensions; pairs as in GPT-NeoX and as in GPT-J."""
    angle = torch.tensor([[0.3, 1.1]])
    keys = torch.randn(3, 1, 10)

    out = rotated(keys, KeyRotation(angle.cos(), angle.sin(), interleaved))

    assert torch.equal(out[..., 4:], keys[..., 4:])
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    for (i, j), a in zip(pairs, angle[0], strict=True):
        moved_pair = torch.polar(torch.ones(()), a) * torch.complex(keys[:, 0, i], keys[:, 0, j])
        assert torch.allclose(
            torch.stack((moved_pair.real, moved_pair.imag)), torch.stack((out[:, 0, i], out[:, 0, j])), atol=1e-6
        )


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", "something-new"])
def test_a_rope_that_depends_on_the_prompt_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=kind):
        check_rope({**ROPES["plain"], "rope_type": kind})
