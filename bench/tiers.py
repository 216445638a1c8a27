"""Host memory, disk and Redis against what each could do at most (a long file: they share rounds, checks and profile).

Bytes a second, ours over raw, side by side. Each tier has its raw way, ours and the peers'.

    python bench/tiers.py [--only host|disk|redis] [--readers N] [--writers N]

Raw is the same bytes with nothing around them: the same copies between the same memories (whole chunks in, single parts
out); whole files by direct I/O with requests of the same size, from as many threads; the plainest RESP exchange of the
same values, read in ranges of the same size, over as many connections. Chunks of 1, 4 and 32 MiB, more of them than a
processor's caches hold, and none in the page cache. All ways take turns inside every round, in another order each time;
a ratio is the median of the rounds' own ratios, since the machine's speed drifts more between rounds than inside one.
The last line has the mean of the three sizes; a size below the goal of its place goes once more with a clock around its
steps. Peers' ways: one `torch.save` a chunk through the page cache (its writes end in memory), and
redis-py's `set` and `get`.
"""

import argparse
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import zip_longest
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from common import closing_line, parser

from lmc.config.redis_url import parse_redis_url
from lmc.demo.random_model import machine
from lmc.keys import ChunkKey, RecordKind
from lmc.shapes import MIB
from lmc.storage.loader import READ_AHEAD_BYTES
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.disk import reader as disk_reader
from lmc.storage.tiers.disk import tier as disk
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import RecordReader, Tier, Written
from lmc.storage.writer import WRITERS

SHAPES = {1: (4, MIB // 4), 4: (8, MIB // 2), 32: (32, MIB)}  # MiB of a chunk: parts, bytes of each
GOALS = {"host": 0.95, "disk": 0.9, "redis": 0.9}
READERS = 2  # threads of the store's loads
AHEAD = 2  # ranges that the raw exchange asks for before it reads one; with more the server's buffers grow
TOGETHER = 16  # records that one thread reads in step
MOVED = {"host": 512 * MIB, "disk": 256 * MIB, "redis": 128 * MIB}  # in each turn
ROUNDS = {"host": 11, "disk": 11, "redis": 7}  # after one that is not counted


class Turn(NamedTuple):
    """Seconds of one turn, or threads in it."""

    put: float
    get: float


class Arena:
    """Chunks of one size, their memory, and the ways to put and get them; every way is a method that takes the round's
    number.
    """

    def __init__(self, place: str, mib: int, threads: Turn) -> None:
        parts, part_bytes = SHAPES[mib]
        self.place, self.mib, self.count, self.threads = place, mib, MOVED[place] // (mib * MIB), threads
        self.source, self.target = (Slab(self.count, parts, part_bytes) for _ in range(2))
        for slot in range(self.count):  # every page is there before the first turn
            self.source.slot(slot).random_(0, 256)
            self.target.slot(slot).zero_()
        self.ways: dict[str, Callable[[int], Turn]] = {}

    def meta(self, turn: int, chunk: int) -> RecordMeta:
        """A record of its own for every turn."""
        key = ChunkKey(b"%8d%8d%16d" % (turn, chunk, self.mib))
        slab = self.source
        return RecordMeta(
            key=key, kind=RecordKind.PAGES, namespace=bytes(32), tokens=256, first=0, parts=slab.parts,
            part_bytes=slab.part_bytes,
        )  # fmt: skip

    def whole(self, slab: Slab, chunk: int) -> memoryview:
        """All bytes of a chunk."""
        return slab.memory(chunk, 0, slab.parts, slab.stride)[0]

    def forget(self) -> None:
        """So that a way that moves nothing is found out."""
        for chunk in range(self.count):
            self.target.slot(chunk)[:, :64] = 0

    def verify(self, who: str) -> None:
        """That a way has moved the first bytes of every part."""
        for chunk in range(self.count):
            assert torch.equal(self.source.slot(chunk)[:, :64], self.target.slot(chunk)[:, :64]), (who, chunk)

    def spread(self, work: Callable[[Sequence[int]], None], threads: int) -> float:
        """Seconds that `threads` threads take over their shares of the chunks."""
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(time.sleep, [0.01] * threads))  # all threads are there
            started = time.perf_counter()
            list(pool.map(work, [range(first, self.count, threads) for first in range(threads)]))
            return time.perf_counter() - started

    # -- through a tier, as the store does it ------------------------------------------------------------------------

    def through(self, tier: Tier, turn: int) -> Turn:
        """Put and get all chunks, each thread its own."""

        def put(chunks: Sequence[int]) -> None:
            for chunk in chunks:
                assert tier.write(self.meta(turn, chunk), [self.whole(self.source, chunk)]) is Written.STORED

        def get(chunks: Sequence[int]) -> None:
            for first in range(0, len(chunks), TOGETHER):
                self.read_in_step(tier, turn, chunks[first : first + TOGETHER])

        wrote = self.spread(put, int(self.threads.put))
        read = self.spread(get, int(self.threads.get))
        for chunk in range(self.count):
            tier.delete(self.meta(turn, chunk).key)
        return Turn(wrote, read)

    def read_in_step(self, tier: Tier, turn: int, chunks: Sequence[int]) -> None:
        """As `lmc.storage.loader`: a range of all records before the next range of any, asked for one range ahead."""
        slab = self.target
        step = max(1, READ_AHEAD_BYTES // slab.stride)
        ranges = [(first, min(step, slab.parts - first)) for first in range(0, slab.parts, step)]
        keys = [self.meta(turn, chunk).key for chunk in chunks]
        tier.announce(keys, [slab.memory(chunk, *ranges[0], slab.stride) for chunk in chunks])
        readers = [tier.open(key) for key in keys]
        for (first, count), ahead in zip_longest(ranges, ranges[1:]):
            for reader in readers if first == 0 else []:
                present(reader).request(first, count)
            for reader in readers if ahead else []:
                present(reader).request(*ahead)
            for chunk, reader in zip(chunks, readers, strict=True):
                present(reader).read(first, count, slab.memory(chunk, first, count, slab.stride))
        for reader in readers:
            present(reader).close()


def present(reader: RecordReader | None) -> RecordReader:
    assert reader is not None
    return reader


# -- host ------------------------------------------------------------------------------------------------------------


class Host(Arena):
    """One thread. Both ways copy into and out of the same slab; the callers' tensors are made before the clock
    starts.
    """

    def __init__(self, mib: int, threads: Turn) -> None:
        super().__init__("host", mib, Turn(1, 1))
        self.slab = Slab(self.count, self.source.parts, self.source.part_bytes)
        self.store = Store(self.slab)
        self.chunks = range(self.count)
        self.slots, self.given, self.wanted = (
            [slab.slot(chunk) for chunk in self.chunks] for slab in (self.slab, self.source, self.target)
        )
        self.slot_parts, self.wanted_parts = ([list(chunk) for chunk in chunks] for chunks in (self.slots, self.wanted))
        self.ways = {"raw": self.raw, "ours": self.ours}

    def raw(self, turn: int) -> Turn:
        """The limit."""
        started = time.perf_counter()
        for slot, given in zip(self.slots, self.given, strict=True):
            slot.copy_(given)
        half = time.perf_counter()
        for wanted, parts in zip(self.wanted_parts, self.slot_parts, strict=True):
            for into, part in zip(wanted, parts, strict=True):
                into.copy_(part)
        return Turn(half - started, time.perf_counter() - half)

    def ours(self, turn: int) -> Turn:
        """Through the store: the chunks of a step in, as engines save them, and a plan of several chunks out."""
        store, metas = self.store, [self.meta(turn, chunk) for chunk in self.chunks]
        started = time.perf_counter()
        for first in range(0, self.count, TOGETHER):
            begun = [one for one in store.begin(metas[first : first + TOGETHER]) if one]
            for one, given in zip(begun, self.given[first : first + TOGETHER], strict=True):
                store.view(one).copy_(given)
            store.commit(begun)
        half = time.perf_counter()
        for first in range(0, self.count, TOGETHER):
            pins = [pin for pin in store.pin([meta.key for meta in metas[first : first + TOGETHER]]) if pin]
            for pin, wanted in zip(pins, self.wanted_parts[first:], strict=False):
                for layer, into in enumerate(wanted):
                    into.copy_(store.part(pin, layer))
            store.release(pins)
        return Turn(half - started, time.perf_counter() - half)

    def steps(self) -> dict[str, list[tuple[Any, str]]]:
        """What `profile` puts a clock around."""
        return {
            "copy": [(torch.Tensor, "copy_")],
            "bookkeeping": [(Store, verb) for verb in ("begin", "commit", "pin", "release")],
        }


# -- disk ------------------------------------------------------------------------------------------------------------


class Disk(Arena):
    """In one directory of the working disk."""

    def __init__(self, mib: int, threads: Turn, folder: Path) -> None:
        super().__init__("disk", mib, threads)
        self.folder = folder
        self.tier = DiskTier(folder / "tier", 4 * MOVED["disk"])
        self.ways = {"raw": self.raw, "ours": self.ours, "torch.save": self.peers}

    def paths(self, chunks: Sequence[int]) -> list[tuple[int, Path]]:
        """A file for each chunk."""
        return [(chunk, self.folder / str(chunk)) for chunk in chunks]

    def raw(self, turn: int) -> Turn:
        """The limit."""

        def put(chunks: Sequence[int]) -> None:
            for chunk, path in self.paths(chunks):
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
                assert os.pwritev(file, [self.whole(self.source, chunk)], 0) == self.mib * MIB
                os.close(file)

        def get(chunks: Sequence[int]) -> None:
            for chunk, path in self.paths(chunks):
                file, memory = os.open(path, os.O_RDONLY | os.O_DIRECT), self.whole(self.target, chunk)
                for at in range(0, len(memory), READ_AHEAD_BYTES):
                    assert os.preadv(file, [memory[at : at + READ_AHEAD_BYTES]], at) == READ_AHEAD_BYTES
                os.close(file)

        return self.settled(Turn(self.spread(put, int(self.threads.put)), self.spread(get, int(self.threads.get))))

    def ours(self, turn: int) -> Turn:
        """Through lmc."""
        return self.settled(self.through(self.tier, turn))

    def peers(self, turn: int) -> Turn:
        """As others do it."""

        def put(chunks: Sequence[int]) -> None:
            for chunk, path in self.paths(chunks):
                torch.save(self.source.slot(chunk).clone(), path)

        def get(chunks: Sequence[int]) -> None:
            for chunk, path in self.paths(chunks):
                self.target.slot(chunk).copy_(torch.load(path))

        wrote = self.spread(put, int(self.threads.put))
        os.sync()
        for _, path in self.paths(range(self.count)):
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        return self.settled(Turn(wrote, self.spread(get, int(self.threads.get))))

    def settled(self, seconds: Turn) -> Turn:
        """The filesystem has done what it put off: freeing the blocks of what was removed is not the next turn's
        affair.
        """
        for _, path in self.paths(range(self.count)):
            path.unlink(missing_ok=True)
        os.sync()
        return seconds

    def steps(self) -> dict[str, list[tuple[Any, str]]]:
        """What `profile` puts a clock around."""
        return {
            "checksum": [(disk, "checksum"), (disk_reader, "checksum")],
            "bytes": [(os, "pwritev"), (os, "preadv")],
            "files": [(os, name) for name in ("open", "close", "rename", "mkdir", "utime", "fstat", "stat")],
            "header": [(disk, "encode_header"), (disk_reader, "decode_header")],
        }


# -- Redis -----------------------------------------------------------------------------------------------------------


class Redis(Arena):
    """A real server, by one kind of connection."""

    def __init__(self, mib: int, threads: Turn, server: Any, kind: str) -> None:
        from lmc.storage.tiers.redis import RedisTier
        from lmc.storage.tiers.redis.layout import value_sizes

        super().__init__("redis", mib, threads)
        self.server, self.tcp = server, kind == "tcp"
        self.client = server.client()
        remote = parse_redis_url(server.tcp_url() if self.tcp else server.unix_url())
        self.tier = RedisTier(remote, deadline=30.0, ttl=0, prefix="lmc")
        self.values = value_sizes(mib * MIB)
        self.ways = {"raw": self.raw, "ours": self.ours, "redis-py": self.peers}

    def connection(self) -> socket.socket:
        """A bare socket to the server."""
        if self.tcp:
            made = socket.create_connection((self.server.host, self.server.port))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        made = socket.socket(socket.AF_UNIX)
        made.connect(str(self.server.socket))
        return made

    def cut(self, slab: Slab, chunk: int) -> Iterator[tuple[bytes, memoryview]]:
        """The values of a chunk, and their names."""
        memory, at = self.whole(slab, chunk), 0
        for number, size in enumerate(self.values):
            yield b"chunk%08d-%03d" % (chunk, number), memory[at : at + size]
            at += size

    def raw(self, turn: int) -> Turn:
        """The limit."""

        def put(chunks: Sequence[int]) -> None:
            with self.connection() as server:
                for chunk in chunks:
                    views: list[Any] = []
                    for name, value in self.cut(self.source, chunk):
                        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(value))
                        views += [head, value, b"\r\n"]
                    send(server, views)
                    receive(server, memoryview(bytearray(5 * len(self.values))))  # +OK

        def ask(server: socket.socket, name: bytes, first: int, into: memoryview) -> None:
            words = (name, b"%d" % first, b"%d" % (first + len(into) - 1))
            server.sendall(b"*4\r\n$8\r\nGETRANGE\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(one), one) for one in words))

        def get(chunks: Sequence[int]) -> None:
            scratch, step = memoryview(bytearray(64)), READ_AHEAD_BYTES
            values = [value for chunk in chunks for value in self.cut(self.target, chunk)]
            ranges = [(name, at, value[at : at + step]) for name, value in values for at in range(0, len(value), step)]
            with self.connection() as server:
                for one in ranges[:AHEAD]:
                    ask(server, *one)
                for (_, _, into), ahead in zip_longest(ranges, ranges[AHEAD:]):
                    if ahead is not None:
                        ask(server, *ahead)
                    receive(server, scratch[: len(b"$%d\r\n" % len(into))])
                    receive(server, into)
                    receive(server, scratch[:2])

        return self.emptied(Turn(self.spread(put, int(self.threads.put)), self.spread(get, int(self.threads.get))))

    def ours(self, turn: int) -> Turn:
        """Through lmc."""
        return self.emptied(self.through(self.tier, turn))

    def peers(self, turn: int) -> Turn:
        """As others do it."""
        import redis

        at = {"host": self.server.host, "port": self.server.port} if self.tcp else {}
        made = redis.Redis(**at) if self.tcp else redis.Redis(unix_socket_path=str(self.server.socket))

        def put(chunks: Sequence[int]) -> None:
            for chunk in chunks:
                made.set(f"chunk{chunk}", bytes(self.whole(self.source, chunk)))

        def get(chunks: Sequence[int]) -> None:
            for chunk in chunks:
                self.whole(self.target, chunk)[:] = made.get(f"chunk{chunk}")

        with closing(made):
            return self.emptied(Turn(self.spread(put, int(self.threads.put)), self.spread(get, int(self.threads.get))))

    def emptied(self, seconds: Turn) -> Turn:
        """The server has nothing any more, and has freed it."""
        self.client.flushall()
        return seconds

    def steps(self) -> dict[str, list[tuple[Any, str]]]:
        """What `profile` puts a clock around."""
        return {
            "bytes": [
                (socket.socket, verb) for verb in ("sendmsg", "sendall", "send", "recv_into", "recvmsg_into", "recv")
            ],
        }


def send(server: socket.socket, views: list[Any]) -> None:
    left = [memoryview(view) for view in views]
    while left:
        done = server.sendmsg(left[:1000])
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]


def receive(server: socket.socket, into: memoryview) -> None:
    while into:
        done = server.recv_into(into, flags=socket.MSG_WAITALL)
        assert done, "the server has closed the connection"
        into = into[done:]


# -- rounds, profile, table ------------------------------------------------------------------------------------------


def rounds(arena: Arena) -> dict[str, list[Turn]]:
    """Every way once in each round, in another order each time; the first round is not counted."""
    taken: dict[str, list[Turn]] = {name: [] for name in arena.ways}
    names = list(arena.ways)
    for number in range(1 + ROUNDS[arena.place]):
        names = names[1:] + names[:1] if number % 2 else names[::-1]
        for name in names:
            if name in ("raw", "ours") or number < 4:
                arena.forget()
                taken[name].append(arena.ways[name](number + 1))
                arena.verify(name)
    return {name: turns[1:] for name, turns in taken.items()}


@contextmanager
def clocked(steps: dict[str, list[tuple[Any, str]]], seconds: Counter[str]) -> Iterator[None]:
    """Adds to `seconds` what all threads together spend in each step."""
    mutex, undo = threading.Lock(), []

    def clock(step: str, function: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                with mutex:
                    seconds[step] += time.perf_counter() - started

        return timed

    for step, functions in steps.items():
        for owner, name in functions:
            undo.append((owner, name, owner.__dict__.get(name)))
            setattr(owner, name, clock(step, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in undo:
            delattr(owner, name) if function is None else setattr(owner, name, function)


def profile(arena: Any) -> str:
    """One turn more, put and get together, with a clock around the steps; what is in no step is Python."""
    seconds: Counter[str] = Counter()
    spent = time.process_time()
    with clocked(arena.steps(), seconds):
        turn = arena.ways["ours"](99)
    spent = time.process_time() - spent
    seconds["python"] = sum(map(mul, arena.threads, turn)) - sum(seconds.values())
    shares = ", ".join(f"{step} {1e3 * took:.0f}" for step, took in seconds.items())
    wall = f"put {1e3 * turn.put:.0f}, get {1e3 * turn.get:.0f}"
    return f"ms of threads: {shares}; wall: {wall}; processor {1e3 * spent:.0f}"


def compete(arena: Arena, verbs: tuple[str, str], ratios: dict[str, list[float]]) -> None:
    """Run and print one size of one place."""
    taken = rounds(arena)
    low = False
    for verb, which in zip(verbs, Turn._fields, strict=True):
        seconds = {name: [getattr(turn, which) for turn in turns] for name, turns in taken.items()}
        speed = {name: MOVED[arena.place] / median(times) / 1e9 for name, times in seconds.items()}
        each = sorted(raw / ours for raw, ours in zip(seconds["raw"], seconds["ours"], strict=True))
        ratio = median(each)
        ratios.setdefault(verb, []).append(ratio)
        low |= ratio < GOALS[arena.place]
        peer = next((f"{name} {speed[name]:.2f}" for name in speed if name not in ("raw", "ours")), "")
        print(
            f"{verb:15} {arena.mib:3} MiB   raw {speed['raw']:6.2f}   ours {speed['ours']:6.2f} GB/s   "
            f"ratio {ratio:.3f} ({each[len(each) // 4]:.2f}-{each[-1 - len(each) // 4]:.2f})   {peer}",
            flush=True,
        )
    if low:
        print(f"    {profile(arena)}", flush=True)
    arena.ways.clear()  # Its methods would keep its memory allocated during the next size.


def redis_servers() -> Any:
    """The class that the tests start servers with."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from redis_servers import RedisServer

    return RedisServer


def run(only: str | None, threads: Turn, ratios: dict[str, list[float]]) -> None:
    folder = Path(tempfile.mkdtemp(dir=".", prefix=".bench-")).resolve()
    try:
        for mib in SHAPES if only in (None, "host") else ():
            host = Host(mib, threads)
            with closing(host.store):
                compete(host, ("host_store", "host_retrieve"), ratios)
        for mib in SHAPES if only in (None, "disk") else ():
            arena = Disk(mib, threads, folder)
            with closing(arena.tier):
                compete(arena, ("disk_write", "disk_read"), ratios)
        if only in (None, "redis"):
            with redis_servers()(folder / "redis") as server:
                for kind in ("unix", "tcp"):
                    for mib in SHAPES:
                        link = Redis(mib, threads, server, kind)
                        with closing(link.tier):
                            compete(link, (f"redis_{kind}_set", f"redis_{kind}_get"), ratios)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    options: argparse.ArgumentParser = parser(__doc__, "tiers")
    options.add_argument("--only", choices=["host", "disk", "redis"])
    options.add_argument("--readers", type=int, default=READERS, help="threads that read from disk and Redis")
    options.add_argument("--writers", type=int, default=WRITERS, help="threads that write to disk and Redis")
    arguments = options.parse_args()
    threads = Turn(arguments.writers, arguments.readers)
    print(f"{machine()}; {threads.get} readers, {threads.put} writers; in brackets the middle half of the rounds")
    ratios: dict[str, list[float]] = {}
    run(arguments.only, threads, ratios)
    names = ("host_store", "host_retrieve", "disk_read", "disk_write")
    names += tuple(f"redis_{kind}_{verb}" for kind in ("unix", "tcp") for verb in ("get", "set"))
    means = {name: round(sum(ratios[name]) / len(ratios[name]), 3) for name in names if name in ratios}
    sizes = {
        name: dict(zip(map(str, SHAPES), (round(ratio, 3) for ratio in each), strict=True))
        for name, each in ratios.items()
    }
    closing_line({"bench": "tiers", **means}, "tiers" if arguments.keep else None, {"by_mib": sizes})


if __name__ == "__main__":
    main()
