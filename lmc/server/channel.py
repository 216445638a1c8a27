"""A connection between a cache server and a client: frames over a unix socket, each with its length before it."""

import array
import socket
import struct
from contextlib import suppress
from typing import TypeVar

import msgspec

from lmc.errors import StorageError
from lmc.shapes import MIB

T = TypeVar("T")

LARGEST = 16 * MIB  # bytes of a question
LARGEST_ANSWER = 1 << 31  # bytes; such as all keys of a large disk
AT_ONCE = 1 << 16  # bytes that are received with one call, at most
LENGTH, CREDENTIALS = struct.Struct("<I"), struct.Struct("3i")
SO_PEERGROUPS, GROUPS_BYTES = 59, 1024  # Python has no name for the option.
ANSWER, ERROR = b"\0", b"\1"  # the first byte of an answer


class BrokenProtocol(StorageError):
    """The other side has sent what it must not send."""


def decoded(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    """Return the message in a frame; raise `BrokenProtocol` if it is none that the decoder knows."""
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # `ValueError`: a text that is no UTF-8
        raise BrokenProtocol(f"a frame that is no message: {error}") from error


class Channel:
    """Sends and receives frames. An `OSError` or `BrokenProtocol` ends the connection."""

    def __init__(self, connection: socket.socket, largest: int = LARGEST) -> None:
        """Frames that are received have up to `largest` bytes."""
        self._largest = largest
        self._socket, self._received = connection, bytearray()

    def send(self, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send a frame, and open files with it."""
        head = LENGTH.pack(len(frame))
        if descriptors:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            self._socket.sendmsg([head], [rights])
            head = b""
        self._socket.sendall(head + frame)

    def receive(self, descriptors: list[int] | None = None) -> bytes | None:
        """Return the next frame, or None at the end of the connection; add files that come with it."""
        if not self._fill(LENGTH.size, descriptors):
            return None
        (length,) = LENGTH.unpack_from(self._received)
        if length > self._largest:
            raise BrokenProtocol(f"a frame of {length} bytes")
        self._fill(LENGTH.size + length, descriptors)
        frame = bytes(memoryview(self._received)[LENGTH.size : LENGTH.size + length])
        del self._received[: LENGTH.size + length]
        return frame

    def set_timeout(self, seconds: float | None) -> None:
        """Raise `TimeoutError` if the other side takes longer than this to send or to take the next bytes."""
        self._socket.settimeout(seconds)

    def peer(self) -> tuple[int, int, set[int]]:
        """Return process, user and groups of the other side; only the first group if there are too many of them."""
        asked = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        process, user, group = CREDENTIALS.unpack(asked)
        with suppress(OSError):
            others = self._socket.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_BYTES)
            return process, user, {group, *array.array("I", others)}
        return process, user, {group}

    def close(self) -> None:
        """End the connection; a thread that waits for a frame gets none."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, size: int, descriptors: list[int] | None = None) -> bool:
        """Receive until there are so many bytes; return false if the connection ends before the first one."""
        while len(self._received) < size:
            if descriptors is None:
                more = self._socket.recv(AT_ONCE)
            else:
                more, files, _, _ = socket.recv_fds(self._socket, AT_ONCE, 2, socket.MSG_CMSG_CLOEXEC)
                descriptors += files
            if not more:
                if self._received:
                    raise BrokenProtocol("the connection ended in the middle of a frame")
                return False
            self._received += more
        return True
