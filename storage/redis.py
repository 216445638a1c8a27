"""A tier in Redis, shared by all processes that use the same server, cluster and prefix.

    PREFIX:{KEY}           the record's header: a chunk is there if this is, and it comes last
    PREFIX:{KEY}:0, :1, …  the record's parts, side by side, cut into values that fill an allocation
    PREFIX:{KEY}:TOKEN:0…  values of a record that is being written; they expire, whoever has died

KEY in braces keeps a chunk on one node of a cluster. A writer renames its values and adds the header in one step (a script), unless
another writer was faster. Connections are redis-py's (`servers.py`), the payload goes straight from and to the slab (`wire.py`).
"""

import contextlib
import logging
import mmap
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from lmc.errors import CorruptRecord, TierUnusable
from lmc.keys import FORMAT, ChunkKey
from lmc.remote import Remote
from lmc.storage.record import HEADER_LIMIT, RecordMeta, decode_header, encode_header, header_size, split_parts
from lmc.storage.redis_reader import WRONGTYPE, RedisReader, refused
from lmc.storage.servers import Server, Servers
from lmc.storage.tier import Entry, Finding, Written
from lmc.storage.values import LARGEST, Cursor, Names, value_sizes
from lmc.storage.wire import Reply, ReplyError, TooLong, Wire, Word, command, granted

log = logging.getLogger(__name__)

UNFINISHED_SECONDS = 60
BEHIND = 2  # values that are sent before the answer to the first of them is waited for
FULL = ("OOM", "MISCONF", "NOREPLICAS")  # refusals of what is new; what is there can be read
PROMPTLY = 0.4  # of the deadline: a question whether chunks are there that takes longer, three times in a row, opens the breaker
PAUSE_SECONDS = 5.0  # of no writing, after Redis was full
SAID_EVERY = 60.0  # seconds
VALUES_LIMIT = 1024  # removed with a record whose header cannot be read
LISTED = 500  # names in an answer


# Makes a record visible, or leaves nothing of it. The header is set first, as it alone can be refused (for want of memory).
COMPLETE = """
local count = (#KEYS - 1) / 2
local function discard(outcome)
    for i = 2, count + 1 do redis.call('UNLINK', KEYS[i]) end
    return outcome
end
if redis.call('EXISTS', KEYS[1]) == 1 then return discard(2) end
for i = 2, count + 1 do
    if redis.call('EXISTS', KEYS[i]) == 0 then return discard(0) end
end
local ttl = tonumber(ARGV[2])
if ttl > 0 then redis.call('SET', KEYS[1], ARGV[1], 'EX', ttl) else redis.call('SET', KEYS[1], ARGV[1]) end
for i = 2, count + 1 do
    redis.call('RENAME', KEYS[i], KEYS[i + count])
    -- The header is the first to go when its time is over.
    if ttl > 0 then redis.call('EXPIRE', KEYS[i + count], ttl + tonumber(ARGV[3])) else redis.call('PERSIST', KEYS[i + count]) end
end
return 1
"""
COMPLETED, OTHERS = 1, 2  # its answers


Answer: TypeAlias = "Reply | OSError"  # or why there is none


class _Mine(threading.local):
    """What a thread has sent for and not used yet."""

    def __init__(self) -> None:
        self.headers: dict[ChunkKey, Answer] = {}


class RedisTier:
    """Records in Redis; Redis itself evicts and expires them."""

    name = "redis"
    shared = True
    evictions = 0  # Redis evicts by itself, and tells nobody

    def __init__(self, remote: Remote, *, deadline: float = 0.5, ttl: int = 0, prefix: str = "lmc") -> None:
        """Meet the servers; raise `TierUnusable` for what waiting does not mend. One that is away is a warning, and joins later."""
        self.corrupt = 0
        self._prefix, self._ttl = prefix.encode(), ttl
        self._ours = re.compile(
            rb"(?P<header>%s:\{(?P<key>[0-9a-f]{64})\})(?P<value>(:[0-9a-f]{16})?:[0-9]+)?" % re.escape(self._prefix)
        )
        self._paused_until, self._said_at = 0.0, float("-inf")
        self._patience = deadline * PROMPTLY
        self._mine = _Mine()
        self._servers = Servers(remote, deadline, self._greet, self._prefix + b":format")

    @property
    def usable(self) -> bool:
        """False while no server answers: everything is a miss then, at once."""
        return self._servers.usable

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """One question to every server concerned; what lies on one that is away is not there."""
        answers = self._ask_all("EXISTS", keys, within=self._patience)
        errors = [answer for answer in answers.values() if isinstance(answer, OSError)]
        if errors and len(errors) == len(answers):
            raise errors[-1]
        return [answers.get(i) == 1 for i in range(len(keys))]

    def expect(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Get the headers of these records, in one go from each server."""
        self._mine.headers = {keys[i]: answer for i, answer in self._ask_all("GET", keys).items()}

    def open(self, key: ChunkKey) -> RedisReader | None:
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
        names = Names.of(self._header(meta.key), value_sizes(total), os.urandom(8).hex())
        try:
            with server.wire() as wire:
                return self._write(wire, meta, parts, names)
        except ReplyError as error:
            self._remove(server, names.aside)
            if error.code not in FULL:
                raise OSError(f"{server.name}: {error}") from None
            self._pause(server, error)
            return Written.REFUSED

    def delete(self, key: ChunkKey) -> bool:
        """Remove header and values at once."""
        server = self._server(key)
        if server is None:
            return False
        header, total = self._header(key), VALUES_LIMIT * LARGEST
        with self._plainly(server) as wire, contextlib.suppress(CorruptRecord, TooLong):
            (blob,) = wire.call_all([command("GET", header)])
            if blob is None:
                return False
            if isinstance(blob, bytes):
                meta = decode_header(blob)
                total = min(total, meta.offset(meta.parts))
        # Where the header does not tell, of all values that there could be.
        with self._plainly(server) as wire:
            wire.call("UNLINK", header, *Names.of(header, value_sizes(total)).final)
        return True

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
        name = self._prefix + b":format"
        made, scripts = wire.call_all([command("SET", name, FORMAT, "NX"), command("EVAL", "return 1", 0)])
        if not (isinstance(made, ReplyError) and made.code in FULL):  # it is good to read from
            granted(made)
        granted(scripts)
        held = wire.call("GET", name)
        if held not in (None, b"%d" % FORMAT):
            raise TierUnusable(
                f"{name.decode()} in Redis is {held!r}: another version of lmc; set another remote_prefix"
            )

    def _server(self, key: ChunkKey) -> Server | None:
        server = self._servers.of(self._header(key))
        return server if server is not None and server.usable else None

    def _by_server(self, keys: Sequence[ChunkKey]) -> dict[Server, list[int]]:
        """Which of `keys`, by their places among them, each server has; those of servers that are away are left out."""
        found: dict[Server, list[int]] = defaultdict(list)
        for i, key in enumerate(keys):
            server = self._server(key)
            if server is not None:
                found[server].append(i)
        return found

    def _ask_all(self, verb: str, keys: Sequence[ChunkKey], within: float = float("inf")) -> dict[int, Answer]:
        """The answer about each key's header, by the key's place: from all servers at the same time, and one deadline for all of them.

        None of what lies on a server that is away, nor of what an answer too long to be taken was in the way of.
        """
        answers: dict[int, Answer] = {}
        places = self._by_server(keys)
        silent: OSError | None = None
        for server in list(places):
            try:
                if silent is not None:  # one has cost the whole deadline: the others are asked the next time
                    raise silent
                with self._plainly(server) as wire:
                    wire.post([command(verb, self._header(keys[i])) for i in places[server]])
            except OSError as error:
                silent = error if isinstance(error, TimeoutError) else silent
                answers |= dict.fromkeys(places.pop(server), error)
        for server, asked in places.items():
            try:
                with self._plainly(server, within) as wire, contextlib.suppress(TooLong):
                    replies = dict(zip(asked, wire.collect(len(asked)), strict=True))
                    refusals = [
                        reply for reply in replies.values() if isinstance(reply, ReplyError) and reply.code != WRONGTYPE
                    ]
                    answers |= {i: reply for i, reply in replies.items() if reply not in refusals}
                    if refusals:
                        raise refusals[0]
            except OSError as error:
                answers |= {i: error for i in asked if i not in answers}
        return answers

    def _header(self, key: ChunkKey) -> bytes:
        return b"%s:{%s}" % (self._prefix, key.hex().encode())

    def _key(self, name: bytes) -> bytes:
        """The chunk of which `name` is the header, or nothing."""
        found = self._ours.fullmatch(name)
        return bytes.fromhex(found["key"].decode()) if found and not found["value"] else b""

    @contextlib.contextmanager
    def _plainly(self, server: Server, within: float = float("inf")) -> Iterator[Wire]:
        """A connection for commands that have no reason to be refused."""
        try:
            with server.wire(within=within) as wire:
                yield wire
        except ReplyError as error:
            raise OSError(f"{server.name}: {error}") from None

    def _open(self, server: Server, key: ChunkKey) -> RedisReader | None:
        try:
            if key in self._mine.headers:
                blob = self._mine.headers.pop(key)
                if isinstance(blob, OSError):
                    raise blob
                granted(blob)
            else:
                with server.wire() as wire:
                    try:
                        blob = wire.call("GET", self._header(key))
                    except TooLong as error:
                        raise CorruptRecord(f"a header that is {error}") from None
        except ReplyError as error:
            raise refused(server, error) from None
        if blob is None:
            return None
        if not isinstance(blob, bytes):
            raise OSError(f"{server.name}: no value, though one was asked for")
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
        wire.put(command("EXISTS", names.header))
        cursor = Cursor(split_parts(parts, meta.stored))
        for i, (name, size) in enumerate(zip(names.aside, names.sizes, strict=True)):
            wire.put(b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, size))
            for piece in cursor.pieces(size):
                wire.send(piece)
            wire.put(b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(UNFINISHED_SECONDS)), UNFINISHED_SECONDS))
            if i == 0:
                wire.flush()
                # Found out beside the first value: a question of its own would cost all a round trip.
                if granted(wire.reply()) == 1:
                    granted(wire.reply())
                    wire.call("UNLINK", name)
                    return Written.PRESENT
            elif i >= BEHIND:
                granted(wire.reply())
        meta = replace(meta, checksums=cursor.checksums())
        keys = [names.header, *names.aside, *names.final]
        wire.put(command("EVAL", COMPLETE, len(keys), *keys, encode_header(meta), self._ttl, UNFINISHED_SECONDS))
        wire.flush()
        for _ in names.aside[-BEHIND:]:
            granted(wire.reply())
        outcome = granted(wire.reply())
        if outcome == COMPLETED:
            return Written.STORED
        if outcome == OTHERS:
            return Written.PRESENT
        raise OSError("values have gone while others were written: Redis evicts what is new, or is very slow")

    def _remove(self, server: Server, names: Sequence[bytes]) -> None:
        with contextlib.suppress(OSError), self._plainly(server) as wire:
            wire.call("UNLINK", *names)

    def _pause(self, server: Server, error: ReplyError) -> None:
        now = time.monotonic()
        if now - self._said_at > SAID_EVERY:
            self._said_at = now
            log.warning("lmc: %s refuses what is new (%s); storing there pauses, reading goes on", server.name, error)
        self._paused_until = now + PAUSE_SECONDS

    def _names(self, server: Server) -> Iterator[list[bytes]]:
        """Our names on a server, some at a time, some of them twice."""
        cursor: Word = b"0"
        while True:
            with self._plainly(server) as wire:
                answer = wire.call("SCAN", cursor, "MATCH", self._prefix + b":{*", "COUNT", LISTED)
            match answer:
                case [bytes() as cursor, list() as names]:
                    yield [name for name in names if isinstance(name, bytes)]
                case _:
                    raise OSError(f"{server.name}: no list of names, though one was asked for")
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
        found = self._ours.fullmatch(name)
        if found is None:
            return ""  # somebody else's
        header = found["header"]
        with self._plainly(server) as wire:
            seconds, there = wire.call_all([command("TTL", name), command("EXISTS", header)])
        return "a value without a record" if seconds == -1 and there == 0 else ""


def _record_bytes(header: bytes) -> int:
    with contextlib.suppress(CorruptRecord):
        meta = decode_header(header)
        return len(header) + meta.offset(meta.parts)
    return len(header)
