"""A router and engines for tests: each is a server of its own, in a thread of this process."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import uvicorn
from echo_engine import EchoEngine
from storage_fakes import eventually

from lmc.router.application import Router
from lmc.router.connections import bounded_protocol
from lmc.router.engines import Engines, address
from lmc.router.policies import make
from lmc.router.settings import RouterSettings

SECONDS = 30.0  # for which anything is waited for


@dataclass(slots=True)
class Served:
    """A server in a thread."""

    application: Any
    port: int
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self) -> None:
        """Begin the shutdown of the server."""
        self.server.should_exit, self.server.force_exit = True, self.server.config.lifespan == "off"

    def call(self, work: Any) -> Any:
        """Run a coroutine in the server's thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS)


@contextmanager
def served(application: Any, *, lifespan: bool = False, port: int = 0, http: Any = "auto") -> Iterator[Served]:
    """Serve an ASGI application. When the block ends, its connections are cut."""
    config = uvicorn.Config(
        application, http=http, log_level="critical", access_log=False,
        lifespan="on" if lifespan else "off", loop="asyncio",
        timeout_graceful_shutdown=1, timeout_keep_alive=int(2 * SECONDS), server_header=False, date_header=False,
    )  # fmt: skip
    listening, server, loops = socket.create_server(("127.0.0.1", port)), uvicorn.Server(config), []
    ready = threading.Event()

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        serving = asyncio.create_task(server.serve([listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        ready.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(SECONDS)
    assert server.started
    made = Served(application, listening.getsockname()[1], server, loops[0])
    try:
        yield made
    finally:
        made.end()
        thread.join(SECONDS)
        listening.close()


@dataclass(slots=True)
class House:
    """A router before engines."""

    router: Served
    engines: list[Served]
    known: Engines
    connections: list[HTTPConnection] = field(default_factory=list)

    @property
    def echoes(self) -> list[EchoEngine]:
        return [one.application for one in self.engines]

    def send(self, path: str, body: Any = None, headers: Any = None, method: str | None = None) -> HTTPResponse:
        """Send a request to the router, and return its answer, of which nothing has been read."""
        connection = self._sent(path, body, headers, method)
        self.connections.append(connection)
        return connection.getresponse()

    def ask(self, path: str, body: Any = None, headers: Any = None, method: str | None = None) -> tuple[int, Any]:
        """Send a request, and return the status and the JSON of the answer."""
        with closing(self._sent(path, body, headers, method)) as connection:
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")

    def rest(self) -> None:
        """Wait until the router has noted the end of all requests, after which its choices do not depend on them."""
        eventually(lambda: not any(engine.candidate.load for engine in self.known))

    def numbers(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with closing(self._sent("/metrics")) as connection:
            text = connection.getresponse().read().decode()
        begins = tuple(f"lmc_router_{name}{end}" for end in " {") if "{" not in name else f"lmc_router_{name} "
        lines = [line for line in text.splitlines() if line.startswith(begins)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def _sent(self, path: str, body: Any = None, headers: Any = None, method: str | None = None) -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", self.router.port, timeout=SECONDS)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"content-type": "application/json", **(headers or {})}
        connection.request(method or ("GET" if body is None else "POST"), path, data, given)
        return connection


@contextmanager
def house(
    count: int = 2,
    policy: str = "documents",
    options: Any = None,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> Iterator[House]:
    """A router and echo engines. The clock is that of the engines' breakers, for requests only."""
    with ExitStack() as opened:
        engines = [opened.enter_context(served(EchoEngine())) for _ in range(count)]
        known = Engines(clock=clock)
        for one in engines:
            known.add(address(one.url))
        application = Router(RouterSettings(**settings), make(policy, **(options or {})), known)
        router = opened.enter_context(served(application, lifespan=True, http=bounded_protocol()))
        application.proxy._clock = clock
        built = House(router, engines, known)
        try:
            yield built
        finally:  # Servers take a moment to end, and all of them the same one.
            for one in built.connections:
                one.close()
            for one in (router, *engines):
                one.end()
