"""Calls of an object store with deadlines, from threads that wait for them.

The library (`obstore`) is asynchronous. One thread runs the event loop, and callers wait until their deadlines.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from obstore import exceptions

from lmc.errors import TierUnusable

T = TypeVar("T")
MISSING = FileNotFoundError, exceptions.NotFoundError
STOP_SECONDS = 1.0  # time that calls in flight have to end when they are cancelled
LOGIN = re.compile(r"(?<=://)[^/\s@]*@")
REFUSALS = exceptions.PermissionDeniedError, exceptions.UnauthenticatedError


class Calls:
    """The calls of one object store."""

    def __init__(self, name: str, deadline: float) -> None:
        """Start the thread. `name` is the store's name in errors; `deadline` is in seconds."""
        self.name, self.deadline = name, deadline
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lmc-objects", daemon=True)
        self._thread.start()

    def begin(self, call: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin a call, whose answer `answer` waits for."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def answer(self, future: "Future[T]", within: float = 0.0) -> T:
        """Return the answer to a call.

        Raises `FileNotFoundError` for a missing object, `TimeoutError` after `within` seconds without an answer (0: the
        deadline), `TierUnusable` for missing permissions, and `OSError` for other errors.
        """
        with self.translated(within):
            try:
                return future.result(within or self.deadline)
            except TimeoutError:
                future.cancel()
                raise

    @contextmanager
    def translated(self, within: float = 0.0) -> Iterator[None]:
        """Raise the library's errors in the block as described for `answer`."""
        try:
            yield
        except TimeoutError:
            raise TimeoutError(f"{self.name}: no answer in {within or self.deadline:g} s") from None
        except MISSING as error:
            raise FileNotFoundError(_first_line(error)) from None
        except REFUSALS as error:
            raise TierUnusable(f"{self.name} refuses access: {_first_line(error)}") from None
        except exceptions.BaseError as error:
            raise OSError(f"{self.name}: {_first_line(error)}") from None

    def call(self, call: Coroutine[Any, Any, T], within: float = 0.0) -> T:
        """Return the answer to a call; see `answer`."""
        return self.answer(self.begin(call), within)

    def close(self) -> None:
        """Stop the thread. Calls in flight fail."""
        self.begin(self._stop())
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        self._loop.call_soon(self._loop.stop)


async def in_thread(work: Callable[[], T]) -> T:
    """Run work that may block forever, such as a system call for a file on NFS. It does not delay a process's end."""
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(work())
        except OSError as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="lmc-objects-file", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _first_line(error: Exception) -> str:
    """Return the first line of an error, without the login in a URL."""
    return LOGIN.sub("", (str(error).splitlines() or [type(error).__name__])[0].strip())
