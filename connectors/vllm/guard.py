"""Guards vLLM against errors of lmc: an error in a hook is a cache miss for its request, and never stops the engine.

The first error of each hook is logged with its traceback. After `MAX_ERRORS` errors, lmc switches itself off, and later
requests are served without lmc. After an error at the start, all requests are.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lmc.errors import LmcError

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_ERRORS = 10  # number of errors since the start of the engine after which lmc switches itself off


class HookGuard:
    """Counts the errors of lmc's hooks in one process of an engine."""

    def __init__(self, *, raises: bool = False, switches: bool = True) -> None:
        """Create a guard without errors.

        `raises`: errors are logged and raised, because other ranks would wait for this rank.
        `switches`: this guard decides whether lmc is switched off. A guard without it reports its errors to the guard
        that decides.
        """
        self._raises, self._switches, self._handed_over = raises, switches, 0
        self.errors: Counter[str] = Counter()  # number of errors by hook

    @contextmanager
    def part_of_start(self, disable: Callable[[], object]) -> Iterator[None]:
        """Call `disable` if a part of the start raises an error, so that vLLM starts without lmc.

        Errors that lmc raises on purpose, such as that of a wrong setting, end the start.
        """
        try:
            yield
        except LmcError:
            raise
        except Exception:
            if self._raises:
                raise
            log.exception("lmc failed at its start and is disabled; vLLM continues without it. Report this error")
            disable()

    @property
    def off(self) -> bool:
        """Whether lmc has switched itself off."""
        return self.errors.total() >= MAX_ERRORS

    @property
    def status(self) -> str:
        """The state of lmc in this process, for operators."""
        hooks = ", ".join(sorted(+self.errors))
        return f"off: {self.errors.total()} errors in {hooks}; the log has the first of each" if self.off else "ok"

    def run(self, hook: str, do: Callable[[], T], otherwise: T, repair: Callable[[], object] | None = None) -> T:
        """Return the result of `do`. If `do` raises an error, run `repair` and return `otherwise`."""
        self.errors.setdefault(hook, 0)  # The rate of a metric needs a value before the first error.
        try:
            return do()
        except Exception as error:
            self._count(hook, error)
            if self._raises:
                raise
        if repair is not None:
            try:
                repair()
            except Exception as error:  # noqa: BLE001 - The repair is the last resort; its error is counted.
                self._count(f"{hook} (repair)", error)
        return otherwise

    @property
    def has_new_errors(self) -> bool:
        """Whether errors have occurred since the last call of `new_errors`."""
        return self.errors.total() > self._handed_over

    def new_errors(self) -> int:
        """Return the number of errors since the last call."""
        handed_over, self._handed_over = self._handed_over, self.errors.total()
        return self._handed_over - handed_over

    def add(self, hook: str, count: int) -> None:
        """Count errors that were logged, here or by the guard of another process."""
        was_off = self.off
        self.errors[hook] += count
        if self.off and not was_off and self._switches:
            log.error(
                "lmc switched itself off after %d errors; vLLM continues without it. Restart the engine to use lmc "
                "again, and report the errors logged above",
                self.errors.total(),
            )

    def _count(self, hook: str, error: Exception) -> None:
        if not self.errors[hook]:
            log.error("lmc failed in %s; the request continues without lmc", hook, exc_info=error)
        self.add(hook, 1)
