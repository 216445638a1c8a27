"""How the router looks after engines: breakers, health checks and lookups, none of which ends or waits for another."""

import asyncio
import logging
from contextlib import asynccontextmanager

import aiohttp
import pytest
from echo_engine import EchoEngine
from router_house import house, served
from service_fakes import eventually

from lmc.errors import ConfigError
from lmc.router import watch as watching
from lmc.router.engines import FAILURES, FIRST_PAUSE, EngineBreaker, Engines, address
from lmc.router.policies import make
from lmc.router.settings import RouterSettings
from lmc.router.tasks import keep_up
from lmc.router.watch import Watch


@asynccontextmanager
async def looking(engines, discovery=None, follow=None):
    async with aiohttp.ClientSession() as session:
        watch = Watch(RouterSettings(health_seconds=0.02), engines, make("round_robin"), session, discovery, follow)
        tasks = await watch.open()
        try:
            yield watch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await watch.close()


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


# -- breakers ---------------------------------------------------------------------------------------------------------


def test_requests_that_fail_at_once_open_a_breaker_for_its_first_pause():
    """Fifty requests were on their way when an engine ended. Each doubled the pause, to its longest."""
    breaker = EngineBreaker()
    for _ in range(50):
        breaker.failed(100.0)
    assert breaker.state(100.0 + FIRST_PAUSE - 0.01) == "open"
    assert breaker.state(100.0 + FIRST_PAUSE) == "half-open"


def test_only_the_request_that_tries_doubles_the_pause():
    breaker = EngineBreaker()
    for _ in range(FAILURES):
        breaker.failed(0.0)
    assert breaker.sent(), "it tries"
    assert breaker.state(FIRST_PAUSE) == "open", "one at a time"
    breaker.ended(trial=False)  # an older request
    assert breaker.state(FIRST_PAUSE) == "open"
    breaker.failed(FIRST_PAUSE, trial=True)
    breaker.ended(trial=True)
    breaker.failed(FIRST_PAUSE + 1)
    assert breaker.state(3 * FIRST_PAUSE - 0.01) == "open"
    assert breaker.state(3 * FIRST_PAUSE) == "half-open"
    breaker.succeeded()
    assert (breaker.state(0.0), breaker.sent()) == ("closed", False)


def test_a_health_check_that_passes_lets_one_request_try():
    breaker = EngineBreaker()
    for _ in range(FAILURES):
        breaker.failed(0.0)
    breaker.passed()
    assert breaker.state(0.0) == "half-open"
    breaker.sent()
    assert breaker.state(0.0) == "open"


def test_an_engine_that_is_back_gets_requests_at_its_next_health_check():
    with house(1, health_seconds=0.1) as built:
        engine = built.router.application.engines[built.engines[0].url]
        engine.breaker.failures, engine.breaker.until = FAILURES, float("inf")
        eventually(lambda: built.ask("/v1/completions", {"model": "echo", "prompt": "x"})[0] == 200)


# -- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("x"), ConfigError("say it better")])
def test_a_task_goes_on_after_an_error_and_says_it_once(caplog, error):
    caplog.set_level(logging.WARNING)
    calls = []

    async def work():
        calls.append(0)
        if len(calls) < 4:
            raise error

    async def run():
        task = keep_up(work, "counting", pause=0.0)
        await until(lambda: len(calls) > 5)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert "counting" in caplog.text
    assert caplog.text.count("Traceback") == isinstance(error, KeyError)


def test_an_error_ends_neither_health_checks_nor_lookups(monkeypatch, caplog):
    """An unexpected exception ended the one loop of both, and nobody was told."""
    calls = []

    async def find(_):
        calls.append(0)
        if len(calls) < 3:
            raise RuntimeError("unexpected")
        return [address("http://127.0.0.1:1")]

    class Odd(Watch):
        async def _look_at(self, engine):
            calls.append(engine.url)
            raise RuntimeError("unexpected, too")

    monkeypatch.setattr("test_router_watch.Watch", Odd)

    async def run():
        engines = Engines()
        async with looking(engines, find):
            await until(lambda: len(engines) and calls.count("http://127.0.0.1:1") > 3)

    asyncio.run(run())
    assert caplog.text.count("finding the engines has failed") == 2
    assert "looking at the engines has failed" in caplog.text


def test_an_engine_is_followed_again_after_an_error():
    followed = []

    async def follow(engine):
        followed.append(engine.url)
        raise RuntimeError("unexpected")

    async def run(url):
        engines = Engines()
        engines.add(address(url, ["echo"], admin="127.0.0.1:1"))
        async with looking(engines, follow=follow):
            await until(lambda: len(followed) > 2)

    with pytest.MonkeyPatch.context() as patch, served(EchoEngine()) as engine:
        patch.setattr(watching, "AGAIN_SECONDS", 0.01)
        asyncio.run(run(engine.url))


def test_a_lookup_that_takes_long_holds_up_no_health_check(monkeypatch):
    monkeypatch.setattr(watching, "LOOKUP_SECONDS", 0.01)
    lookups, answered = [], asyncio.Event()

    async def find(_):
        lookups.append(0)
        await answered.wait()
        return [address("http://127.0.0.1:1")]

    async def run(echo, url):
        engines = Engines()
        engines.add(address(url))
        async with looking(engines, find):
            echo.healthy = False
            await until(lambda: not engines[url].healthy)
            echo.healthy = True
            await until(lambda: engines[url].healthy)
            assert len(lookups) == 1, "the same one goes on"
            answered.set()
            await until(lambda: len(engines) == 2)

    with served(EchoEngine()) as engine:
        asyncio.run(run(engine.application, engine.url))


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_the_metrics_of_an_engine_go_with_it():
    with house(2) as built:
        for number in range(6):
            built.ask("/v1/completions", {"model": "echo", "prompt": f"{number} " * 99})
        gone, stays = (one.url for one in built.engines)
        assert gone in built.send("/metrics").read().decode()
        built.ask("/engines", {"url": gone}, method="DELETE")
        text = built.send("/metrics").read().decode()
        assert gone not in text
        assert f'lmc_router_requests_total{{engine="{stays}"' in text
