"""Chunk keys: the same in every process, and never the same for different things."""

import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lmc.errors import InputError
from lmc.keys import Namespace, chunk_bounds, document_keys, exact_keys

SPACE = Namespace(
    kind="tokens",
    model="a model",
    dtype="bfloat16",
    layers=4,
    kv_heads=2,
    head_dim=16,
    rope="theta=10000",
    chunk_size=256,
)
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=50)


def chain(parent: bytes, tokens: list[int], size: int) -> list[bytes]:
    """The chain as the design writes it, packed token by token."""
    keys = []
    for start in range(0, len(tokens), size):
        packed = b"".join(struct.pack("<I", token) for token in tokens[start : start + size])
        parent = hashlib.sha256(parent + packed).digest()
        keys.append(parent)
    return keys


@given(tokens_lists, st.integers(1, 9))
def test_exact_keys_are_the_published_chain(tokens, size):
    assert exact_keys(b"n" * 32, tokens, size) == chain(hashlib.sha256(b"n" * 32).digest(), tokens, size)


@given(tokens_lists, st.integers(1, 9))
def test_document_keys_are_the_published_chain(tokens, size):
    assert document_keys(b"n" * 32, tokens, size) == chain(
        hashlib.sha256(b"document" + b"n" * 32).digest(), tokens, size
    )


def test_one_value_written_out_so_that_the_format_cannot_drift():
    assert (
        exact_keys(b"", [1, 2, 3], 2)[0]
        == hashlib.sha256(hashlib.sha256(b"").digest() + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    )


@given(tokens_lists, tokens_lists, st.integers(1, 9))
def test_an_exact_key_covers_all_that_stands_before(before, tokens, size):
    before = before[: len(before) // size * size]
    assume(before)
    alone, behind = exact_keys(b"n", tokens, size), exact_keys(b"n", before + tokens, size)
    pairs = zip(alone, behind[len(before) // size :], strict=True)
    assert all(one != other for one, other in pairs)  # Others may be equal: their tokens up to there may be the same.


@given(tokens_lists, st.integers(1, 9))
def test_a_chunks_key_does_not_depend_on_what_follows(tokens, size):
    cut = len(tokens) // size // 2 * size
    assert document_keys(b"n", tokens, size)[: cut // size] == document_keys(b"n", tokens[:cut], size)


@given(tokens_lists, tokens_lists, st.integers(1, 9))
def test_exact_and_document_keys_never_meet(some, others, size):
    assert set(exact_keys(b"n", some, size)).isdisjoint(document_keys(b"n", others, size))


def test_a_partly_full_chunk_has_another_key_than_the_full_one():
    assert exact_keys(b"n", [1, 2, 3], 4) != exact_keys(b"n", [1, 2, 3, 0], 4)


@pytest.mark.parametrize("name", [field.name for field in fields(Namespace)])
def test_a_change_in_any_field_of_the_namespace_makes_other_keys(name):
    value = getattr(SPACE, name)
    other = replace(SPACE, **{name: value + 1 if isinstance(value, int) else value + "x"})
    for keys in (exact_keys, document_keys):
        mine, theirs = keys(SPACE.digest(), range(600), 256), keys(other.digest(), range(600), 256)
        assert set(mine).isdisjoint(theirs)


def test_neighbouring_fields_do_not_run_into_each_other():
    assert replace(SPACE, kind="ab", cache_salt="c").digest() != replace(SPACE, kind="a", cache_salt="bc").digest()


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_another_process_with_another_hash_seed_makes_the_same_keys(seed):
    script = (
        "from lmc.keys import *\n"
        f"space = {SPACE!r}.digest()\n"
        "for keys in (exact_keys, document_keys): print(*[key.hex() for key in keys(space, range(600), 256)])\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    ours = [keys(SPACE.digest(), range(600), 256) for keys in (exact_keys, document_keys)]
    assert [line.split() for line in run.stdout.splitlines()] == [[key.hex() for key in keys] for keys in ours]


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**70, 1.5, "7", None])
def test_a_token_that_is_no_uint32_is_an_input_error(wrong):
    for keys in (exact_keys, document_keys):
        with pytest.raises(InputError, match="token ids must be integers"):
            keys(b"n", [1, wrong], 4)


def test_the_largest_token_is_fine():
    assert len(exact_keys(b"n", [0, 2**32 - 1], 4)) == 1


@pytest.mark.parametrize(
    ("tokens", "bounds"),
    [(0, []), (1, [(0, 1)]), (4, [(0, 4)]), (5, [(0, 4), (4, 5)]), (8, [(0, 4), (4, 8)])],
)
def test_bounds_cut_tokens_into_chunks_and_match_the_keys(tokens, bounds):
    assert chunk_bounds(tokens, 4) == bounds
    assert len(exact_keys(b"n", range(tokens), 4)) == len(bounds)
