"""The Redis tier: records in Redis, shared by all processes that use the same server (or cluster) and prefix.

    PREFIX:{KEY}           the record's header, which is written last: a record is present if its header is present
    PREFIX:{KEY}:0, :1, …  the record's parts, joined and then cut into values that fill an allocation
    PREFIX:{KEY}:TOKEN:0…  values of a record that is being written; they expire if the writer dies

The braces around KEY keep all of a record on one node of a cluster. A writer renames its values and adds the header in
one step (a script), unless another writer has finished before.
"""

import contextlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from lmc.config.redis_url import RedisURL
from lmc.errors import CorruptRecord, TierUnusable
from lmc.keys import FORMAT, ChunkKey
from lmc.storage.tiers.breaker import WritePause
from lmc.storage.tiers.record import (
    RecordMeta,
    decode_header,
    encode_header,
    is_removed,
    removed_if_corrupt,
    split_parts,
    verify_parts,
)
from lmc.storage.tiers.redis.connections import Server, Servers
from lmc.storage.tiers.redis.layout import COMPLETE, COMPLETED, LARGEST, OTHERS, Cursor, value_names, value_sizes
from lmc.storage.tiers.redis.reader import WRONGTYPE, RedisReader, refused
from lmc.storage.tiers.redis.resp import Connection, Reply, ReplyError, TooLong, Word, command, granted
from lmc.storage.tiers.tier import Entry, Finding, Written

UNFINISHED_SECONDS = 60  # the time after which values of an unfinished record expire
BEHIND = 2  # values that a writer sends before it waits for the reply to the first of them
FULL = ("OOM", "MISCONF", "NOREPLICAS")  # codes of refused writes; stored values can still be read
PROMPTLY = 0.4  # share of the deadline; three lookups in a row that take longer open the breaker
PAUSE_SECONDS = 5.0  # Writing pauses for this time after Redis was full.
SAID_EVERY = 60.0  # seconds between two warnings about refused writes
VALUES_LIMIT = 1024  # the maximum number of values of a record; all are removed if its header cannot be read
LISTED = 500  # names in one reply to SCAN

Answer: TypeAlias = "Reply | OSError"  # the reply, or the error of a failed request


class RedisTier:
    """Records in Redis, which evicts and expires them itself."""

    name = "redis"
    shared = True

    def __init__(self, remote: RedisURL, *, deadline: float = 0.5, ttl: int = 0, prefix: str = "lmc") -> None:
        """Make the first contact with the servers.

        A server that does not respond causes a warning, and is used as soon as it responds. Raises `TierUnusable` for
        a permanent refusal.
        """
        self.corrupt = 0
        self._prefix, self._ttl = prefix.encode(), ttl
        ours = rb"(?P<header>%s:\{(?P<key>[0-9a-f]{64})\})(?P<value>(:[0-9a-f]{16})?:[0-9]+)?"
        self._ours = re.compile(ours % re.escape(self._prefix))
        self._pause = WritePause()
        self._prompt = deadline * PROMPTLY
        self._thread = threading.local()  # `headers`: the headers that a thread has fetched and not used yet
        self.servers = Servers(remote, deadline, self._greet, self._prefix + b":format")

    @property
    def usable(self) -> bool:
        """Whether any server responds. While none does, every lookup is a miss without waiting."""
        return self.servers.usable

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Check keys with one batch of commands per server. Keys on a server that does not respond are missing."""
        answers = self._ask_all("EXISTS", keys, within=self._prompt)
        errors = [answer for answer in answers.values() if isinstance(answer, OSError)]
        if errors and len(errors) == len(answers):
            raise errors[-1]
        return [answers.get(key) == 1 for key in keys]

    def unanswered(self, keys: Sequence[ChunkKey]) -> bool:
        """Return false: lookups wait for their answers."""
        return False

    def announce(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Fetch the headers of these records, with one batch of commands per server."""
        self._thread.headers = self._ask_all("GET", keys)

    def open(self, key: ChunkKey) -> RedisReader | None:
        """Open a record. Redis counts this as a use."""
        server = self.servers.of(self._header(key))
        with removed_if_corrupt(self.discard, key):
            return self._open(server, key) if server is not None else None

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Write the values under temporary names, then rename them and add the header in one step."""
        header, total = self._header(meta.key), meta.offset(meta.parts)
        server = self.servers.of(header)
        if server is None or self._pause.lasts or total > VALUES_LIMIT * LARGEST:
            return Written.REFUSED
        sizes = value_sizes(total)
        names = value_names(b"%s:%s" % (header, os.urandom(8).hex().encode()), len(sizes))
        aside = dict(zip(names, sizes, strict=True))
        try:
            with server.connection() as connection:
                return self._write(connection, meta, Cursor(split_parts(parts, meta.stored)), aside)
        except ReplyError as error:
            with contextlib.suppress(OSError):
                self._call(server, "UNLINK", *names)
            if error.code not in FULL:
                raise
            self._pause.begin(error, PAUSE_SECONDS, SAID_EVERY)
            return Written.REFUSED

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record's header and values with one command."""
        header, total = self._header(key), VALUES_LIMIT * LARGEST
        server = self.servers.of(header)
        if server is None:
            raise OSError(f"{self.name} does not respond: a record was not deleted")
        with server.connection() as connection, contextlib.suppress(CorruptRecord, TooLong):
            (blob,) = connection.call_all([command("GET", header)])
            if blob is None:
                return False
            if isinstance(blob, bytes):
                meta = decode_header(blob)
                total = min(total, meta.offset(meta.parts))
        # If the header does not tell the number of values, all possible values are removed.
        self._call(server, "UNLINK", header, *value_names(header, len(value_sizes(total))))
        return True

    def discard(self, key: ChunkKey) -> None:
        """Remove a corrupt record, and count it."""
        self.corrupt += 1
        self.delete(key)

    def entries(self) -> Iterator[Entry]:
        """Return the records on the servers that respond, least recently used first. Redis counts whole seconds."""
        found: dict[ChunkKey, Entry] = {}
        for server in self.servers.all():
            for names in self._names(server) if server.usable else []:
                headers = {_key(name): name[0] for name in names if not name["value"] and _key(name) not in found}
                now = time.time()
                # Reading a header counts as a use, so the idle time is requested before.
                verbs = (("OBJECT", "IDLETIME"), ("GET",))
                asked = [command(*verb, header) for header in headers.values() for verb in verbs]
                with server.connection() as connection:
                    answers = connection.call_all(asked)
                for key, seconds, blob in zip(headers, answers[::2], answers[1::2], strict=True):
                    if isinstance(blob, bytes):
                        used = now - seconds if isinstance(seconds, int) else 0.0  # Redis may count uses instead.
                        found[key] = Entry(key=key, bytes=_record_bytes(blob), used=used)
        return iter(sorted(found.values(), key=lambda entry: entry.used))

    def check(self, fix: bool = False) -> list[Finding]:
        """Read and verify every record, and find values that have lost their header. With `fix`, remove these."""
        findings = []
        for server in self.servers.all():
            ours = {name[0]: name for names in self._names(server) for name in names}
            for _, name in sorted(ours.items()):
                problem = self._astray(server, name) if name["value"] else self._problem(server, _key(name))
                if problem:
                    remove = (self._call, server, "UNLINK", name[0]) if name["value"] else (self.discard, _key(name))
                    findings.append(Finding(where=name[0].decode(), problem=problem, fixed=fix and is_removed(*remove)))
        return findings

    def close(self) -> None:
        """Close all connections. Calls that wait on a connection fail."""
        self.servers.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _greet(self, connection: Connection) -> None:
        name = f"{self._prefix.decode()}:format"
        asked = [command("SET", name, FORMAT, "NX"), command("EVAL", "return 1", 0), command("GET", name)]
        _, _, held = map(_granted_unless_full, connection.call_all(asked))
        if held not in (None, b"%d" % FORMAT):
            raise TierUnusable(f"{name} in Redis is {held!r}: another version of lmc; set another remote_prefix")

    def _ask_all(self, verb: str, keys: Sequence[ChunkKey], within: float = float("inf")) -> dict[ChunkKey, Answer]:
        """Send a command for each key's header to all servers at the same time, within one deadline.

        The result has no entry for a key on a server that does not respond, or if a reply of its server was too long.
        """
        answers: dict[ChunkKey, Answer] = {}
        asked: dict[Server, list[ChunkKey]] = defaultdict(list)
        for key in keys:
            server = self.servers.of(self._header(key))
            if server is not None:
                asked[server].append(key)
        silent: OSError | None = None
        for server in list(asked):
            try:
                if silent is not None:  # One server has used up the deadline. The others are skipped this time.
                    raise silent
                with server.connection() as connection:
                    connection.post([command(verb, self._header(key)) for key in asked[server]])
            except OSError as error:
                silent = error if isinstance(error, TimeoutError) else silent
                answers |= dict.fromkeys(asked.pop(server), error)
        for server, theirs in asked.items():
            try:
                with server.connection(within=within) as connection, contextlib.suppress(TooLong):
                    replies = connection.collect(len(theirs))
                    refusals = [reply for reply in replies if isinstance(reply, ReplyError) and reply.code != WRONGTYPE]
                    answers |= {key: reply for key, reply in zip(theirs, replies, strict=True) if reply not in refusals}
                    if refusals:
                        raise refusals[0]
            except OSError as error:
                answers |= {key: error for key in theirs if key not in answers}
        return answers

    def _header(self, key: ChunkKey) -> bytes:
        return b"%s:{%s}" % (self._prefix, key.hex().encode())

    def _call(self, server: Server, *words: Word) -> Reply:
        with server.connection() as connection:
            return connection.call(*words)

    def _open(self, server: Server, key: ChunkKey) -> RedisReader | None:
        try:
            headers: dict[ChunkKey, Answer] = getattr(self._thread, "headers", {})
            blob = headers.pop(key) if key in headers else self._call(server, "GET", self._header(key))
            if isinstance(blob, OSError):
                raise blob
        except TooLong as error:
            raise CorruptRecord(f"a header that is {error}") from None
        except ReplyError as error:
            raise refused(error) from None
        if blob is None:
            return None
        if not isinstance(blob, bytes):
            raise OSError(f"{server.name}: no value, though one was asked for")
        meta = decode_header(blob)
        if meta.key != key:
            raise CorruptRecord("the header has another key")
        if meta.offset(meta.parts) > VALUES_LIMIT * LARGEST:
            raise CorruptRecord("the record is larger than the limit")
        return RedisReader(self.discard, self.delete, server, meta, self._header(key))

    def _write(self, connection: Connection, meta: RecordMeta, cursor: Cursor, aside: dict[bytes, int]) -> Written:
        header = self._header(meta.key)
        connection.drain()
        connection.put(command("EXISTS", header))
        for i, (name, size) in enumerate(aside.items()):
            connection.put(b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, size))
            for piece in cursor.pieces(size):
                connection.send(piece)
            connection.put(b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(UNFINISHED_SECONDS)), UNFINISHED_SECONDS))
            if i == 0:
                connection.flush()
                # The check whether the record exists is sent with the first value, which saves a round trip.
                if granted(connection.reply()) == 1:
                    granted(connection.reply())
                    connection.call("UNLINK", name)
                    return Written.PRESENT
            elif i >= BEHIND:
                granted(connection.reply())
        meta = replace(meta, checksums=cursor.checksums())
        keys = [header, *aside, *value_names(header, len(aside))]
        connection.put(command("EVAL", COMPLETE, len(keys), *keys, encode_header(meta), self._ttl, UNFINISHED_SECONDS))
        connection.flush()
        *_, outcome = [granted(connection.reply()) for _ in range(min(BEHIND, len(aside)) + 1)]
        if outcome not in (COMPLETED, OTHERS):
            raise OSError("values have gone while others were written: Redis evicts what is new, or is very slow")
        return Written.STORED if outcome == COMPLETED else Written.PRESENT

    def _names(self, server: Server) -> Iterator[list[re.Match[bytes]]]:
        """Yield the names of this tier on a server, parsed, in batches. A name may come twice."""
        cursor = b""
        while cursor != b"0":
            match self._call(server, "SCAN", cursor or 0, "MATCH", self._prefix + b":{*", "COUNT", LISTED):
                case [bytes() as cursor, list() as names]:
                    matches = [self._ours.fullmatch(name) for name in names if isinstance(name, bytes)]
                    yield [match for match in matches if match]
                case _:
                    raise OSError(f"{server.name}: no list of names, though one was asked for")

    def _problem(self, server: Server, key: ChunkKey) -> str:
        """Return the problem of a record, or an empty string. This removes nothing."""
        try:
            reader = self._open(server, key)
            if reader is not None:
                with contextlib.closing(reader):
                    verify_parts(reader.meta, reader.verified)
        except (CorruptRecord, FileNotFoundError) as error:
            return str(error)
        return ""

    def _astray(self, server: Server, name: re.Match[bytes]) -> str:
        """Return the problem of a value that lacks a header and will not expire, or an empty string."""
        with server.connection() as connection:
            seconds, there = connection.call_all([command("TTL", name[0]), command("EXISTS", name["header"])])
        return "a value without a record" if seconds == -1 and there == 0 else ""


def _granted_unless_full(answer: Reply) -> Reply:
    """Return a reply. Raises a refusal, unless Redis refuses writes because it is full: it can still be read."""
    return answer if isinstance(answer, ReplyError) and answer.code in FULL else granted(answer)


def _key(name: re.Match[bytes]) -> ChunkKey:
    return ChunkKey(bytes.fromhex(name["key"].decode()))


def _record_bytes(header: bytes) -> int:
    with contextlib.suppress(CorruptRecord):
        meta = decode_header(header)
        return len(header) + meta.offset(meta.parts)
    return len(header)
