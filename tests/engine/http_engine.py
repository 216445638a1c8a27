"""A vLLM server in a process of its own, with the small model that the project ships."""

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
from lab import BLOCK
from ports import free_port

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "lmc/demo/small_model/model"
SMALL = f"--dtype float32 --enforce-eager --block-size {BLOCK}"
APART = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")  # which other tests have set in this process
START_SECONDS = 600  # after which it hangs; a busy machine takes long


class HttpEngine:
    """A vLLM server, as a command of docs/service.md starts it."""

    def __init__(self, folder: Path, command: str) -> None:
        port = free_port()
        self.url, self._log = f"http://localhost:{port}", folder / f"{port}.log"
        program = f"exec {sys.executable} -m vllm.entrypoints.openai.api_server --model {MODEL} {SMALL}"
        command = re.sub(r"--port \d+", f"--port {port}", command.replace("vllm serve MODEL", program))
        self.command = command
        self.start()

    def start(self) -> None:
        """Start it; once it has been killed, again at the same port."""
        environment = {key: value for key, value in os.environ.items() if key not in APART}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                ["bash", "-ec", self.command], cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").is_success:
                    return
            time.sleep(0.2)

    def kill(self) -> None:
        """End it and the processes that it has started, of which none can say goodbye."""
        server = psutil.Process(self._process.pid)
        tree = [server, *server.children(recursive=True)]
        for one in tree:
            one.kill()
        self._process.wait(60)
        psutil.wait_procs(tree, 60)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
