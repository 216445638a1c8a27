"""A Mooncake Store: its master, and a host that gives it memory, each in a process of its own."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ports import free_port
from storage_fakes import eventually

MEMBER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", sys.argv[3], int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
"""


def thread_states(pid: int) -> set[str]:
    """The states of a process's threads, by their letters in /proc."""
    return {task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")}


class MooncakeStore:
    """The processes of one store."""

    def __init__(self, memory: int = 64 << 20, *, over_http: bool = False) -> None:
        """Choose ports. With `over_http`, the hosts find each other by the master's metadata server."""
        self.port, self.admin_port, self._memory = free_port(), free_port(), memory
        self.metadata_port = free_port() if over_http else 0
        self._metadata = f"http://127.0.0.1:{self.metadata_port}/metadata" if over_http else "P2PHANDSHAKE"
        self.master: subprocess.Popen[bytes] | None = None
        self.member: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start what does not run."""
        if self.master is None:
            self.start_master()
        if self.member is None:
            self.start_member()

    def start_master(self) -> None:
        """Start the master, and wait until it listens."""
        command = [str(Path(sys.executable).parent / "mooncake_master"), f"--rpc_port={self.port}"]
        command += [f"--metrics_port={self.admin_port}"]
        if self.metadata_port:
            command += ["--enable_http_metadata_server=true", f"--http_metadata_server_port={self.metadata_port}"]
        self.master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        for port in filter(None, (self.port, self.admin_port, self.metadata_port)):
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert time.monotonic() < until, "the master does not listen"
                    time.sleep(0.02)

    def start_member(self) -> None:
        """Start a host with memory, and wait until the master knows it."""
        command = [sys.executable, "-c", MEMBER, f"127.0.0.1:{self.port}", str(self._memory), self._metadata]
        pipe = subprocess.PIPE
        self.member = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert self.member.stdout is not None
        assert self.member.stdout.readline() == b"0\n"

    def stop_master(self) -> None:
        """Kill the master."""
        if self.master is not None:
            self.master.kill()
            self.master.wait()
            self.master = None

    def stop_member(self) -> None:
        """Kill the host with memory."""
        if self.member is not None:
            self.member.kill()
            self.member.communicate()
            self.member = None

    def stop(self) -> None:
        """Kill all processes."""
        self.stop_member()
        self.stop_master()

    @contextmanager
    def paused(self, process: "subprocess.Popen[bytes] | None") -> Iterator[None]:
        """Pause a process for a while, so that it does not respond."""
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: thread_states(process.pid) == {"T"})  # A busy machine stops its threads one by one.
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def url(self, **options: object) -> str:
        """The URL of a tier in this store."""
        given = {"admin_port": self.admin_port, "local_hostname": "127.0.0.1", "metadata_server": self._metadata}
        given |= options
        return f"mooncake://127.0.0.1:{self.port}?" + "&".join(f"{name}={value}" for name, value in given.items())


@contextmanager
def mooncake_store(memory: int = 64 << 20, **options: bool) -> Iterator[MooncakeStore]:
    """A store that runs."""
    store = MooncakeStore(memory, **options)
    try:
        store.start()
        yield store
    finally:
        store.stop()
