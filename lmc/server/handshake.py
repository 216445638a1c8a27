"""The handshake of a connection with a cache server, and the messages of a status request.

An engine attaches in this order, on two connections, one for quick and one for slow requests:

1. Both sides send `Hello`. If the protocols differ, the server's says why it refuses, and the connection ends.
2. The client sends `Attach`.
3. The server opens an arena and a lease (`Session` in `server.py`), and answers with `Attached` (`messages.py`) and the
   descriptor of the slab.
4. The client locks its lifeline and maps the slab (`client/attachment.py`).
5. On the quick connection follow `Introduce`, and a `Ping` each second. All other requests are in `messages.py`.

The command line uses this module for status requests, so it must not import torch.
"""

import msgspec

from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.stats import StoreStats

PROTOCOL = 8  # protocol version; it changes with each incompatible change of messages


class Hello(msgspec.Struct, frozen=True):
    """The first frame of both sides. Its form never changes, so each side can read the other side's version."""

    protocol: int
    version: str  # lmc's version
    refused: str = ""  # why the server closes the connection


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The second frame of a client: the sizes of its chunks, which select its arena."""

    layout: ChunkLayout


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


Opening = Attach | Status | CheckIntegrity | Retire
