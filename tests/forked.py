"""Processes for tests, forked from one that has imported lmc and torch: a start takes milliseconds and not seconds.

`test_cli.py`, `test_cli_config.py`, `test_router_command.py` and `test_log.py` start commands as a shell does.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# Locks check their order in these processes, too.
IMPORTED = ["ranked_locks", "lmc.connectors.transformers", "lmc.server.server", "lmc.commands.cli"]


@cache
def context() -> Any:
    """Start the process from which the others are forked; return multiprocessing's context."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return multiprocessing.get_context("forkserver")


class Forked:
    """A process that runs a function, with what tests need of `subprocess.Popen`.

    The function and its arguments are pickled. `environment` has the variables, by default those of this process.
    Standard output and error are appended to `output` if it is given.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
    ) -> None:
        variables = dict(os.environ if environment is None else environment)
        self._process = context().Process(target=_run, args=(function, arguments, variables, output))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return how the process ended, or None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float = 120.0) -> int:
        """Wait for the end of the process; return its exit code, which is negative after a signal."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"process {self.pid} still runs"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def command(*words: str) -> None:
    """Run a command of lmc; this process is its own."""
    from lmc.commands.cli import main

    sys.argv[1:] = words
    main()


def _run(
    function: Callable[..., object], arguments: tuple[Any, ...], variables: dict[str, str], output: Path | None
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    if output is not None:
        with output.open("ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
    import torch

    torch.set_num_threads(1)
    function(*arguments)
