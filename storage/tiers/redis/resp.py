"""RESP2, the protocol of Redis, over a connected socket. Values go straight from and to the caller's memory.

Fetches of values are pipelined. Callers request them early. A fetch is sent while at most `WINDOW` bytes are in flight,
because Redis keeps unread replies in its memory. Values are received in the order of their requests. This module knows
nothing about chunks. Source: the Redis serialization protocol specification.
"""

import contextlib
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

PIECE = 256 << 10  # bytes per system call; small enough to be hashed while they are in the processor's cache
WINDOW = 2 << 20  # bytes in flight on one connection: 4.4 GB/s on loopback; 4 MiB give 4.0, and 16 MiB give 3.3
BUFFER = 16 << 10  # bytes of the receive buffer
# Shares of a deadline: below the first, passed time is ignored; above the second, the kernel may count it as expired.
NOTHING, NEARLY = 0.01, 0.9
REPLY_LIMIT = 1 << 20  # bytes of a string in a reply, outside of fetched values
# Limits of one reply, so that it cannot fill this process's memory: items, bytes in all strings, depth of lists.
LISTED_LIMIT, ANSWER_LIMIT, DEPTH_LIMIT = 1 << 15, 8 << 20, 4

Reply: TypeAlias = "bytes | int | ReplyError | list[Reply] | None"
Word = bytes | str | int


class ReplyError(OSError):
    """The server refused a command. The first word of its reply is the `code`: OOM, MOVED, WRONGTYPE, …"""

    def __init__(self, answer: str, server: str = "") -> None:
        super().__init__(f"{server}: {answer}" if server else answer)
        self.code = answer.partition(" ")[0]


class WrongValue(Exception):
    """A value is missing or has the wrong length. The argument is the number of bytes that it has."""


class ProtocolError(OSError):
    """A reply is not RESP, or does not match its request. The connection cannot be used any more."""


class TooLong(ProtocolError):
    """A string in a reply is longer than any string that lmc stores outside of values."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A request for a value, or for a range of a value."""

    command: bytes
    length: int  # bytes that the value must have
    dropped: bool = False  # whether the value is discarded, now or when it arrives


def command(*words: Word) -> bytes:
    """Return the bytes of a command, as it is sent."""
    blobs = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"".join([b"*%d\r\n" % len(blobs), *(b"$%d\r\n%s\r\n" % (len(blob), blob) for blob in blobs)])


def granted(answer: Reply) -> Reply:
    """Return a reply. Raises `ReplyError` if it is a refusal."""
    if isinstance(answer, ReplyError):
        raise answer
    return answer


class Connection:
    """One connection. One thread uses it at a time, and closes it after an error."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        """Use a connected socket, with a `deadline` in seconds for each piece (`PIECE` bytes, or a line).

        The deadline counts from the last send or receive. So waiting for several connections one after the other takes
        only one deadline. A call that takes longer raises `TimeoutError`.
        """
        self._sock = sock
        if isinstance(sock, ssl.SSLSocket):
            self._gathers, self._wait_for_all = False, 0
            sock.settimeout(deadline)
        else:
            # The kernel waits for whole pieces, so that there are fewer calls, and fewer waits for the GIL.
            self._gathers, self._wait_for_all = True, socket.MSG_WAITALL
            sock.settimeout(None)
            limit = struct.pack("@ll", int(deadline), int(deadline % 1 * 1e6) or 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._buffer = memoryview(bytearray(BUFFER))
        self._start = self._stop = 0  # the range of the buffer that has arrived and was not consumed
        self._held = bytearray()  # small messages that are sent together with the next one
        self._awaited = 0  # replies to posted commands that were not collected yet
        self.heard = False  # whether the server has replied since a caller last set this to false
        self._deadline, self._closed = deadline, False
        self._moved = time.monotonic()  # the time of the last send or receive
        self._queued: deque[Fetch] = deque()
        self._coming: deque[Fetch] = deque()
        self._bytes_coming = 0

    # -- commands ----------------------------------------------------------------------------------------------------

    def call(self, *words: Word) -> Reply:
        """Send one command and return its reply. Raises `ReplyError` if it was refused."""
        return granted(self.call_all([command(*words)])[0])

    def call_all(self, commands: Sequence[bytes]) -> list[Reply]:
        """Send commands together, and return the reply to each, including refusals."""
        self.post(commands)
        return self.collect(len(commands))

    def post(self, commands: Sequence[bytes]) -> None:
        """Send commands. The next call must be `collect`."""
        self.drain()
        self.put(b"".join(commands))
        self.flush()
        self._awaited = len(commands)

    def collect(self, count: int) -> list[Reply]:
        """Return the replies to the `count` commands that were posted."""
        if count != self._awaited:
            raise ProtocolError("this connection was not asked")
        self._awaited = 0
        return [self.reply() for _ in range(count)]

    def put(self, blob: bytes) -> None:
        """Buffer bytes, and send them together with the next bytes."""
        self._held += blob

    def flush(self) -> None:
        """Send the buffered bytes."""
        self.send(memoryview(b""))

    def send(self, view: memoryview) -> None:
        """Send the buffered bytes and all of `view`. Raises `TimeoutError` if a piece is not accepted in time."""
        for at in range(0, len(view) or 1, PIECE):
            piece, began = view[at : at + PIECE], time.monotonic()
            while self._held or piece:
                self._check_pace(began)
                sent = self._sent(piece)
                ahead = min(sent, len(self._held))
                del self._held[:ahead]
                piece = piece[sent - ahead :]

    def reply(self) -> Reply:
        """Receive and return the next reply."""
        return self._reply([LISTED_LIMIT, ANSWER_LIMIT], 0)

    def _reply(self, left: list[int], depth: int) -> Reply:
        left[0] -= 1
        if min(left) < 0 or depth > DEPTH_LIMIT:
            raise ProtocolError("an answer without an end")
        line = self._line()
        self.heard = True
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ReplyError(rest.decode("utf-8", "replace"))
        count = _number(rest)
        if kind == b":":
            return count
        if kind not in (b"$", b"*"):
            raise ProtocolError(f"an answer that cannot be: {line[:40]!r}")
        if count < 0:
            return None
        if kind == b"*":
            return [self._reply(left, depth + 1) for _ in range(count)]
        if count > REPLY_LIMIT:
            self.close()  # Closing costs less than reading the whole string.
            raise TooLong(f"a string of {count} bytes, though none was asked for")
        left[1] -= count
        blob = bytearray(count + 2)
        self.receive(memoryview(blob))
        return bytes(blob[:-2])

    # -- fetches -----------------------------------------------------------------------------------------------------

    def request(self, fetches: Sequence[Fetch]) -> None:
        """Queue fetches, and send as many as may be in flight."""
        self._queued.extend(fetches)
        self._pump()

    def fetch(self, fetch: Fetch, into: Callable[[], None]) -> None:
        """Call `into` to receive the bytes of `fetch`. Fetches that were requested before it are discarded.

        Raises `WrongValue` if the value is missing or has another length, and `ReplyError` if the server refuses it.
        """
        assert not fetch.dropped
        while (self._coming or self._queued)[0] is not fetch:
            self._discard()
        self._pump()
        _, line = self._next_answer()
        self.heard = True
        if line[:1] == b"-":
            raise ReplyError(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise ProtocolError(f"no value, though one was asked for: {line[:40]!r}")
        length = _number(line[1:])
        if length != fetch.length:
            if length > fetch.length:
                self.close()  # Closing costs less than reading the whole value.
            else:
                self._skip(length)
            raise WrongValue(max(0, length))
        into()
        if self._line():
            raise ProtocolError("a value without an end")

    def drop(self, fetches: Sequence[Fetch]) -> None:
        """Cancel fetches. Values of fetches that were already sent are discarded when they arrive."""
        for fetch in fetches:
            fetch.dropped = True
        self._queued = deque(fetch for fetch in self._queued if not fetch.dropped)

    def drain(self) -> None:
        """Cancel all fetches, and receive and discard the values that are in flight."""
        self._check_answers()
        self.drop(self._queued)
        while self._coming:
            self._discard()

    # -- bytes -------------------------------------------------------------------------------------------------------

    def receive(self, view: memoryview) -> None:
        """Fill `view` with received bytes. Raises `ConnectionError` or `TimeoutError`."""
        at = min(len(view), self._stop - self._start)
        view[:at] = self._buffer[self._start : self._start + at]
        self._start += at
        for first in range(at, len(view), PIECE):
            piece, got, began = view[first : first + PIECE], 0, time.monotonic()
            while got < len(piece):
                self._check_pace(began)
                got += self._arrived(piece[got:], self._wait_for_all)

    def alive(self) -> bool:
        """Return whether the connection is still open, as far as this process knows."""
        in_use = self._coming or self._queued or self._awaited
        return not self._closed and (bool(in_use) or not self.ready())

    def ready(self, seconds: float = 0.0) -> bool:
        """Return whether there are bytes to receive now or within `seconds`."""
        if self._start < self._stop or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()):
            return True
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
        except ValueError:  # Another thread has closed the socket; the next receive raises the error.
            return True
        return bool(poll.poll(1000 * seconds))

    def close(self) -> None:
        """Shut the socket down, so that waiting calls fail. Any thread may do this; the socket's creator closes it."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _check_answers(self) -> None:
        if self._awaited:
            raise ProtocolError("there are answers that nobody has taken")

    def _pump(self) -> None:
        self._check_answers()
        while self._queued and (not self._coming or self._bytes_coming + self._queued[0].length <= WINDOW):
            fetch = self._queued.popleft()
            self._coming.append(fetch)
            self._bytes_coming += fetch.length
            self.put(fetch.command)
        self.flush()

    def _next_answer(self) -> tuple[Fetch, bytes]:
        """Return the oldest fetch in flight, and the first line of its reply."""
        if not self._coming:
            self._pump()
        line, fetch = self._line(), self._coming.popleft()
        self._bytes_coming -= fetch.length
        return fetch, line

    def _discard(self) -> None:
        fetch, line = self._next_answer()
        fetch.dropped = True
        length = _number(line[1:]) if line[:1] == b"$" else -1
        if length > fetch.length:
            raise ProtocolError(f"a value of another length than {fetch.length}: {line[:40]!r}")
        self._skip(length)

    def _skip(self, length: int) -> None:
        left = length + 2 if length >= 0 else 0  # the value and its end of line
        scratch = memoryview(bytearray(min(left, PIECE)))
        for at in range(0, left, PIECE):
            self.receive(scratch[: left - at])

    def _line(self) -> bytes:
        began = time.monotonic()
        while True:
            held = bytes(self._buffer[self._start : self._stop])
            end = held.find(b"\r\n")
            if end >= 0:
                self._start += end + 2
                return held[:end]
            if len(held) == BUFFER:
                raise ProtocolError("a line without an end")
            self._buffer[: len(held)] = held
            self._start, self._stop = 0, len(held)
            self._check_pace(began)
            self._stop += self._arrived(self._buffer[self._stop :], 0)

    def _check_pace(self, began: float) -> None:
        """Raise `TimeoutError` if a piece that began at `began` is incomplete after nearly the whole deadline.

        A very slow connection is as useless as a silent connection.
        """
        if self._moved - began > self._deadline * NEARLY:
            raise TimeoutError("too little was moved within the deadline")

    def _arrived(self, view: memoryview, flags: int) -> int:
        passed = time.monotonic() - self._moved
        # The kernel's own limit would only count from now.
        if passed > self._deadline * NOTHING and not self.ready(max(0.0, self._deadline - passed)):
            raise TimeoutError("no answer within the deadline")
        got = self._timed("no answer", self._sock.recv_into, view, len(view), flags)
        if got == 0:
            raise ConnectionResetError("the server has closed the connection")
        return got

    def _sent(self, view: memoryview) -> int:
        if self._gathers:
            return self._timed("nothing was accepted", self._sock.sendmsg, [self._held, view])
        return self._timed("nothing was accepted", self._sock.send, bytes(self._held) or view)

    def _timed(self, late: str, operation: Callable[..., int], *arguments: object) -> int:
        """Send or receive, and translate the errors that the kernel and TLS raise."""
        try:
            moved = operation(*arguments)
        except (BlockingIOError, TimeoutError):
            raise TimeoutError(f"{late} within the deadline") from None
        except ValueError:  # Another thread has closed the socket.
            raise ConnectionResetError("the connection was closed") from None
        self._moved = time.monotonic()
        return moved


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ProtocolError(f"no number: {text[:40]!r}") from None
