"""What the self-test allows: an error of lmc's is found, and a model is not refused for its own noise."""

from types import SimpleNamespace

import pytest
import torch

from lmc.blend import selftest
from lmc.blend.canvas import Paged
from lmc.blend.layer_attention import LayerAttention
from lmc.blend.segments import Placement
from lmc.blend.tolerances import FLOOR, THROUGH_LAYERS, check
from lmc.errors import UnsupportedModel


@pytest.mark.parametrize(
    ("difference", "noise", "dtype"),
    [
        (0.02, 0.0, torch.bfloat16),  # one rounding
        (0.09, 0.012, torch.bfloat16),
        (0.17, 0.06, torch.bfloat16),  # an 8B model of 32 layers, two prefills of which differ by as much
        (0.45, 0.2, torch.bfloat16),
        # An engine without noise whose probabilities have 8 bits: the largest differences of most trials.
        (0.27, 0.0, torch.float8_e4m3fn),
        (0.44, 0.0, torch.float8_e5m2),
    ],
)
def test_the_models_own_noise_is_allowed(difference: float, noise: float, dtype: torch.dtype) -> None:
    check("layers", difference, noise, THROUGH_LAYERS[dtype])


@pytest.mark.parametrize(
    ("difference", "noise", "dtype"),
    [
        (0.001, 0.0, torch.float32),
        (0.11, 0.012, torch.bfloat16),
        (0.19, 0.06, torch.bfloat16),
        (0.6, 0.3, torch.bfloat16),
        (1.0, 10.0, torch.bfloat16),
        (0.52, 0.0, torch.float8_e4m3fn),  # values with a scale that is wrong by a fifth
        (0.69, 0.0, torch.float8_e5m2),  # a row that does not see itself
        (float("nan"), 0.06, torch.bfloat16),
    ],
)
def test_a_difference_that_noise_does_not_explain_is_refused(
    difference: float, noise: float, dtype: torch.dtype
) -> None:
    with pytest.raises(UnsupportedModel, match=r"the self-test failed: .*; the limit is .*, and two prefills"):
        check("layers", difference, noise, THROUGH_LAYERS[dtype])


@pytest.mark.parametrize(("dtype", "difference"), [(torch.float8_e4m3fn, 0.2), (torch.float8_e5m2, 0.4)], ids=str)
def test_a_moved_key_did_not_go_through_layers(dtype: torch.dtype, difference: float) -> None:
    """A rotation that is wrong by one position makes a difference of 0.43 in SmolLM2."""
    with pytest.raises(UnsupportedModel, match="moved keys differ"):
        check("moved keys", difference, 0.0, FLOOR[dtype])


def test_a_rehearsal_has_long_contexts_in_caches_of_each_type(monkeypatch) -> None:
    """An engine may quantise the caches of some layers only. Kernels are compiled for each type."""
    caches = [torch.zeros(1, 1, 16, 16, dtype=dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16)]
    canvas = SimpleNamespace(
        attentions=[LayerAttention(scale=1.0)] * len(caches), paged=lambda layer: Paged(caches[layer], caches[layer])
    )
    rehearsed = set()
    monkeypatch.setattr(selftest, "Blender", lambda *_: SimpleNamespace(run=lambda: None))
    monkeypatch.setattr(selftest, "attend_long", lambda _, layer: rehearsed.add(caches[layer].dtype))
    selftest.rehearse(lambda: canvas, Placement(at=0, tokens=8, first=0), 16)
    assert rehearsed == {torch.bfloat16, torch.float8_e4m3fn}
