"""How a connection with a cache server begins, and all that is said to somebody who asks only how the server is.

The command line uses this to ask a server, and should not wait for torch.
"""

import msgspec

from lmc.server.sizes import Sizes
from lmc.storage.stats import StoreStats

PROTOCOL = 3  # changes whenever the messages of one side mean nothing, or something else, to the other


class Hello(msgspec.Struct, frozen=True):
    """The first frame of both sides. Its form never changes, so that each side knows what the other speaks."""

    protocol: int
    version: str  # of lmc
    refused: str = ""  # why the server closes the connection


class Status(msgspec.Struct, frozen=True, tag=True):
    """The second frame of somebody who wants to know how the server is, and nothing else."""


class Retire(msgspec.Struct, frozen=True, tag=True):
    """The second frame of another server, which wants to take over. Its form never changes, as that of `Hello`."""


class ArenaStatus(msgspec.Struct, frozen=True):
    """What an arena has."""

    parts: int  # of a chunk
    part_bytes: int
    memory: int  # bytes that it takes
    held: int  # slots
    stats: StoreStats


class ServerStatus(msgspec.Struct, frozen=True):
    """How a server is."""

    version: str
    memory: int  # bytes that all arenas may take
    clients: int  # connections with a lease, and leases that wait for processes to end
    arenas: list[ArenaStatus]


Opening = Sizes | Status | Retire
