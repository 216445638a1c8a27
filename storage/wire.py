"""RESP2 on a socket that somebody else has connected: commands out, replies in, payload straight from and to the caller's memory.

Fetches of values are pipelined: they are asked for early, sent while no more than `WINDOW` bytes are on their way (what Redis has
answered and nobody has read stays in its memory), and received in the order in which they were asked for. Knows nothing of chunks.
Source of the protocol: the Redis serialization protocol specification.
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

PIECE = 256 << 10  # bytes a system call: small enough to be hashed while they are in the cache of the processor
WINDOW = 2 << 20  # bytes on their way to one connection; 4 and 16 MiB are slower on loopback (4.4, 4.0, 3.3 GB/s)
BUFFER = 16 << 10
NOTHING, NEARLY = 0.01, 0.9  # of a deadline: too little to be noticed; after which the kernel may say that it is over
REPLY_LIMIT = 1 << 20  # bytes of a string in an answer, if it is no payload
# Strings in an answer, bytes of all of them, lists in lists: nobody's answers fill our memory.
LISTED_LIMIT, ANSWER_LIMIT, DEPTH_LIMIT = 1 << 15, 8 << 20, 4

Reply: TypeAlias = "bytes | int | ReplyError | list[Reply] | None"
Word = bytes | str | int


class ReplyError(Exception):
    """The server refused a command: its answer, whose first word says why."""

    @property
    def code(self) -> str:
        """OOM, MOVED, WRONGTYPE, …"""
        return str(self).partition(" ")[0]


class WrongValue(Exception):
    """A value that is missing, or of another length than was said. Its argument: how many bytes there are."""


class ProtocolError(OSError):
    """What came is no RESP, or not what was asked for; the connection is of no use any more."""


class TooLong(ProtocolError):
    """A string that is longer than any that is kept, but for payload."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A value, or a range of one, that was asked for."""

    command: bytes
    length: int  # that the answer must have
    gone: bool = False  # thrown away: it was in the way of another


class Piece:
    """The time that `PIECE` bytes take: a connection on which they drip is as good as away."""

    def __init__(self, deadline: float) -> None:
        self.left = PIECE
        self._deadline, self._since = deadline, time.monotonic()

    def moved(self, count: int, now: float, *, whole: bool) -> None:
        """So many bytes were moved; raise `TimeoutError` if that took too long and there are more to come."""
        self.left -= count
        if self.left > 0 and not whole and now - self._since > self._deadline * NEARLY:
            raise TimeoutError("too little was moved within the deadline")
        if self.left <= 0:
            self.left, self._since = PIECE, now


def command(*words: Word) -> bytes:
    """A command as it is sent."""
    blobs = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"".join([b"*%d\r\n" % len(blobs), *(b"$%d\r\n%s\r\n" % (len(blob), blob) for blob in blobs)])


class Wire:
    """One connection. Used by one thread at a time; after an error it is closed and not used again."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        """`deadline`: seconds that each piece (`PIECE` bytes, or a line) may take; a call raises `TimeoutError` then.

        They count from what was sent or received last, so that whoever waits for one connection after the other waits once.
        """
        self._sock = sock
        if isinstance(sock, ssl.SSLSocket):
            self._gathers, self._wait_for_all = False, 0
            sock.settimeout(deadline)
        else:
            # The kernel waits for whole pieces: fewer calls, each of which would have to get hold of the interpreter again.
            self._gathers, self._wait_for_all = True, socket.MSG_WAITALL
            sock.settimeout(None)
            limit = struct.pack("@ll", int(deadline), int(deadline % 1 * 1e6) or 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._buffer = memoryview(bytearray(BUFFER))
        self._start = self._stop = 0  # what of the buffer has arrived and was not taken
        self._held = bytearray()  # small things that wait for company
        self._owed = 0  # answers to what was posted
        self.heard = False  # whether the server has answered, since somebody last set this
        self._deadline, self._closed = deadline, False
        self._moved = time.monotonic()  # when something was last sent or received
        self._queued: deque[Fetch] = deque()
        self._coming: deque[Fetch] = deque()
        self._bytes_coming = 0

    # -- commands ----------------------------------------------------------------------------------------------------

    def call(self, *words: Word) -> Reply:
        """One command and its answer; raise `ReplyError` if it was refused."""
        (answer,) = self.call_all([command(*words)])
        return granted(answer)

    def call_all(self, commands: Sequence[bytes]) -> list[Reply]:
        """Commands in one go; an answer each, refusals among them."""
        self.post(commands)
        return self.collect(len(commands))

    def post(self, commands: Sequence[bytes]) -> None:
        """Send commands; `collect` must follow, and nothing else before it."""
        self.drain()
        self.put(b"".join(commands))
        self.flush()
        self._owed = len(commands)

    def collect(self, count: int) -> list[Reply]:
        """The answers to the `count` commands that were posted."""
        if count != self._owed:
            raise ProtocolError("this connection was not asked")
        self._owed = 0
        return [self.reply() for _ in range(count)]

    def put(self, blob: bytes) -> None:
        """Send this together with what comes next."""
        self._held += blob

    def flush(self) -> None:
        """Send what was put."""
        self.send(memoryview(b""))

    def send(self, view: memoryview) -> None:
        """Send everything; raise `TimeoutError` if a piece is not taken in time."""
        piece = Piece(self._deadline)
        while self._held or view:
            sent = self._sent(view[:PIECE])
            ahead = min(sent, len(self._held))
            del self._held[:ahead]
            view = view[sent - ahead :]
            piece.moved(sent, self._moved, whole=not (self._held or view))

    def reply(self) -> Reply:
        """The next answer."""
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
        count = self._number(rest)
        if kind == b":":
            return count
        if kind not in (b"$", b"*"):
            raise ProtocolError(f"an answer that cannot be: {line[:40]!r}")
        if count < 0:
            return None
        if kind == b"*":
            return [self._reply(left, depth + 1) for _ in range(count)]
        if count > REPLY_LIMIT:
            self.close()  # cheaper than to read all of it
            raise TooLong(f"a string of {count} bytes, though none was asked for")
        left[1] -= count
        blob = bytearray(count + 2)
        self.receive(memoryview(blob))
        return bytes(blob[:-2])

    # -- fetches -----------------------------------------------------------------------------------------------------

    def ask(self, fetches: Sequence[Fetch]) -> None:
        """Queue fetches, and send as many as may be on their way."""
        self._queued.extend(fetches)
        self._pump()

    def fetch(self, fetch: Fetch, into: Callable[[], None]) -> None:
        """Have `into` receive the bytes of `fetch`; fetches that were asked for before it are thrown away.

        Raise `WrongValue` if it is not there or of another length, and `ReplyError` if it is no value.
        """
        assert not fetch.gone
        while self._head() is not fetch:
            self._discard()
        self._pump()
        line = self._line()
        self.heard = True
        self._take()
        if line[:1] == b"-":
            raise ReplyError(line[1:].decode("utf-8", "replace"))
        length = self._number(line[1:]) if line[:1] == b"$" else None
        if length is None:
            raise ProtocolError(f"no value, though one was asked for: {line[:40]!r}")
        if length > fetch.length:
            self.close()  # cheaper than to read all of it
            raise WrongValue(length)
        if length < fetch.length:
            self._skip(length)
            raise WrongValue(max(0, length))
        into()
        end = bytearray(2)
        self.receive(memoryview(end))
        if end != b"\r\n":
            raise ProtocolError("a value without an end")

    def drop(self, fetches: Sequence[Fetch]) -> None:
        """Nobody wants these any more; those that were sent for are thrown away when they come."""
        for fetch in fetches:
            fetch.gone = True
        self._queued = deque(fetch for fetch in self._queued if not fetch.gone)

    def drain(self) -> None:
        """Throw away what is on its way: nobody may want it any more."""
        if self._owed:
            raise ProtocolError("there are answers that nobody has taken")
        for fetch in self._queued:
            fetch.gone = True
        self._queued.clear()
        while self._coming:
            self._discard()

    # -- bytes -------------------------------------------------------------------------------------------------------

    def receive(self, view: memoryview, seen: Callable[[memoryview], None] | None = None) -> None:
        """Fill `view`, showing each piece while it is in the cache; raise `ConnectionError` or `TimeoutError`."""
        at = min(len(view), self._stop - self._start)
        view[:at] = self._buffer[self._start : self._start + at]
        self._start += at
        if at and seen:
            seen(view[:at])
        piece = Piece(self._deadline)
        while at < len(view):
            part = view[at : at + piece.left]
            got = self._arrived(part, self._wait_for_all)
            if seen:
                seen(part[:got])
            at += got
            piece.moved(got, self._moved, whole=at == len(view))

    def alive(self) -> bool:
        """Whether the server has not closed the connection meanwhile, as far as is known here."""
        if self._closed or not (self._coming or self._queued or self._owed):
            return not self._closed and not self.ready()
        return True

    def ready(self, seconds: float = 0.0) -> bool:
        """Whether something has arrived and was not taken, or arrives within `seconds`."""
        if self._start < self._stop or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()):
            return True
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
        except ValueError:  # closed by another thread: an answer of a kind
            return True
        return bool(poll.poll(1000 * seconds))

    def close(self) -> None:
        """Wake up whoever waits, from any thread; whoever made the socket closes it."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _pump(self) -> None:
        if self._owed:
            raise ProtocolError("there are answers that nobody has taken")
        batch = []
        while self._queued and (not self._coming or self._bytes_coming + self._queued[0].length <= WINDOW):
            fetch = self._queued.popleft()
            self._coming.append(fetch)
            self._bytes_coming += fetch.length
            batch.append(fetch.command)
        if batch:
            self.put(b"".join(batch))
            self.flush()

    def _take(self) -> Fetch:
        fetch = self._coming.popleft()
        self._bytes_coming -= fetch.length
        return fetch

    def _head(self) -> Fetch:
        if not self._coming:
            self._pump()
        return self._coming[0]

    def _discard(self) -> None:
        fetch, line = self._head(), self._line()
        self._take()
        fetch.gone = True
        length = self._number(line[1:]) if line[:1] == b"$" else -1
        if length > fetch.length:
            raise ProtocolError(f"a value of another length than {fetch.length}: {line[:40]!r}")
        self._skip(length)

    def _skip(self, length: int) -> None:
        left = length + 2 if length >= 0 else 0  # the value and its end
        scratch = memoryview(bytearray(min(left, PIECE)))
        while left:
            part = scratch[:left]
            self.receive(part)
            left -= len(part)

    def _line(self) -> bytes:
        piece = Piece(self._deadline)
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
            got = self._arrived(self._buffer[self._stop :], 0)
            self._stop += got
            piece.moved(got, self._moved, whole=b"\n" in self._buffer[self._stop - got : self._stop].tobytes())

    def _arrived(self, view: memoryview, flags: int) -> int:
        passed = time.monotonic() - self._moved
        try:
            # The kernel would count from now on.
            if passed > self._deadline * NOTHING and not self.ready(max(0.0, self._deadline - passed)):
                raise TimeoutError
            got = self._sock.recv_into(view, len(view), flags)
        except (BlockingIOError, TimeoutError):  # the kernel's way, and TLS's, to say that the time is over
            raise TimeoutError("no answer within the deadline") from None
        except ValueError:  # TLS's way to say that another thread has closed it
            raise ConnectionResetError("the connection was closed") from None
        if got == 0:
            raise ConnectionResetError("the server has closed the connection")
        self._moved = time.monotonic()
        return got

    def _sent(self, view: memoryview) -> int:
        try:
            gathers, held = self._gathers, self._held
            sent = self._sock.sendmsg([held, view]) if gathers else self._sock.send(bytes(held) or view)
        except (BlockingIOError, TimeoutError):
            raise TimeoutError("nothing was taken within the deadline") from None
        except ValueError:
            raise ConnectionResetError("the connection was closed") from None
        self._moved = time.monotonic()
        return sent

    @staticmethod
    def _number(text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise ProtocolError(f"no number: {text[:40]!r}") from None


def granted(answer: Reply) -> Reply:
    """An answer that is no refusal; raise it if it is one."""
    if isinstance(answer, ReplyError):
        raise answer
    return answer
