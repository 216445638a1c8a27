"""A real cache server: `lmc serve` in a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from forked import Forked, command


class ServerProcess:
    """`lmc serve`; start it again after it was killed. `forked` spares it the imports."""

    def __init__(self, folder: Path, *options: str, forked: bool = False, **settings: object) -> None:
        self.options, self._forked = options, forked
        self.path, self._log = folder / "lmc.sock", folder / "server.log"
        self._settings = {f"LMC_{name.upper()}": str(value) for name, value in settings.items()}
        self.start()

    @property
    def address(self) -> str:
        """What LMC_SERVER is for engines."""
        return f"unix://{self.path}"

    @property
    def log(self) -> str:
        """What the server has written."""
        return self._log.read_text()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        words = ["serve", "--socket", str(self.path), *self.options]
        before = self._log.stat().st_size if self._log.exists() else 0
        self._log.touch()
        self.process: Forked | subprocess.Popen[bytes]
        if self._forked:
            self.process = Forked(command, *words, environment={**os.environ, **self._settings}, output=self._log)
        else:
            whole = [sys.executable, "-c", "from lmc.commands.cli import main; main()", *words]
            with self._log.open("a") as log:
                self.process = subprocess.Popen(whole, env={**os.environ, **self._settings}, stdout=log, stderr=log)
        while "listens at" not in self._log.read_text()[before:]:
            assert self.process.poll() is None, self.log

    def kill(self) -> None:
        """Kill it in the middle of whatever it does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Let it end, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)
