"""A client's connections to a cache server, and its mapping of the server's slab."""

import itertools
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from lmc.errors import StorageError
from lmc.server.client.connection import ServerConnection, lock_of
from lmc.server.handshake import Attach
from lmc.server.messages import Attached
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.memory.memory_files import locked
from lmc.storage.memory.slab import Slab

_serials = itertools.count(1)
_attached: msgspec.msgpack.Decoder[Attached] = msgspec.msgpack.Decoder(Attached)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A client's connections to one server, and the mapped slab."""

    quick: ServerConnection  # for requests that are answered at once; all leases belong to this connection
    slow: ServerConnection  # for requests that may take long
    slab: Slab
    shared_places: frozenset[str]
    pins_yield: bool
    changes: int  # number of the last change of documents when this client attached
    serial: int  # unique among the attachments of this process

    @classmethod
    def open(cls, path: Path, layout: ChunkLayout, *, deadline: float, patience: float) -> "Attachment":
        """Attach to the server at a path.

        The timeout for responses is `deadline` seconds; for slow requests, it is `patience` seconds.
        Raises the errors of `ServerConnection`, or `StorageError` if the server refuses the sizes.
        """
        with ExitStack() as opened:
            quick = opened.enter_context(closing(ServerConnection(path, deadline)))
            opened.callback(_close, quick.files)
            attached = quick.open(Attach(layout), _attached)
            slow = opened.enter_context(closing(ServerConnection(path, deadline)))
            opened.callback(_close, slow.files)
            slow.open(Attach(layout), _attached)
            slow.set_timeout(patience)
            serial = next(_serials)
            try:
                # A missing lifeline is not created: the server of another container would not see it.
                quick.files.append(locked(attached.slab.lifeline, new=False))
                mapped, owner = f"/proc/{os.getpid()}/fd/{quick.files[0]}", str(lock_of(path))
                slab = Slab.attach(replace(attached.slab, path=mapped, owner=owner, serial=serial))
            except OSError as error:
                raise StorageError(f"cannot map the memory of the cache server at {path}: {error}") from error
            opened.pop_all()
        _close(slow.files)  # The slow connection holds no leases.
        return cls(quick, slow, slab, attached.shared_places, attached.pins_yield, attached.changes, serial)

    def hang_up(self) -> None:
        """Close the connections. The slab stays mapped, because it may still be read or written."""
        self.quick.close()
        self.slow.close()

    def release_lifeline(self) -> None:
        """Release the lifeline's lock, which tells the server that this process writes no more.

        A worker that has mapped the slab holds its own lock.
        """
        _close(self.quick.files)


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())
