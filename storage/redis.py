"""A tier in Redis, shared by all processes that use the same server, cluster and prefix.

    PREFIX:{KEY}           the record's header: a chunk is there if this is, and it comes last
    PREFIX:{KEY}:0, :1, …  the record's parts, side by side, cut into values that fill an allocation
    PREFIX:{KEY}:TOKEN:0…  values of a record that is being written; they expire, whoever has died

KEY in braces keeps a chunk on one node of a cluster. A writer renames its values and adds the header in one transaction, which fails if
another writer was faster. Connections are redis-py's (`servers.py`), the payload goes straight from and to the slab (`wire.py`).
"""

import contextlib
import errno
import logging
import mmap
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from lmc.errors import CorruptRecord, TierUnusable
from lmc.keys import FORMAT, ChunkKey
from lmc.remote import Remote
from lmc.storage.record import HEADER_LIMIT, RecordMeta, decode_header, encode_header, header_size, split_parts
from lmc.storage.servers import Server, Servers
from lmc.storage.tier import Entry, Finding, Written
from lmc.storage.values import LARGEST, Cursor, Names, overlaps, value_sizes
from lmc.storage.wire import Fetch, Reply, ReplyError, Wire, Word, WrongValue, command, granted

log = logging.getLogger(__name__)

UNFINISHED_SECONDS = 60
BEHIND = 2  # values that are sent before the answer to the first of them is waited for
PAUSE_SECONDS = 5.0  # of no writing, after Redis was full
VALUES_LIMIT = 1024  # removed with a record whose header cannot be read
LISTED = 500  # names in an answer


class _Mine(threading.local):
    """What a thread has sent for and not used yet."""

    def __init__(self) -> None:
        self.headers: dict[ChunkKey, Reply] = {}


class RedisTier:
    """Records in Redis; Redis itself evicts and expires them."""

    name = "redis"
    shared = True
    evictions = 0  # Redis evicts by itself, and tells nobody

    def __init__(self, remote: Remote, *, deadline: float = 0.5, ttl: int = 0, prefix: str = "lmc") -> None:
        """Meet the servers; raise `TierUnusable` for what waiting does not mend. One that is away is a warning, and joins later."""
        self.corrupt = 0
        self._prefix, self._ttl = prefix.encode(), ttl
        self._paused_until = 0.0
        self._mine = _Mine()
        self._servers = Servers(remote, deadline, self._greet)

    @property
    def usable(self) -> bool:
        """False while no server answers: everything is a miss then, at once."""
        return self._servers.usable

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """One question to every server concerned, to all at the same time; what lies on one that is away is not there."""
        found = [False] * len(keys)
        places: dict[Server, list[int]] = defaultdict(list)
        for i, key in enumerate(keys):
            server = self._server(key)
            if server is not None:
                places[server].append(i)
        trouble, answered = None, False
        for server in list(places):
            try:
                with server.wire() as wire:
                    wire.post([command("EXISTS", self._header(keys[i])) for i in places[server]])
            except OSError as error:
                trouble = error
                del places[server]
        for server, asked in places.items():
            try:
                with server.wire() as wire:
                    for i, answer in zip(asked, wire.collect(), strict=True):
                        found[i] = granted(answer) == 1
                answered = True
            except OSError as error:
                trouble = error
        if trouble is not None and not answered:
            raise trouble
        return found

    def expect(self, keys: Sequence[ChunkKey]) -> None:
        """Get the headers of these records, in one go from each server."""
        by_server: dict[Server, list[ChunkKey]] = defaultdict(list)
        for key in keys:
            server = self._server(key)
            if server is not None:
                by_server[server].append(key)
        self._mine.headers = {}
        for server, wanted in by_server.items():
            with self._plainly(server) as wire:
                blobs = wire.call_all([command("GET", self._header(key)) for key in wanted])
            self._mine.headers |= dict(zip(wanted, blobs, strict=True))

    def open(self, key: ChunkKey) -> "RedisReader | None":
        """A reader of the record; Redis notes its use."""
        server = self._server(key)
        try:
            return self._open(server, key) if server is not None else None
        except CorruptRecord:
            self.discard(key)
            raise

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Write values aside, then rename them and add the header, all in one."""
        server = self._server(meta.key)
        total = meta.offset(meta.parts)
        if server is None or time.monotonic() < self._paused_until or total > VALUES_LIMIT * LARGEST:
            return Written.REFUSED
        names = Names.of(self._header(meta.key), os.urandom(8).hex(), value_sizes(total))
        try:
            with server.wire() as wire:
                return self._write(wire, meta, parts, names)
        except ReplyError as error:
            self._remove(server, names.aside)
            if error.code != "OOM":
                raise OSError(f"{server.name}: {error}") from None
            self._pause(server)
            return Written.REFUSED

    def delete(self, key: ChunkKey) -> bool:
        """Remove header and values at once."""
        server = self._server(key)
        if server is None:
            return False
        header, total = self._header(key), VALUES_LIMIT * LARGEST
        with self._plainly(server) as wire:
            blob = wire.call_all([command("GET", header)])[0]
            if isinstance(blob, bytes):
                with contextlib.suppress(CorruptRecord):
                    meta = decode_header(blob)
                    total = min(total, meta.offset(meta.parts))
            names = Names.of(header, "", value_sizes(total))
            return wire.call("UNLINK", header, *names.final) != 0 and blob is not None

    def discard(self, key: ChunkKey) -> None:
        """Remove a record that was found wrong, and count it."""
        self.corrupt += 1
        self.delete(key)

    def entries(self) -> Iterator[Entry]:
        """What the servers that answer hold, least recently used first (Redis counts whole seconds)."""
        found = []
        for server in self._servers.all():
            for names in self._names(server) if server.usable else []:
                headers = [name for name in names if self._key(name)]
                with self._plainly(server) as wire:
                    asked = [command("OBJECT", "IDLETIME", name) for name in headers]
                    idle = wire.call_all(asked)  # before the headers are read, which is a use of them
                    blobs = wire.call_all([command("GET", name) for name in headers])
                for name, seconds, blob in zip(headers, idle, blobs, strict=True):
                    if isinstance(blob, bytes):
                        used = time.time() - seconds if isinstance(seconds, int) else 0.0  # it counts uses instead
                        found.append(Entry(key=ChunkKey(self._key(name)), bytes=_record_bytes(blob), used=used))
        return iter(sorted(found, key=lambda entry: entry.used))

    def check(self, fix: bool = False) -> list[Finding]:
        """Read and verify every record; look for values that have lost their header."""
        findings = []
        for server in self._servers.all():
            for name in sorted({name for names in self._names(server) for name in names}):
                key = self._key(name)
                problem = self._problem(server, ChunkKey(key)) if key else self._astray(server, name)
                if problem:
                    findings.append(Finding(where=name.decode(), problem=problem, fixed=fix))
                    if fix and key:
                        self.discard(ChunkKey(key))
                    elif fix:
                        self._remove(server, [name])
        return findings

    def close(self) -> None:
        """Close all connections; whoever waits on one fails."""
        self._servers.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _greet(self, wire: Wire) -> None:
        wire.call("PING")
        name = self._prefix + b":format"
        (made,) = wire.call_all([command("SET", name, FORMAT, "NX")])
        if not (isinstance(made, ReplyError) and made.code == "OOM"):  # full, but good to read from
            granted(made)
        held = wire.call("GET", name)
        if held not in (None, b"%d" % FORMAT):
            raise TierUnusable(
                f"{name.decode()} in Redis is {held!r}: another version of lmc; set another remote_prefix"
            )

    def _server(self, key: ChunkKey) -> Server | None:
        server = self._servers.of(self._header(key))
        return server if server is not None and server.usable else None

    def _header(self, key: ChunkKey) -> bytes:
        return b"%s:{%s}" % (self._prefix, key.hex().encode())

    def _key(self, name: bytes) -> bytes:
        """The chunk of which `name` is the header, or nothing."""
        found = re.fullmatch(rb"%s:\{([0-9a-f]{64})\}" % re.escape(self._prefix), name)
        return bytes.fromhex(found[1].decode()) if found else b""

    @contextlib.contextmanager
    def _plainly(self, server: Server) -> Iterator[Wire]:
        """A connection for commands that have no reason to be refused."""
        try:
            with server.wire() as wire:
                yield wire
        except ReplyError as error:
            raise OSError(f"{server.name}: {error}") from None

    def _open(self, server: Server, key: ChunkKey) -> "RedisReader | None":
        try:
            if key in self._mine.headers:
                blob = granted(self._mine.headers.pop(key))
            else:
                with server.wire() as wire:
                    blob = wire.call("GET", self._header(key))
        except ReplyError as error:
            if error.code == "WRONGTYPE":
                raise CorruptRecord("no record, but something else under its name") from None
            raise OSError(f"{server.name}: {error}") from None
        if blob is None:
            return None
        assert isinstance(blob, bytes)
        if len(blob) > HEADER_LIMIT or header_size(blob[:8]) != len(blob):
            raise CorruptRecord(f"a header of {len(blob)} bytes")
        meta = decode_header(blob)
        if meta.key != key:
            raise CorruptRecord("the record of another key")
        if meta.offset(meta.parts) > VALUES_LIMIT * LARGEST:
            raise CorruptRecord("a record larger than any that is written")
        return RedisReader(self, server, meta, self._header(key))

    def _write(self, wire: Wire, meta: RecordMeta, parts: Sequence[memoryview], names: Names) -> Written:
        wire.drain()
        wire.put(command("WATCH", names.header) + command("EXISTS", names.header))
        cursor = Cursor(split_parts(parts, meta.stored))
        for i, (name, size) in enumerate(zip(names.aside, names.sizes, strict=True)):
            wire.put(b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, size))
            for piece in cursor.pieces(size):
                wire.send(piece)
            wire.put(b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(UNFINISHED_SECONDS)), UNFINISHED_SECONDS))
            if i == 0:
                wire.flush()
                granted(wire.reply())
                if granted(wire.reply()) == 1:  # found out beside the first value: a question of its own would cost all a round trip
                    granted(wire.reply())
                    wire.call_all([command("UNWATCH"), command("UNLINK", name)])
                    return Written.PRESENT
            elif i >= BEHIND:
                granted(wire.reply())
        meta = replace(meta, checksums=cursor.checksums())
        ending = self._ending(names, encode_header(meta))
        wire.put(b"".join(ending))
        wire.flush()
        answers = [wire.reply() for _ in [*names.aside[-BEHIND:], *ending]]
        for answer in answers:
            granted(answer)
        done = answers[-1]
        if done is None:  # the header is there: another writer was faster
            wire.call("UNLINK", *names.aside)
            return Written.PRESENT
        assert isinstance(done, list)
        wrong = next((answer for answer in done if isinstance(answer, ReplyError)), None)
        if wrong is not None:  # a value has expired or was evicted meanwhile
            wire.call("UNLINK", names.header, *names.final, *names.aside)
            raise wrong
        return Written.STORED

    def _ending(self, names: Names, header: bytes) -> list[bytes]:
        """The transaction that makes a record visible."""
        steps = [command("MULTI")]
        for aside, final in zip(names.aside, names.final, strict=True):
            steps.append(command("RENAME", aside, final))
            # The header goes first when its time is over.
            steps.append(
                command("EXPIRE", final, self._ttl + UNFINISHED_SECONDS) if self._ttl else command("PERSIST", final)
            )
        expires: list[Word] = ["EX", self._ttl] if self._ttl else []
        return [*steps, command("SET", names.header, header, *expires), command("EXEC")]

    def _remove(self, server: Server, names: Sequence[bytes]) -> None:
        with contextlib.suppress(OSError), self._plainly(server) as wire:
            wire.call("UNLINK", *names)

    def _pause(self, server: Server) -> None:
        if time.monotonic() >= self._paused_until + 60:
            log.warning("lmc: %s is full; storing there pauses, reading goes on", server.name)
        self._paused_until = time.monotonic() + PAUSE_SECONDS

    def _names(self, server: Server) -> Iterator[list[bytes]]:
        """Our names on a server, some at a time, some of them twice."""
        cursor: Word = b"0"
        while True:
            with self._plainly(server) as wire:
                answer = wire.call("SCAN", cursor, "MATCH", self._prefix + b":{*", "COUNT", LISTED)
            assert isinstance(answer, list)
            cursor, names = cast(tuple[bytes, list[bytes]], answer)
            yield names
            if cursor == b"0":
                return

    def _problem(self, server: Server, key: ChunkKey) -> str:
        """What is wrong with a record, if anything; nothing is removed."""
        try:
            reader = self._open(server, key)
            if reader is not None:
                with contextlib.closing(reader):
                    scratch = memoryview(mmap.mmap(-1, max(reader.meta.stored)))
                    for part, size in enumerate(reader.meta.stored):
                        reader.verified(part, 1, [scratch[:size]])
        except (CorruptRecord, FileNotFoundError) as error:
            return str(error)
        return ""

    def _astray(self, server: Server, name: bytes) -> str:
        """Of a value: whether it has no header, and will not expire."""
        header = name[: name.rindex(b"}") + 1]
        with self._plainly(server) as wire:
            seconds, there = wire.call_all([command("TTL", name), command("EXISTS", header)])
        return "a value without a record" if seconds == -1 and there == 0 else ""


def _record_bytes(header: bytes) -> int:
    with contextlib.suppress(CorruptRecord):
        meta = decode_header(header)
        return len(header) + meta.offset(meta.parts)
    return len(header)


class RedisReader:
    """An open record."""

    def __init__(self, tier: RedisTier, server: Server, meta: RecordMeta, header: bytes) -> None:
        self.meta = meta
        self._tier, self._server = tier, server
        self._names = Names.of(header, "", value_sizes(meta.offset(meta.parts)))
        self._asked: list[tuple[Wire, int, int, list[Fetch]]] = []

    def ask(self, first: int, count: int) -> None:
        """Send for these parts."""
        with self._server.wire() as wire:
            self._ask(wire, first, count)

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts and verify each; a wrong or missing one deletes the record."""
        try:
            self.verified(first, count, into)
        except CorruptRecord:
            self._tier.discard(self.meta.key)
            raise
        except FileNotFoundError:
            self._tier.delete(self.meta.key)  # what is left of it
            raise

    def verified(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts; raise `CorruptRecord` for a wrong one, `FileNotFoundError` for one that is gone."""
        sizes = self.meta.stored[first : first + count]
        wanted = self.meta.checksums[first : first + count]
        cursor = Cursor(split_parts(into, sizes))
        try:
            with self._server.wire() as wire:
                for fetch in self._fetches(wire, first, count):
                    wire.fetch(fetch, lambda size=fetch.length: cursor.receive(wire, size))  # type: ignore[misc]
        except WrongValue as error:
            if error.args == (0,):  # evicted by Redis, or the whole record was removed meanwhile
                raise FileNotFoundError(errno.ENOENT, "a value is gone", self._names.header.decode()) from None
            raise CorruptRecord(f"a value has {error} bytes, which is not its length") from None
        except ReplyError as error:
            raise CorruptRecord(f"a value that is none: {error}") from None
        for part, (found, right) in enumerate(zip(cursor.checksums(), wanted, strict=True), first):
            if found != right:
                raise CorruptRecord(f"part {part} is not what was written")

    def close(self) -> None:
        """Nobody wants what was sent for any more."""
        for wire, _, _, fetches in self._asked:
            wire.drop(fetches)
        self._asked.clear()

    def _ask(self, wire: Wire, first: int, count: int) -> list[Fetch]:
        start, stop = self.meta.offset(first), self.meta.offset(first + count)
        fetches = []
        for number, begin, length in overlaps(self._names.sizes, start, stop):
            name = self._names.final[number]
            whole = length == self._names.sizes[number]
            words = ("GET", name) if whole else ("GETRANGE", name, begin, begin + length - 1)
            fetches.append(Fetch(command(*words), length))
        wire.ask(fetches)
        self._asked.append((wire, first, count, fetches))
        return fetches

    def _fetches(self, wire: Wire, first: int, count: int) -> list[Fetch]:
        """What was asked for on this connection and is still on its way, or else new ones."""
        for asked in list(self._asked):
            old, *wanted, fetches = asked
            if wanted == [first, count] or old is not wire:
                self._asked.remove(asked)
            if wanted == [first, count] and old is wire and not any(fetch.gone for fetch in fetches):
                return fetches
        fetches = self._ask(wire, first, count)
        self._asked.pop()
        return fetches
