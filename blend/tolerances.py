"""The difference of two results, and how large it may be: rounding is allowed, and errors are not."""

import torch

from lmc.errors import UnsupportedModel

# Differences, relative to the largest value, that are always allowed.
FLOOR = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Two prefills may round a value to neighbouring numbers of 8 bits, which differ by up to an eighth (e4m3) or a fourth
# (e5m2). A moved key is rounded twice.
FLOOR |= {torch.float8_e4m3fn: 0.15, torch.float8_e5m2: 0.3}
# The same for what went through layers: a layer rounds what it computes from rounded numbers. An engine that computes
# both prefills with the same tiles has no noise, but if its probabilities have 8 bits, they differ from those of lmc.
THROUGH_LAYERS = FLOOR | {torch.float8_e4m3fn: 0.3, torch.float8_e5m2: 0.5}
# Allowed difference, as a multiple of the model's noise: the difference between a prefill in one chunk and in two. An
# error in a mask, a slot or a rotation makes a difference of about 1, so a difference above `CEILING` is allowed only
# up to the smaller multiple `ALIKE`. Through 30 layers in bfloat16, two prefills differ by 0.06, and so may lmc's.
NOISE, ALIKE = 8, 3
CEILING = 0.1
LARGEST = 0.5  # largest allowed difference, however noisy the model is


def check(result_name: str, difference_found: float, noise: float, floor: float) -> None:
    """Raise `UnsupportedModel` if a difference is larger than `floor` and than the model's own noise allows."""
    allowed = max(min(NOISE * noise, max(CEILING, ALIKE * noise), LARGEST), floor)
    if not difference_found <= allowed:
        differ = f"lmc's {result_name} differ from the model's by {difference_found:.2g} (relative)"
        message = f"on random tokens {differ}"
        own_noise = f"two prefills of the model itself differ by {noise:.2g}"
        raise UnsupportedModel(f"the self-test failed: {message}; the limit is {allowed:.2g}, and {own_noise}")


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value of `expected`; infinite if a value is NaN."""
    largest = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-6)
    return float(largest.nan_to_num(nan=float("inf")))
