"""The first messages of a connection with a cache server, and the messages of a status request.

The command line uses this module for status requests, so it must not import torch.
"""

import msgspec

from lmc.server.sizes import Sizes
from lmc.storage.stats import StoreStats

PROTOCOL = 3  # protocol version; it changes with each incompatible change of messages


class Hello(msgspec.Struct, frozen=True):
    """The first frame of both sides. Its form never changes, so each side can read the other side's version."""

    protocol: int
    version: str  # lmc's version
    refused: str = ""  # why the server closes the connection


class Status(msgspec.Struct, frozen=True, tag=True):
    """The second frame of a caller that only requests the server's status."""


class CheckIntegrity(msgspec.Struct, frozen=True, tag=True):
    """The second frame of a caller that only requests a check of the server's bookkeeping."""


class Retire(msgspec.Struct, frozen=True, tag=True):
    """The second frame of another server that takes over. Its form never changes, like that of `Hello`."""


class ArenaStatus(msgspec.Struct, frozen=True):
    """The status of an arena."""

    parts: int  # parts of a chunk
    part_bytes: int
    memory: int  # bytes of memory that the arena takes
    held: int  # slots that are held or being written
    stats: StoreStats


class ServerStatus(msgspec.Struct, frozen=True):
    """The status of a server."""

    version: str
    memory: int  # bytes that all arenas may take
    clients: int  # number of connections with a lease, and of leases that wait until processes have ended
    arenas: list[ArenaStatus]


Opening = Sizes | Status | CheckIntegrity | Retire
