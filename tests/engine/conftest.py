"""Models and a cache server for the engine tests."""

import sys
from pathlib import Path

import pytest
from lab import make_model

sys.path.append(str(Path(__file__).parent.parent))
from service_process import ServerProcess


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A function from a family's name to a small model of it."""
    folder = tmp_path_factory.mktemp("models")
    return lambda family: make_model(family, Path(folder))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A cache server in a process of its own, for the tests of a module that has no other server."""
    server = ServerProcess(tmp_path_factory.mktemp("server"), max_local_cpu_size=0.25)
    yield server
    server.kill()
