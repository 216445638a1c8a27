"""Requests of a lab's engine step by step, and ways to get at what lies underneath: for tests of what goes wrong in the
middle.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lab import PLAIN, Lab, agree, facts
from storage_fakes import eventually
from tier_wrappers import Faulty
from vllm.distributed.kv_transfer import get_kv_transfer_group

from lmc.connectors.vllm.connector import LMCConnector
from lmc.connectors.vllm.worker.native import NativeLayers

STEPS, SECONDS = 3000, 30.0  # whatever takes longer hangs


class Steps:
    """Some requests of one engine."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.outputs: dict[str, Any] = {}  # by name, the newest of each
        self._names = 0

    def add(
        self, tokens: Sequence[int], lmc: Any = None, count: int = 8, *, salt: str | None = None, **more: Any
    ) -> str:
        """A request comes; returns its name."""
        self._names += 1
        name = f"r{self._names}"
        prompt = {"prompt_token_ids": list(tokens), **({"cache_salt": salt} if salt else {})}
        self.lab.llm.llm_engine.add_request(name, prompt, self.lab.parameters(lmc, count, **more))
        return name

    def step(self, steps: int = 1) -> None:
        """So many steps of the engine."""
        for _ in range(steps):
            for out in self.lab.llm.llm_engine.step():
                self.outputs[out.request_id] = out

    def until(self, reached: Callable[[], object]) -> None:
        """Step until something is so."""
        end = time.monotonic() + SECONDS
        while not reached():
            assert time.monotonic() < end, "it never comes to that"
            self.step()

    def run(self) -> None:
        """Step until every request has its answer."""
        steps = 0
        while self.lab.llm.llm_engine.has_unfinished_requests():
            assert steps < STEPS, "a request never ends"
            self.step()
            steps += 1

    def abort(self, name: str) -> None:
        """Abort a request whose user has gone."""
        self.lab.llm.llm_engine.abort_request([name])

    def preempt(self, name: str) -> None:
        """The engine needs its blocks: as `Scheduler.reset_prefix_cache` does it, without emptying the cache."""
        scheduler, request = self.lab.scheduler, self.request(name)
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.clear()

    def request(self, name: str) -> Any:
        """The engine's request."""
        return next(r for i, r in self.lab.scheduler.requests.items() if i.rsplit("-", 1)[0] == name)

    def state(self, name: str) -> Any:
        """What our scheduler's side knows of it."""
        return self.lab.states[self.request(name).request_id]

    def loading(self, name: str) -> bool:
        """Whether a worker is at it."""
        return self.state(name).loading


class Clock:
    """Time as the scheduler's side sees it."""

    def __init__(self, lab: Lab) -> None:
        self.now = 0.0
        lab.setup.clock = self

    def __call__(self) -> float:
        return self.now


class Gate:
    """A tier that hands out only so many parts of each chunk until it is opened, whichever thread comes first."""

    def __init__(self, lab: Lab, parts: int = 0) -> None:
        self._parts, self._read = parts, Counter()
        self._opened = threading.Event()
        tiers = lab.tiers
        tiers[0] = Faulty(tiers[0], self._wait)

    def open(self) -> None:
        self._opened.set()

    def _wait(self, verb: str, key: Any) -> Exception | None:
        if verb == "read":
            self._read[key] += 1
            if self._read[key] > self._parts and not self._opened.wait(SECONDS):
                return OSError("nobody opened the gate")
        return None


def worker() -> Any:
    """The worker's side in this process, also beside other connectors."""
    top = get_kv_transfer_group()
    return next(one._worker for one in getattr(top, "sub_connectors", [top]) if isinstance(one, LMCConnector))


def engine_pages() -> Any:
    """What the worker copies to and from."""
    return worker()._pages


def learning() -> tuple[Any, Any]:
    """The documents that the worker is learning, and the KV in the engine's memory of the tokens before them."""
    return worker()._learning, worker()._prefix_kv


def layers_of_lmc() -> Any:
    """The worker's view of the model's layers."""
    return worker()._layers


def poison() -> None:
    """Fill the engine's pages, so that stale bytes are not right by chance."""
    for view in engine_pages().views:
        view.fill_(3.0)


def check_pages_are_loaded_again(lab: Lab) -> None:
    """Pages of `PLAIN` that are loaded are what was computed."""
    wanted = lab.vanilla(PLAIN)
    lab.ask(PLAIN)
    lab.forget_prefixes()
    poison()
    found = lab.ask(PLAIN)
    assert facts(found)["exact_tokens"] == 672
    assert agree(found, wanted)
    lab.check()


def only_on_disk(lab: Lab) -> None:
    """Take everything out of memory."""
    store = lab.store
    store.flush()
    for key in list(lab.memory.host.keys()):
        lab.memory.drop(key)


def threads_are_done(lab: Lab) -> None:
    """Loads that were given up end when their thread next looks."""
    eventually(lambda: not lab.store.held())


def change_batches(monkeypatch: Any, change: Callable[[Any, Any], None]) -> None:
    """Put a fault, by `change`, into what lmc tells the engine's attention of a batch, given the rows' positions."""
    describe = NativeLayers._common

    def changed(self: Any, positions: Any, at: Any, tables: Any, uploads: Any) -> Any:
        batches = describe(self, positions, at, tables, uploads)
        uploads.send()  # A fault may be made of what is on the device.
        for batch in batches:
            change(batch, positions)
        return batches

    monkeypatch.setattr(NativeLayers, "_common", changed)
