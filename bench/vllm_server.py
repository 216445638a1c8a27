"""Servers in processes of their own, such as `vllm serve` with lmc, for benchmarks that ask them as users do."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

from lmc.http.client import admin_client

START_SECONDS = 300
# The token for the end of a text tells messages of the small model apart.
SMALL_TEMPLATE = "{% for one in messages %}{{ one['content'] }}{% if not loop.last %}<|end|>{% endif %}{% endfor %}"


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


class Program:
    """A command that serves HTTP, which ends with the block."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        variables: Mapping[str, str] | None = None,
        *,
        host: str = "localhost",
    ) -> None:
        """Start a module of Python with its arguments, and with `variables` added to the environment.

        It serves at `host` and `port`, which the arguments have to say as well.
        """
        self.url, self._log = f"http://{host}:{port}", log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=file, stderr=file, env={**os.environ, **(variables or {})}
            )

    def wait(self, path: str = "/health") -> None:
        """Wait until it answers; raise `RuntimeError` if it does not start."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with urlopen(f"{self.url}{path}", timeout=1):
                    return
            except (URLError, OSError):
                time.sleep(0.3)
        self._process.kill()
        said = self._log.read_text()
        errors = "\n".join(line for line in said.splitlines() if "Error" in line)  # The first one is the cause.
        raise RuntimeError(f"it did not start:\n{errors[:3000]}\n{said[-1000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Shut it down, and wait for its end."""
        self._process.terminate()
        self._process.wait(60)

    def kill(self) -> None:
        """Kill it and the processes that it has started with SIGKILL."""
        for process in descendants(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait(60)


def descendants(process: int) -> list[int]:
    """Return a process and all that it and its children have started."""
    children = Path(f"/proc/{process}/task").glob("*/children")
    found = [process]
    for one in [int(child) for path in children for child in path.read_text().split()]:
        found += descendants(one)
    return found


class Server(Program):
    """`vllm serve` with lmc: the CPU build with one thread."""

    def __init__(
        self,
        model: str,
        folder: Path,
        template: str | None = None,
        variables: Mapping[str, str] | None = None,
        *,
        port: int = 0,
        host: str = "localhost",
        **settings: Any,
    ) -> None:
        """Start it, with settings of lmc and `variables` of the environment; without a `port`, at any free one.

        The administration is at a socket in `folder`, unless the variables say where.
        """
        port = port or free_port()
        variables = {"LMC_ADMIN": f"unix://{folder}/admin.sock", **(variables or {})}
        self.admin = admin_client(variables["LMC_ADMIN"])
        given = {"enable_blending": True, "max_local_cpu_size": 2, **settings}
        connector = {
            "kv_connector": "LMCConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": given,
        }
        words = ["--model", model, "--served-model-name", "bench", "--dtype", "float32"]
        words += ["--host", host, "--port", str(port)]
        words += ["--enforce-eager", "--enable-prompt-tokens-details", "--shutdown-timeout", "20", "--block-size", "32"]
        words += ["--kv-transfer-config", json.dumps(connector)]
        if template is not None:
            (folder / "template.jinja").write_text(template)
            words += ["--chat-template", str(folder / "template.jinja")]
        threads = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        variables = {**threads, "HF_HUB_OFFLINE": "1", **variables}
        command = ["vllm.entrypoints.openai.api_server", *words]
        super().__init__(command, port, folder / f"{port}.log", variables, host=host)
