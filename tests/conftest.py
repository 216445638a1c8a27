"""Settings of the test process."""

import atexit
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator

# Before anything imports the hub's library: without a network it would try for half a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Digests of checkpoints are remembered in the user's cache directory; a test run leaves nothing there.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lmc-tests-")

import pytest
import ranked_locks  # noqa: F401 - Locks check the order in which they are taken.
import torch
from hypothesis import settings
from vllm_fakes import make  # noqa: F401 - a fixture

pytest.register_assert_rewrite("tier_contract")  # Its assertions say what they compared.

atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# The same examples in every run. To look for more, set other seeds by hand.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.load_profile("same")

# Small tensors: a second thread costs more in barriers than it computes, above all on a busy machine.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long` runs everything; the environment variable passes it on to the processes that tests start."""
    given = "LONG_TESTS" in os.environ
    parser.addoption("--long", action="store_true", default=given, help="run all tests, with full counts")


def pytest_configure(config: pytest.Config) -> None:
    """Set the variable from which `amount.py`, imported later, reads whether everything is run."""
    if config.getoption("--long"):
        os.environ["LONG_TESTS"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked long, unless `--long` is given."""
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture
def every_thread_ends_well(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a thread ends with an error. Modules use it for all of their tests."""
    ended: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(f"{args.thread}: {args.exc_value!r}"))
    yield
    assert ended == []


# Tests of the vLLM connector need an environment with vLLM (`make test` makes it and runs them there).
collect_ignore = [] if importlib.util.find_spec("vllm") else ["engine"]
# Triton decides when it is imported whether it interprets, so `test_kernels.py` runs these tests in a process apart.
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore.append("kernels")
