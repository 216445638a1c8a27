"""Tasks that run as long as the router does. Nothing that goes wrong in one of them ends it, and nothing is silent."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from lmc.errors import LmcError

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0  # after an error


def keep_up(work: Callable[[], Awaitable[None]], what: str, pause: float = AGAIN_SECONDS) -> asyncio.Task[None]:
    """Return a task that does some work again and again, until it is cancelled; `what` says in the log what it is."""
    task = asyncio.create_task(_again_and_again(work, what, pause))
    task.add_done_callback(lambda done: _report(done, what))
    return task


async def attempt(work: Callable[[], Awaitable[None]], what: str, said: str = "") -> str:
    """Do some work, and return the error that it ends with, which is logged if it is not what was `said` before."""
    try:
        await work()
    except LmcError as error:
        if str(error) != said:
            log.warning("lmc router: %s: %s", what, error)
        return str(error)
    except Exception as error:
        log.exception("lmc router: %s has failed, and goes on", what, exc_info=repr(error) != said)
        return repr(error)
    return ""


async def _again_and_again(work: Callable[[], Awaitable[None]], what: str, pause: float) -> None:
    said = ""
    while True:
        said = await attempt(work, what, said)
        await asyncio.sleep(pause)


def _report(done: asyncio.Task[None], what: str) -> None:
    """Log the error that has ended a task, which nobody waits for."""
    if not done.cancelled() and (error := done.exception()):
        log.error("lmc router: %s has ended", what, exc_info=error)
