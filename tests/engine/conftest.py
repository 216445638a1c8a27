"""Models for the engine tests."""

from pathlib import Path

import pytest
from lab import make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A function from a family's name to a small model of it."""
    folder = tmp_path_factory.mktemp("models")
    return lambda family: make_model(family, Path(folder))
