"""Each of these errors in a kernel fails a test: wrong masks, slots, rotations, strides and scales."""

import importlib.util
from pathlib import Path

import pytest
import test_attention
import test_place
import test_quantised_pages
import test_shift
import torch

from lmc.blend.kernels import attention_triton, place_triton, shift_triton

pytestmark = pytest.mark.long

SHAPE, PARTLY, FLOAT = (2, 4, 64, 16), (3, 96, 32, 48), torch.float32
# Which test fails: its module, its name, and its arguments.
OUTPUTS = test_attention, "test_outputs_are_those_of_torch", (SHAPE, FLOAT, "apart")
MEANS, MOST = (
    (test_attention, "test_scores_are_those_of_torch_and_absent_keys_get_none", (SHAPE, FLOAT, "apart", over_heads))
    for over_heads in ("mean", "max")
)
TOGETHER, SHARING_TOKENS = (
    (test_attention, "test_programs_that_share_keys_and_tokens_find_the_same", (count, FLOAT, over_heads))
    for count, over_heads in ((12, "mean"), (40, "max"))
)
PART = test_attention, "test_queries_may_be_a_part_of_a_larger_tensor", ()
CANARY = test_attention, "test_a_later_key_changes_no_earlier_row", ()
PLACED, PAIRED = (
    (test_place, "test_what_is_placed_is_what_torch_places", (PARTLY, FLOAT, interleaved, "apart"))
    for interleaved in (False, True)
)
OTHER_DIM = test_place, "test_values_may_have_another_dim", (32, 1)
READ = test_place, "test_what_is_read_is_what_torch_reads", (PARTLY, 76, "apart")
DEVIATES = test_place, "test_deviations_are_those_of_torch", (PARTLY, FLOAT, "apart")
SHIFTED = test_shift, "test_changes_and_corrections_are_those_of_torch", (PARTLY, FLOAT, False, "apart")
SHIFTED_DIM = test_shift, "test_values_of_another_dim_are_corrected", (32, 2)
OUTPUTS_IN_8_BITS, PLACED_IN_8_BITS, CHANGES_IN_8_BITS, SHIFTED_IN_8_BITS = (
    (test_quantised_pages, name, (torch.float8_e5m2, *more))  # which torch does not limit to its largest number
    for name, more in (
        ("test_attention_and_scores_are_those_of_the_models_numbers", (FLOAT, "HND")),
        ("test_what_is_placed_is_rotated_and_rounded_once", (64,)),
        ("test_deviations_and_changes_are_those_of_the_models_numbers", ()),
        ("test_corrections_are_those_of_the_models_numbers", (False,)),
    )
)
WEIGHED = test_shift, "test_weights_are_those_of_torch", (PARTLY, FLOAT, False, "apart")

ATTENTION = [  # what stands in the module, what is put there, and which test fails
    # masks
    ("j[None, :] <= at[:, None], logits", "j[None, :] < at[:, None], logits", OUTPUTS),
    ("j[None, :] <= at[:, None], logits", "j[None, :] <= at[:, None] + 1, logits", CANARY),
    ("tl.minimum((first + 1) // BN * BN, reach)", "tl.minimum((first + BN) // BN * BN, reach)", CANARY),
    ("first = tl.min(tl.where(there, at, 2147483647), 0)", "first = tl.max(at, 0)", CANARY),
    ("reach = tl.max(at, 0) + 1", "reach = tl.max(at, 0)", OUTPUTS),
    ("seen &= tl.load(present + j, mask=seen, other=0) != 0\n    best", "best", MEANS),
    ("(j[None, :] <= at[:, None]) & seen[None, :]", "seen[None, :]", MEANS),
    ("tl.max(over_heads, 0)", "tl.sum(over_heads, 0)", MOST),
    ("best /= HEADS * GROUP", "best /= HEADS", MEANS),
    # shares of keys and of tokens
    ("begin = low + share * per", "begin = low + share * (per + BN)", TOGETHER),
    ("reach = tl.minimum(reach, begin + per)", "reach = reach", TOGETHER),
    ("tl.num_programs(1) - 1 - tl.program_id(1)", "tl.num_programs(1) - tl.program_id(1)", OUTPUTS),
    ("_queries(row + tl.minimum(tl.load(positions), 0), tile", "_queries(row, tile + 1", OUTPUTS),
    ("part_sums + (share * QUERIES + q)", "part_sums + q", TOGETHER),
    ("part * weight[:, None]", "part", TOGETHER),
    ("sums = sums * shrunk[:, None] + part", "sums = sums + part", TOGETHER),
    ("log_sums + q * tokens + t, most + tl.log2(total)", "log_sums + q * tokens + t, most", TOGETHER),
    ("first = tl.program_id(1) * BT if SHARED else 0", "first = 0", SHARING_TOKENS),
    ("tl.atomic_max(paid + j", "tl.store(paid + j", SHARING_TOKENS),
    # slots
    ("+ (j % SIZE).to", "+ (j % (SIZE - 1)).to", OUTPUTS),
    ("tl.load(table + j // SIZE", "tl.load(table + j // SIZE * 0", OUTPUTS),
    # heads and strides
    ("return t, h * GROUP + row % GROUP", "return t, h + row % GROUP * 2", OUTPUTS),
    ("h, value_block, value_head, value_token", "h, key_block, key_head, key_token", OUTPUTS),
    ("(h * GROUP + g) * query_head", "(h + g) * query_head", MEANS),
    ("t.to(tl.int64)[:, None] * query_token + (h", "t.to(tl.int64)[:, None] * HEADS * GROUP * D + (h", PART),
    # scales
    ("total[:, None] * value_scale", "total[:, None]", OUTPUTS_IN_8_BITS),
    ("layer.scale * pages.scales[0]", "layer.scale", OUTPUTS_IN_8_BITS),
]
VALUES, AS_KEYS = (  # the rows of values with their own strides, and with those of keys
    f"_rows(values, slots, t, there, h, size, {one}_block, {one}_head, {one}_token)" for one in ("value", "key")
)
PLACE = [
    ("slot % size * stride_token", "slot % (size - 1) * stride_token", PLACED),
    ("slot // size * stride_block", "slot // (size + 1) * stride_block", READ),
    ("slot // size * stride_block", "slot // (size + 1) * stride_block", DEVIATES),
    *((f"{into} = {VALUES}", f"{into} = {AS_KEYS}", test) for into, test in (("into", PLACED), ("source", READ))),
    ("stored_values + (row * V)", "stored_values + (row * D)", OTHER_DIM),
    # rotations
    ("a * c - b * s", "a * c + b * s", PLACED),
    ("return 2 * i, 2 * i + 1", "return i, i + HALF", PAIRED),
    ("return i, i + HALF", "return i, i + HALF - 1", PLACED),
    ("(d >= 2 * HALF) & (d < D)", "(d >= HALF) & (d < D)", PLACED),
    # numbers of 8 bits
    ("tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST)", "numbers", PLACED_IN_8_BITS),
    ("now.to(tl.float32) * scale", "now.to(tl.float32)", CHANGES_IN_8_BITS),
]
SHIFT = [
    *((f"{row} = {VALUES}", f"{row} = {AS_KEYS}", SHIFTED) for row in ("now", "into")),
    ("_add(into, first, a * c - b * s, half", "_add(into, first, a * c + b * s, half", SHIFTED),
    ("n < tl.load(tile + 1)", "n < tl.load(tile + 1) - 1", SHIFTED),
    ("known, wide = m < tl.load(tile + 3)", "known, wide = m < MOST", SHIFTED),
    ("* share, mask=whole", ", mask=whole", SHIFTED),
    ("e += HEADS * D + h * (V - D)", "e += h * (V - D)", SHIFTED),
    ("e += HEADS * D + h * (V - D)", "e += HEADS * D", SHIFTED_DIM),
    # scales
    ("_difference(now, old, v, whole, value_scale)", "_difference(now, old, v, whole, 1.0)", CHANGES_IN_8_BITS),
    ("wide, there, key_scale, D", "wide, there, 1.0, D", CHANGES_IN_8_BITS),
    ("more / scale", "more", SHIFTED_IN_8_BITS),
    ("more, mask, value_scale", "more, mask, key_scale", SHIFTED_IN_8_BITS),
    ("pages.scales[0], size", "1.0, size", SHIFTED_IN_8_BITS),
    # weights: masks
    ("mask = (t < tokens)[:, None]", "mask = (t < tokens - 1)[:, None]", WEIGHED),
    ("r < tl.load(span + 1))", "r < tl.load(span + 1) - 1)", WEIGHED),
    ("tl.where(there[:, None] & (m < known)[None, :], products", "tl.where(there[:, None], products", WEIGHED),
    ("(example + r, r < known)", "(example + r, r < known - 1)", WEIGHED),
    ("r[:, None] == m[None, :], 1.0, 0.0", "r[:, None] == m[None, :], 0.9, 0.0", WEIGHED),
    # slots, rotations and strides
    ("source = _rows(keys, slots, t, there, h, size,", "source = _rows(keys, slots, t, there, h, size + 1,", WEIGHED),
    ("_rotate(source, None, into, cos, sin", "_rotate(source, None, into, sin, cos", WEIGHED),
    ("into = out + (wide * HEADS + h) * D", "into = out + (h * tokens + wide) * D", WEIGHED),
    ("key_block, key_head, key_token)\n    into = out", "key_block, 0, key_token)\n    into = out", WEIGHED),
    ("begin in range(0, DIMS, BD)", "begin in range(0, DIMS - BD, BD)", WEIGHED),
    # other documents
    ("example, known, number = tl.load(span + 2)", "example, known, number = tl.load(span + 2) * 0", WEIGHED),
    ("first, tokens = tl.load(documents + 5 * number)", "first, tokens = tl.load(documents)", WEIGHED),
    ("tl.load(means + number * DIMS", "tl.load(means", WEIGHED),
    ("tl.load(inverses + its)", "tl.load(inverses + its - number * MOST * MOST)", WEIGHED),
    # what a regression has
    ("other=0.0) - mean[None, :]", "other=0.0)", WEIGHED),
    ("tl.maximum(tl.sqrt(length), 1e-12)[:, None] * ", "", WEIGHED),
    (" * tl.maximum(tl.sqrt(known_length), 1e-12)[None, :]", "", WEIGHED),
    ("products + SHARED", "products", WEIGHED),
    ('weights = tl.dot(products, tl.load(inverses + its), input_precision="tf32x3")', "weights = products", WEIGHED),
]
MUTANTS = [
    (module, *one)
    for module, some in ((attention_triton, ATTENTION), (place_triton, PLACE), (shift_triton, SHIFT))
    for one in some
]


def planted(module, before: str, after: str, folder: Path):
    """The module with an error in it."""
    text = Path(module.__file__).read_text()
    assert before in text, "the kernel has changed, and this error has to be written anew"
    file = folder / "mutant.py"
    file.write_text(text.replace(before, after))
    spec = importlib.util.spec_from_file_location("mutant", file)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant


@pytest.mark.parametrize(("module", "before", "after", "fails"), MUTANTS)
def test_an_error_is_found(module, before, after, fails, tmp_path, monkeypatch):
    tests, name, arguments = fails
    monkeypatch.setattr(tests, module.__name__.rpartition(".")[2], planted(module, before, after, tmp_path))
    given = (monkeypatch, *arguments) if fails[0:2] == TOGETHER[0:2] else arguments
    with pytest.raises(AssertionError):
        getattr(tests, name)(*given)
