"""Clients that store and read through a cache server for a long time: is its memory flat, and are they treated alike?

    python bench/serve_soak.py [--clients 16] [--minutes 10] [--keep]

All of them do the same, a millisecond after each answer, with as many keys as do not fit into memory. A tenth of the
time is for warming up: `turns` and the shares of clients are without it, and what became of turns is with it. The
server's memory is its memory without chunks.
"""

import time

import psutil
from common import closing_line, parser
from serve_kills import SAID, SIZES, served, wait_for

from lmc.server.client.connection import status
from lmc.server.client.remote_store import RemoteStore
from lmc.shapes import MIB


def private(process: psutil.Process) -> float:
    """Return how many MiB a process has that are not shared."""
    found = process.memory_info()
    return float(found.rss - found.shared) / MIB


def main() -> None:
    options = parser(__doc__, "serve_soak")
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--minutes", type=float, default=10.0)
    given = options.parse_args()
    with served(given.clients) as (server, clients):
        process = psutil.Process(server.process.pid)
        time.sleep(given.minutes * 6)
        began = [clients.done(number) for number in range(given.clients)]
        memory, until = [private(process)], time.monotonic() + given.minutes * 54
        while time.monotonic() < until:
            time.sleep(1.0)
            memory.append(private(process))
        done = [clients.done(number) - before for number, before in enumerate(began)]
        clients.end()
        wait_for(lambda: status(server.path).clients == 0, "no lease is left")
        store = RemoteStore(server.path, SIZES, deadline=10.0)
        held = store.held()
        store.close()
    said = {what: clients.said(what) for what in SAID}
    assert not said["wrong"]
    assert not held
    result = {
        "clients": given.clients,
        "minutes": given.minutes,
        "turns": sum(done),
        "least_of_mean": round(min(done) * len(done) / sum(done), 3),
        "most_of_mean": round(max(done) * len(done) / sum(done), 3),
        "memory_mib": round(memory[0], 1),
        "memory_growth_mib": round(memory[-1] - memory[0], 1),
        "memory_growth_later_mib": round(memory[-1] - memory[len(memory) // 2], 1),  # in the second half
        "held": held,
        **said,
    }
    closing_line({"bench": "serve_soak", **result}, "serve_soak" if given.keep else None)


if __name__ == "__main__":
    main()
