"""Guards vLLM against errors of lmc: a hook that raises is a miss for its request, and never the end of the engine.

The first error of each hook is logged with its traceback. After `MAX_ERRORS` errors lmc switches itself off: requests
that come later are served as if it was not there.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_ERRORS = 10  # in the life of an engine


class HookGuard:
    """Counts the errors of lmc's hooks in one process of an engine."""

    def __init__(self, *, raises: bool = False, switches: bool = True) -> None:
        """`raises`: errors are logged and raised, because other ranks would wait for this one.

        `switches`: this guard decides whether lmc is switched off. One that does not hands its errors to one that does.
        """
        self._raises, self._switches, self._handed_over = raises, switches, 0
        self.errors: Counter[str] = Counter()  # by hook

    @property
    def off(self) -> bool:
        """Whether lmc has switched itself off."""
        return self.errors.total() >= MAX_ERRORS

    @property
    def status(self) -> str:
        """The state of lmc in this process, for people."""
        hooks = ", ".join(sorted(self.errors))
        return f"off: {self.errors.total()} errors in {hooks}; the log has the first of each" if self.off else "ok"

    def run(self, hook: str, do: Callable[[], T], otherwise: T, repair: Callable[[], object] | None = None) -> T:
        """Return what `do` returns. If it raises, run `repair` and return `otherwise`."""
        try:
            return do()
        except Exception as error:
            self._count(hook, error)
            if self._raises:
                raise
        if repair is not None:
            try:
                repair()
            except Exception as error:  # noqa: BLE001 - It was the last resort, and is counted.
                self._count(f"{hook} (repair)", error)
        return otherwise

    @property
    def has_new_errors(self) -> bool:
        """Whether there were errors since the last call of `new_errors`."""
        return self.errors.total() > self._handed_over

    def new_errors(self) -> int:
        """Return how many errors there were since the last call."""
        handed_over, self._handed_over = self._handed_over, self.errors.total()
        return self._handed_over - handed_over

    def add(self, hook: str, count: int) -> None:
        """Count errors that the guard of another process has caught and logged."""
        was_off = self.off
        self.errors[hook] += count
        self._log_switch(was_off=was_off)

    def _count(self, hook: str, error: Exception) -> None:
        was_off = self.off
        self.errors[hook] += 1
        if self.errors[hook] == 1:
            log.error("lmc failed in %s; the request goes on without lmc", hook, exc_info=error)
        self._log_switch(was_off=was_off)

    def _log_switch(self, *, was_off: bool) -> None:
        if self.off and not was_off and self._switches:
            log.error(
                "lmc has switched itself off after %d errors; vLLM goes on without it. Restart the engine to use lmc "
                "again, and report the errors that are logged above",
                self.errors.total(),
            )
