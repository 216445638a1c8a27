"""A connection between a cache server and a client: length-prefixed frames over a unix socket."""

import array
import socket
import struct
from contextlib import suppress
from typing import TypeVar

import msgspec

from lmc.errors import StorageError
from lmc.shapes import MIB

T = TypeVar("T")

MAX_FRAME_BYTES = 16 * MIB
MAX_RESPONSE_BYTES = 1 << 31  # such as all keys of a large disk
RECEIVED_BYTES = 1 << 16  # bytes received with one call, at most
FRAME_LENGTH, CREDENTIALS = struct.Struct("<I"), struct.Struct("3i")
SO_PEERGROUPS, GROUPS_BYTES = 59, 1024  # Python has no constant for this socket option.
OK, ERROR = b"\0", b"\1"  # the first byte of a response


class BrokenProtocol(StorageError):
    """The other side has violated the protocol."""


def decoded(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    """Return the message in a frame; raise `BrokenProtocol` if the decoder cannot decode it."""
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # `ValueError`: invalid UTF-8
        raise BrokenProtocol(f"sent an invalid message: {error}") from error


class Channel:
    """Sends and receives frames. An `OSError` or `BrokenProtocol` ends the connection."""

    def __init__(self, connection: socket.socket, largest: int = MAX_FRAME_BYTES) -> None:
        """Accept received frames of up to `largest` bytes."""
        self._largest = largest
        self._socket, self._received = connection, bytearray()

    def send(self, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send a frame, and file descriptors with it."""
        head = FRAME_LENGTH.pack(len(frame))
        if descriptors:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            self._socket.sendmsg([head], [rights])
            head = b""
        self._socket.sendall(head + frame)

    def receive(self, descriptors: list[int] | None = None) -> bytes | None:
        """Return the next frame, or None at the end of the connection; append received files to `descriptors`."""
        if not self._fill(FRAME_LENGTH.size, descriptors):
            return None
        (length,) = FRAME_LENGTH.unpack_from(self._received)
        if length > self._largest:
            raise BrokenProtocol(f"sent a frame of {length} bytes, above the limit of {self._largest}")
        self._fill(FRAME_LENGTH.size + length, descriptors)
        frame = bytes(memoryview(self._received)[FRAME_LENGTH.size : FRAME_LENGTH.size + length])
        del self._received[: FRAME_LENGTH.size + length]
        return frame

    def set_timeout(self, seconds: float | None) -> None:
        """Set the timeout for the next bytes, sent or received; after it, calls raise `TimeoutError`."""
        self._socket.settimeout(seconds)

    def peer(self) -> tuple[int, int, set[int]]:
        """Return process, user and groups of the other side; only the primary group if it has too many groups."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        process, user, group = CREDENTIALS.unpack(credentials)
        with suppress(OSError):
            supplementary = self._socket.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_BYTES)
            return process, user, {group, *array.array("I", supplementary)}
        return process, user, {group}

    def close(self) -> None:
        """Close the connection; `receive` returns None in a thread that waits for a frame."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, size: int, descriptors: list[int] | None = None) -> bool:
        """Receive until `size` bytes are buffered; return false if the connection ends before the first byte."""
        while len(self._received) < size:
            if descriptors is None:
                received = self._socket.recv(RECEIVED_BYTES)
            else:
                received, files, _, _ = socket.recv_fds(self._socket, RECEIVED_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
                descriptors += files
            if not received:
                if self._received:
                    raise BrokenProtocol("the connection ended in the middle of a frame")
                return False
            self._received += received
        return True
