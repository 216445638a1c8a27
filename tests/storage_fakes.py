"""Records with contents that follow from their keys, and tiers in memory, for the tests of the storage layer."""

import hashlib
import mmap
import subprocess
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import ranked_locks  # noqa: F401 - Processes that tests start check the order of locks, too.
import torch

from lmc.errors import CorruptRecord
from lmc.keys import ChunkKey, RecordKind
from lmc.storage.change_log import ChangeLog
from lmc.storage.contract import Pin
from lmc.storage.cost_model import CostModel, Rate
from lmc.storage.state import StoreState
from lmc.storage.store import Store
from lmc.storage.tiers.disk import tier as disk
from lmc.storage.tiers.record import RecordMeta, checksum, decode_header, encode_header, header_size, split_parts
from lmc.storage.tiers.tier import Entry, Finding, RecordReader, Tier, Wrapped, Written

# A start waits until an incomplete index has been compared with its directory, however slow the machine is.
disk.START_SECONDS = 60.0

NAMESPACE = bytes(32)
PARTS = 3
PART_BYTES = 4096
RECORD_BYTES = 4096 + PARTS * PART_BYTES


def key_of(name: int | str) -> ChunkKey:
    return ChunkKey(hashlib.sha256(f"chunk {name}".encode()).digest())


def content(key: bytes, part: int, size: int = PART_BYTES, version: int = 0) -> bytes:
    """What part `part` under `key` must be."""
    return hashlib.shake_128(b"%s %d %d" % (key, part, version)).digest(size)


def meta_of(key: ChunkKey, parts: int = PARTS, part_bytes: int = PART_BYTES) -> RecordMeta:
    kind = RecordKind.PAGES
    return RecordMeta(key=key, kind=kind, namespace=NAMESPACE, tokens=16, first=32, parts=parts, part_bytes=part_bytes)


def memory(size: int, offset: int = 0) -> memoryview:
    """Writable bytes, aligned for direct I/O unless `offset` says otherwise."""
    return memoryview(mmap.mmap(-1, size + offset))[offset:]


def stored(meta: RecordMeta, version: int = 0, offset: int = 0) -> memoryview:
    """The parts of a record side by side, each padded with zeros to whole blocks."""
    whole = memory(meta.parts * meta.stored_part, offset)
    for part in range(meta.parts):
        start = part * meta.stored_part
        whole[start : start + meta.part_bytes] = content(meta.key, part, meta.part_bytes, version)
    return whole


def raw_record(meta: RecordMeta) -> bytes:
    """A whole record as a file holds it, made without any tier."""
    parts = stored(meta)
    sums = tuple(checksum(part) for part in split_parts([parts], meta.stored))
    return encode_header(replace(meta, checksums=sums)) + bytes(parts)


@contextmanager
def writing(store: Store, meta: RecordMeta) -> Iterator[torch.Tensor | None]:
    """A slot to fill, or None if there is nothing to do; kept when the block ends, given back if it raises."""
    (reservation,) = store.begin([meta])
    if reservation is None:
        yield None
        return
    try:
        yield store.view(reservation)
    except BaseException:
        store.abort(reservation)
        raise
    store.commit([reservation])


class Clock:
    """Time that goes on when the test says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until something is true."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it does not come true"
        time.sleep(1e-3)


_waited: dict[Path, int] = {}
_waited_mutex = threading.Lock()


def waits_of(process: int | str) -> dict[Path, int]:
    """Nanoseconds in which each thread of a process was ready and had no CPU: the second number of its `schedstat`."""
    found = {}
    for thread in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError, IndexError):  # The thread has ended.
            found[thread] = int(thread.read_text().split()[1])
    return found


class _Pauses(threading.Thread):
    """Measures how long the whole process did not run, as when a virtual machine is paused: it wakes up late."""

    TICK_SECONDS, LEAST_SECONDS = 0.02, 0.1
    monotonic = staticmethod(time.monotonic)  # Tests replace the function in the module.

    def __init__(self) -> None:
        super().__init__(name="test-pauses", daemon=True)
        self.seconds, self._began, self._mutex = 0.0, self.monotonic(), threading.Lock()
        self.start()

    def run(self) -> None:
        never = threading.Event()
        while not never.wait(self.TICK_SECONDS):
            with self._mutex:
                self.seconds, self._began = self._so_far(), self.monotonic()

    def until_now(self) -> float:
        """Return the seconds of all pauses. One that has just ended counts, though this thread has not run since."""
        with self._mutex:
            return self._so_far()

    def _so_far(self) -> float:
        late = self.monotonic() - self._began - self.TICK_SECONDS
        return self.seconds + (late if late > self.LEAST_SECONDS else 0.0)


@cache
def _pauses() -> _Pauses:
    return _Pauses()


def own_seconds(*, less_pauses: bool = True) -> float:
    """Seconds by the monotonic clock, less those in which threads of this process were ready and had no CPU.

    Those in which the whole process was paused do not count either, with `less_pauses`. A limit on waiting that is
    measured with it holds on a machine that is busy with other things as well. The first call starts a thread.
    """
    paused = _pauses().until_now() if less_pauses else 0.0
    with _waited_mutex:
        for thread, waited in waits_of("self").items():
            _waited[thread] = max(waited, _waited.get(thread, 0))  # What ended threads have waited still counts.
        return time.monotonic() - sum(_waited.values()) / 1e9 - paused


def mounted(place: Path, *arguments: str) -> bool:
    """Mount a filesystem with these arguments of `mount`. False if this process may not."""
    return subprocess.run(["mount", *arguments, place], capture_output=True, check=False).returncode == 0


def unmounted(place: Path) -> None:
    """Take a filesystem away, also from processes that have files of it open."""
    subprocess.run(["umount", "-l", place], check=True)


SMALL_FILESYSTEM = ("-t", "tmpfs", "-o", "size=1m", "tmpfs")  # arguments of `mount`


def put(store: Store, key: ChunkKey, version: int = 0) -> bool:
    """Write the chunk of `key`; False if the store had nothing to do or no room."""
    parts, size = shape_of(store)
    with writing(store, meta_of(key, parts, size)) as slot:
        if slot is None:
            return False
        for part in range(parts):
            slot[part, :size] = as_tensor(content(key, part, size, version))
    return True


def as_tensor(blob: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)


def get(store: Store, key: ChunkKey) -> list[bytes] | None:
    """All parts of `key` as bytes, or None if it is a miss."""
    with store.pinned([key]) as (pin,):
        return None if pin is None else [pin_bytes(store, pin, part) for part in range(shape_of(store)[0])]


def pin_bytes(store: Store, pin: Pin, part: int) -> bytes:
    return bytes(store.part(pin, part)[: shape_of(store)[1]].tolist())


def shape_of(store: Store) -> tuple[int, int]:
    """Parts of a chunk, and bytes of a part."""
    return store.slab.parts, store.slab.part_bytes


def expected(key: ChunkKey, parts: int = PARTS, size: int = PART_BYTES, version: int = 0) -> list[bytes]:
    return [content(key, part, size, version) for part in range(parts)]


class DictTier:
    """A tier in memory: the bytes of record files in a dict."""

    name = "dict"
    shared = False
    usable = True
    evictions = document_evictions = 0

    def __init__(self) -> None:
        self.records: OrderedDict[ChunkKey, bytearray] = OrderedDict()
        self.used: dict[ChunkKey, float] = {}
        self.changes: ChangeLog | None = None
        self._clock = 0
        self._mutex = threading.Lock()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._mutex:
            return [key in self.records for key in keys]

    def announce(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        pass

    def open(self, key: ChunkKey) -> "DictReader | None":
        with self._mutex:
            record = self.records.get(key)
            if record is None:
                return None
            self._touch(key)
        try:
            return DictReader(self, key, record)
        except CorruptRecord:
            self.delete(key)
            raise

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        if self.contains([meta.key])[0]:
            return Written.PRESENT
        views = split_parts(parts, meta.stored)
        header = encode_header(replace(meta, checksums=tuple(checksum(view) for view in views)))
        with self._mutex:
            self.records[meta.key] = bytearray(header + b"".join(views))
            self._touch(meta.key)
        if self.changes and not self.shared:
            self.changes.appeared(self.name, meta)
        return Written.STORED

    def delete(self, key: ChunkKey) -> bool:
        with self._mutex:
            found = self.records.pop(key, None) is not None
        if self.changes:
            self.changes.left(self.name, key)
        return found

    def entries(self) -> Iterator[Entry]:
        with self._mutex:
            return iter([Entry(key=k, bytes=len(r), used=self.used.get(k, 0)) for k, r in self.records.items()])

    def all_keys(self) -> list[ChunkKey]:
        with self._mutex:
            return list(self.records)

    def headers(self) -> Iterator[tuple[RecordMeta, float]]:
        with self._mutex:
            records = [(bytes(record), self.used.get(key, 0)) for key, record in reversed(self.records.items())]
        for record, used in records:
            with suppress(CorruptRecord):
                meta = decode_header(record[: header_size(record[:8])])
                yield meta, used
                with self._mutex:
                    if self.changes and meta.key in self.records:
                        self.changes.appeared(self.name, meta)

    def unanswered(self, keys: Sequence[ChunkKey]) -> bool:
        return False

    def note_use(self, keys: Sequence[ChunkKey]) -> None:
        pass

    def protect(self, keys: Collection[ChunkKey], *, pinned: bool) -> None:
        pass

    def trim(self) -> None:
        pass

    def faults(self) -> list[str]:
        return []

    def report_to(self, changes: ChangeLog) -> None:
        self.changes = changes

    def check(self, fix: bool = False) -> list[Finding]:
        findings = []
        for key, record in list(self.records.items()):
            try:
                reader = DictReader(self, key, record)
                for part in range(reader.meta.parts):
                    reader.verified(part)
            except CorruptRecord as error:
                findings.append(Finding(where=key.hex(), problem=str(error), fixed=fix))
                if fix:
                    self.delete(key)
        return findings

    def close(self) -> None:
        pass

    def _touch(self, key: ChunkKey) -> None:
        self._clock += 1
        self.used[key] = self._clock
        self.records.move_to_end(key)


class Shared(DictTier):
    """A tier that other processes use."""

    name = "shared"
    shared = True

    def unanswered(self, keys: Sequence[ChunkKey]) -> bool:
        return False


class DictReader:
    def __init__(self, tier: DictTier, key: ChunkKey, record: bytearray) -> None:
        self._tier, self._record = tier, record
        self._start = header_size(bytes(record[:8]))
        self.meta = decode_header(bytes(record[: self._start]))
        if self.meta.key != key or len(record) != self._start + self.meta.offset(self.meta.parts):
            raise CorruptRecord("the record of another key, or of another size")

    def request(self, first: int, count: int) -> None:
        pass

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        try:
            for part, view in enumerate(split_parts(into, self.meta.stored[first : first + count]), first):
                view[:] = self.verified(part)
        except CorruptRecord:
            self._tier.delete(self.meta.key)
            raise

    def verified(self, part: int) -> bytes:
        start = self._start + self.meta.offset(part)
        blob = bytes(self._record[start : start + self.meta.stored[part]])
        if checksum(blob) != self.meta.checksums[part]:
            raise CorruptRecord(f"part {part}")
        return blob

    def close(self) -> None:
        pass


def tiers_of(store: Store) -> list[Tier]:
    """The tiers below memory, which tests look at and wrap."""
    return store._tiers


def state_of(store: Store) -> StoreState:
    """The state that the store's lock guards, whose steps tests take out of order."""
    return store._state


@contextmanager
def with_stray_holder(store: Store, slot: int) -> Iterator[None]:
    """Meanwhile the bookkeeping of memory has a fault: a slot has a holder that does not exist."""
    holders = state_of(store).host._holders
    holders[slot] += 1
    yield
    holders[slot] -= 1


def threads_named(name: str) -> list[threading.Thread]:
    """The running threads with a name."""
    return [thread for thread in threading.enumerate() if thread.name == name]


def ended(thread: threading.Thread) -> None:
    """Wait until a thread has ended."""
    thread.join(30)
    assert not thread.is_alive()


def lose(store: Store, *keys: ChunkKey) -> None:
    """Take chunks out of memory, and leave them in the tiers."""
    for key in keys:
        state_of(store).drop(key)


class Broken(Wrapped):
    """A tier of which every verb fails."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__(DictTier())
        self.name, self._error = "broken", error

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        raise self._error()

    def open(self, key: ChunkKey) -> RecordReader | None:
        raise self._error()

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        raise self._error()

    def delete(self, key: ChunkKey) -> bool:
        raise self._error()

    def entries(self) -> Iterator[Entry]:
        raise self._error()

    def close(self) -> None:
        raise self._error()


class Gated(Wrapped):
    """A tier whose reads of parts and writes wait until the test opens a gate: slow, but with no clock."""

    def __init__(self, inner: DictTier, parts: int = PARTS) -> None:
        super().__init__(inner)
        self.read_gates = [threading.Event() for _ in range(parts)]
        self.write_gate = threading.Event()
        self.write_gate.set()
        self.reading = threading.Event()  # a read has begun
        self.writing = threading.Event()

    def open(self, key: ChunkKey) -> RecordReader | None:
        reader = self.inner.open(key)
        return reader and _GatedReader(reader, self)

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        self.writing.set()
        assert self.write_gate.wait(60)
        return self.inner.write(meta, parts)

    def open_all(self) -> None:
        self.write_gate.set()
        for gate in self.read_gates:
            gate.set()


def open_gates(tiers: Iterable[object]) -> None:
    """Open the gates of those tiers that have some, so that nothing waits for them any more."""
    for tier in tiers:
        if isinstance(tier, Gated):
            tier.open_all()


class _GatedReader:
    def __init__(self, inner: RecordReader, tier: Gated) -> None:
        self._inner, self._tier, self.meta = inner, tier, inner.meta

    def request(self, first: int, count: int) -> None:
        self._inner.request(first, count)

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        self._tier.reading.set()
        for part in range(first, first + count):
            assert self._tier.read_gates[part].wait(60)
        self._inner.read(first, count, into)

    def close(self) -> None:
        self._inner.close()


def reading(cost: CostModel) -> Mapping[str, Rate]:
    """What has been measured of reading a byte, by tier."""
    return cost._reading


def opening(cost: CostModel) -> Mapping[str, Rate]:
    """What has been measured of opening a record, by tier."""
    return cost._opening


def computing(cost: CostModel) -> dict[int, Rate]:
    """What has been measured of computing a token, by the length of the prompt as a power of two."""
    return cost._computing


def note_load(cost: CostModel, tier: str, **spent: float) -> None:
    """A batch of loads from a tier took this: numbers of `records` and `bytes`, seconds of `opening` and `reading`."""
    cost.loaded(defaultdict(float, {(tier, what): amount for what, amount in spent.items()}))
