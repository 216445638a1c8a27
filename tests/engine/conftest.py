"""Models, an engine that files share, and a cache server for the engine tests."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lab import DOCUMENTS, Lab, engine, make_model
from stepping import engine_pages, poison

sys.path.append(str(Path(__file__).parent.parent))
from service_process import ServerProcess

from lmc.connectors.vllm.vllm_api import installed_version


class SharedEngine:
    """The engine that stays for the next file, which may ask for the same model, settings and options.

    Only one engine fits into a process. An engine of another kind takes its place.
    """

    def __init__(self) -> None:
        self._running, self._lab, self._kind = ExitStack(), None, None

    def __call__(self, model: Path, settings: dict[str, Any] | None = None, **options: Any) -> Lab:
        """Return an engine of this kind with empty caches and pages, as after its start."""
        kind = (model, settings or {}, options)
        if kind != self._kind:
            self.close()
            self._lab, self._kind = self._running.enter_context(engine(model, settings, **options)), kind
            self._markers = self._lab.setup.markers
        self._lab.forget()
        self._lab.setup.markers = self._markers
        for view in engine_pages().views:
            view.zero_()
        return self._lab

    def close(self) -> None:
        """Stop the engine, if there is one."""
        self._lab = self._kind = None
        self._running.close()


SHARED = SharedEngine()
# Its attention for CPUs wants sinks in bfloat16, and it reads the second family's configuration wrongly.
NOT_IN_0_30 = ("gptoss", "exaonemoe")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the shared engine first, those of the common kind before those of other models."""

    def later(item: pytest.Item) -> tuple[bool, bool]:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        other = any(parameters.get(name, "llama") != "llama" for name in ("lab", "shared"))
        return "shared_engine" not in item.fixturenames, other

    items.sort(key=later)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Stop the shared engine before a test that may start another one."""
    if "shared_engine" not in item.fixturenames:
        SHARED.close()


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[SharedEngine]:
    """A function from a model, settings and engine options to an engine, which is started only if there is no other."""
    yield SHARED
    SHARED.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A function from a family's name to a small model of it."""
    folder = tmp_path_factory.mktemp("models")

    def model(family: str) -> Path:
        if family in NOT_IN_0_30 and installed_version().startswith("0.30."):
            pytest.skip("vLLM 0.30 for CPUs does not run this family, also without lmc")
        return make_model(family, Path(folder))

    return model


@pytest.fixture
def lab(shared):
    """The engine of a module's fixture `shared` with the documents learned, and nothing else in any cache.

    It is proven to hold nothing afterwards.
    """
    shared.forget()
    shared.learn(DOCUMENTS)
    poison()
    yield shared
    shared.check()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A cache server in a process of its own, for the tests of a module that has no other server."""
    server = ServerProcess(tmp_path_factory.mktemp("server"), max_local_cpu_size=0.25)
    yield server
    server.kill()
