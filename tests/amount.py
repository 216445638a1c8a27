"""How much is tested: everything with `--long`, and a part of it for each commit.

`conftest.py` sets the environment variable LONG_TESTS for `--long` before pytest imports a module of tests.
"""

import os
from collections.abc import Iterable
from typing import Any

import pytest


def some(count: int, share: float = 0.1) -> int:
    """Return `count` with `--long`, and this share of it otherwise."""
    return count if "LONG_TESTS" in os.environ else max(1, round(count * share))


def mostly_long(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the values of a parameter; all but those that are kept are marked long."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.long) for value in values]


def cases(values: Iterable[tuple[Any, ...]], *kept: tuple[Any, ...]) -> list[Any]:
    """Return the values of several parameters; all but those that are kept are marked long."""
    return [value if value in kept else pytest.param(*value, marks=pytest.mark.long) for value in values]
