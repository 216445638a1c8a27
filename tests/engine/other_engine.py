"""A second engine over a cache server, in a process of its own (`service_engine_child.py`), which a test asks."""

import json
import subprocess
import sys
from pathlib import Path


class OtherEngine:
    """An engine that is attached to a server."""

    def __init__(self, model, server, **settings):
        child = str(Path(__file__).parent / "service_engine_child.py")
        command = [sys.executable, child, str(model), json.dumps({"server": server.address, **settings})]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while self.process.stdout.readline().strip() != "ready":
            assert self.process.poll() is None

    def ask(self, tokens, lmc=None, count=8, *, saves=True):
        """Return answer and facts, when everything is saved, or before that."""
        self.process.stdin.write(json.dumps([tokens, lmc, count, saves]) + "\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith("{"):
            assert line, "the other engine has ended"
        return json.loads(line)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
