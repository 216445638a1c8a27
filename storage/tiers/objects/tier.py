"""The object tier: one object for each record, in S3, Google Cloud Storage, Azure, or in a directory that hosts share.

    PREFIX/1/ab/abcd….safetensors   a record, named by the format's version and its key; the same bytes as on a disk

An object is written in one step, so that readers see a whole record or none. Nothing is listed on a request's path: a
lookup asks for each key that is not known to be present or absent, all at the same time. The store's owner decides how
long objects stay, by a lifecycle rule of the bucket, or `lmc clear`.

An engine makes no step during a lookup, and a bucket may answer after 30 ms. So a lookup waits `LOOKUP_SECONDS` at
most. Answers that arrive later are remembered. A request with known documents waits for them in the engine's queue.

Requests are those of `obstore` (https://developmentseed.org/obstore), which wraps the Rust crate `object_store`.
"""

import asyncio
import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cachetools import TTLCache
from obstore.store import LocalStore

from lmc.errors import TierUnusable
from lmc.keys import FORMAT, ChunkKey
from lmc.shapes import ALIGN
from lmc.storage.locks import Rank, new_lock
from lmc.storage.tiers.breaker import FAILURES, WritePause
from lmc.storage.tiers.objects.calls import MISSING, Calls, in_thread
from lmc.storage.tiers.objects.reader import ObjectReader, ObjectStream, Pace
from lmc.storage.tiers.pool import CLOSING_SECONDS, PROMPTLY, SLOWEST_RATE, PoolTier
from lmc.storage.tiers.record import (
    SUFFIX,
    RecordMeta,
    checksums,
    encode_header,
    file_of,
    is_removed,
    removed_if_corrupt,
)
from lmc.storage.tiers.tier import Entry, Finding, Written

KNOWN_KEYS = 1 << 16  # keys that are remembered as present, and as absent
PRESENT_SECONDS, ABSENT_SECONDS = 600.0, 10.0  # The answer to a lookup is remembered for this time.
LOOKUP_SECONDS = 0.01  # longest wait of a lookup for answers
AT_ONCE = 64  # requests of a lookup
STREAMS_AT_ONCE = 16  # records that a thread requests at the same time
AHEAD_BYTES = 5 << 20  # limit for what is received of each record before it is read
ALL_AHEAD_BYTES = 80 << 20  # the same, of all records that a thread reads at the same time
WHOLE_BYTES = 64 << 20  # A larger record is uploaded in several requests.
LISTED = 1000  # objects in one answer
LIST_SECONDS = 30.0  # deadline for one answer
PAUSE_SECONDS = 30.0  # Writing pauses for this time after a refusal.
SAID_EVERY = 600.0  # seconds between two warnings about refused writes
UNFINISHED = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX) + r"#\d+")  # a file that is being written to a directory
UNFINISHED_SECONDS = 3600.0  # A writer that has not finished a file by then was killed.


class _Announced(threading.local):
    """The records that a thread has announced and not opened yet."""

    def __init__(self) -> None:
        self.streams: dict[ChunkKey, Future[ObjectStream]] = {}  # the requested ones
        self.waiting: deque[ChunkKey] = deque()  # those to request when one of these is opened
        self.ahead = AHEAD_BYTES  # bytes of each that are received before they are read


class ObjectTier(PoolTier):
    """Records in an object store. It has no bound, and evicts nothing itself."""

    def __init__(
        self,
        store: Any,
        title: str,
        *,
        name: str = "objects",
        deadline: float = 0.5,
        prefix: str = "lmc",
        lookup_seconds: float = LOOKUP_SECONDS,
    ) -> None:
        """Make the first contact with a store of `obstore`.

        A store that does not respond causes a warning, and is used as soon as it responds. Raises `TierUnusable` if it
        refuses access. `title` is the store's name in messages, `name` that of the tier.
        """
        super().__init__(name, title)
        self._store, self._folder = store, f"{prefix}/{FORMAT}"
        self._ours = re.compile(re.escape(self._folder) + r"/[0-9a-f]{2}/([0-9a-f]{64})" + re.escape(SUFFIX))
        # From a directory, ranges are faster: the library streams a file in pieces of 8 KiB (0.3 instead of 2.4 GB/s).
        self._streams = not isinstance(store, LocalStore)
        self._mount = _mount_of(Path(str(store.prefix)).resolve()) if isinstance(store, LocalStore) else None
        self._calls, self._pace = Calls(title, deadline), Pace()
        self._mutex = new_lock(Rank.LEAF)
        self._present: TTLCache[ChunkKey, bool] = TTLCache(KNOWN_KEYS, PRESENT_SECONDS, time.monotonic)
        self._absent: TTLCache[ChunkKey, bool] = TTLCache(KNOWN_KEYS, ABSENT_SECONDS, time.monotonic)
        self._asked: set[ChunkKey] = set()  # keys of lookups in flight
        self._lookup_seconds = lookup_seconds
        self._announced = _Announced()
        self._pause, self._failed_writes = WritePause(), 0  # failures in a row
        try:
            self._breaker.start()
        except BaseException:
            self._calls.close()
            raise

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Check keys, by remembered answers or by one request for each key. A key without an answer is missing."""
        if not self.usable:
            return [False] * len(keys)
        with self._mutex:
            answered = (self._present, self._absent, self._asked)
            unknown = [key for key in dict.fromkeys(keys) if not any(key in known for known in answered)]
            self._asked.update(unknown)
        if unknown:
            with contextlib.suppress(TimeoutError):
                self._calls.begin(self._look_up(unknown)).result(self._lookup_seconds)
        with self._mutex:
            return [key in self._present for key in keys]

    def unanswered(self, keys: Sequence[ChunkKey]) -> bool:
        """Return whether requests for some of these keys are under way."""
        with self._mutex:
            return not self._asked.isdisjoint(keys)

    def announce(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Request the first of these records, and the others as these are opened. Earlier requests are dropped."""
        mine = self._announced
        for dropped in mine.streams.values():
            dropped.add_done_callback(_close)
        new = list(dict.fromkeys(keys)) if self.usable else []
        mine.ahead = min(AHEAD_BYTES, max(ALIGN, ALL_AHEAD_BYTES // max(1, len(new))))
        mine.streams = {key: self._begin(key) for key in new[:STREAMS_AT_ONCE]}
        mine.waiting = deque(new[STREAMS_AT_ONCE:])

    def open(self, key: ChunkKey) -> ObjectReader | None:
        """Open a record. Returns None if it is missing, or if the store is not usable."""
        if not self.usable:
            return None
        mine = self._announced
        stream = mine.streams.pop(key, None)
        if stream is None:
            stream = self._begin(key)
            with contextlib.suppress(ValueError):
                mine.waiting.remove(key)
        if mine.waiting:
            following = mine.waiting.popleft()
            mine.streams[following] = self._begin(following)
        try:
            with removed_if_corrupt(self.discard, key):
                return self._reader_of(key, self._answer(stream), self.discard)
        except FileNotFoundError:
            self._learn(key, present=False)
            return None
        except PermissionError:  # Such as an object in an archive: lookups find it, but it cannot be read.
            self._learn(key, present=False)
            raise

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Upload a record, if the store does not have it."""
        if not self.usable or self._pause.lasts:
            return Written.REFUSED
        with self._mutex:
            present, absent = meta.key in self._present, meta.key in self._absent
        # If another process has written the record since it was found missing, equal bytes replace it.
        if present or (not absent and self._answer(self._calls.begin(self._exists(meta.key)))):
            self._learn(meta.key, present=True)
            return Written.PRESENT
        # The bytes are copied, because the slot is reused after this returns, and the library may still send them then.
        blob = b"".join([encode_header(replace(meta, checksums=checksums(meta, parts))), *parts])
        try:
            self._changed(self._calls.begin(self._put(meta.key, blob)), self._calls.deadline + len(blob) / SLOWEST_RATE)
        except TimeoutError:
            raise
        except OSError as error:
            self._failed_writes += 1
            if not isinstance(error, PermissionError) and self._failed_writes < FAILURES:
                raise
            self._failed_writes = 0
            self._pause.begin(error, PAUSE_SECONDS, SAID_EVERY)
            return Written.REFUSED
        self._failed_writes = 0
        self._learn(meta.key, present=True)
        return Written.STORED

    def delete(self, key: ChunkKey) -> bool:
        """Delete a record. Returns false if it was missing.

        Raises `OSError` if the store does not respond. A directory does not while its file system is not mounted.
        """
        if not self.usable:
            raise OSError(f"{self._title} does not respond: a record was not deleted")
        there = bool(self._answer(self._calls.begin(self._exists(key))))
        if there:
            with contextlib.suppress(FileNotFoundError):
                self._changed(self._calls.begin(self._store.delete_async(self._path(key))))
        else:
            self._changed(self._calls.begin(self._check_mount()))
        self._learn(key, present=False)
        return there

    def entries(self) -> Iterator[Entry]:
        """Return the records, first written first: an object store does not know when an object was last read.

        Raises `OSError` for a server whose listing begins anew instead of ending.
        """
        found, stream = list[Entry](), self._store.list(f"{self._folder}/", chunk_size=LISTED).__aiter__()
        beginnings = set[str]()  # the first object of each page
        while page := self._answer(self._calls.begin(_next_page(stream)), LIST_SECONDS):
            if page[0]["path"] in beginnings:
                raise OSError(f"{self._title} lists the same objects again")
            beginnings.add(page[0]["path"])
            for one in page:
                if match := self._ours.fullmatch(one["path"]):
                    key = ChunkKey(bytes.fromhex(match[1]))
                    found.append(Entry(key=key, bytes=one["size"], used=one["last_modified"].timestamp()))
        return iter(sorted(found, key=lambda entry: entry.used))

    def check(self, fix: bool = False) -> list[Finding]:
        """Read and verify every record, and find what killed writers have left in a directory. See `PoolTier.check`."""
        findings = super().check(fix)
        if isinstance(self._store, LocalStore):
            for path in _unfinished(Path(str(self._store.prefix)) / self._folder):
                fixed = fix and is_removed(partial(path.unlink, missing_ok=True))
                findings.append(Finding(where=str(path), problem="record that was never finished", fixed=fixed))
        return findings

    def close(self) -> None:
        """End all requests."""
        self._breaker.close(CLOSING_SECONDS)
        self._calls.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _greet(self) -> None:
        """Check that the store lets lmc read and list. Raises `OSError` without an answer."""
        with contextlib.suppress(FileNotFoundError):
            self._calls.call(self._store.head_async(f"{self._folder}/00/none"))
        page = _next_page(self._store.list(f"{self._folder}/00/none", chunk_size=1).__aiter__())
        try:
            self._calls.call(page)
        except OSError as error:
            if "404 Not Found" in str(error):  # A listing of a bucket that exists is empty instead.
                raise TierUnusable(f"{self._title} does not exist") from None
            raise

    def _path(self, key: ChunkKey) -> str:
        return f"{self._folder}/{file_of(key)}"

    def _begin(self, key: ChunkKey) -> "Future[ObjectStream]":
        # From a directory, the stream has the header only.
        ahead = self._announced.ahead if self._streams else ALIGN
        return self._calls.begin(ObjectStream.of(self._store, self._path(key), ahead, self._pace))

    def _reader(self, key: ChunkKey, discard: Callable[[ChunkKey], object]) -> ObjectReader:
        return self._reader_of(key, self._answer(self._begin(key)), discard)

    def _reader_of(self, key: ChunkKey, stream: ObjectStream, discard: Callable[[ChunkKey], object]) -> ObjectReader:
        path = self._path(key)
        try:
            return ObjectReader(
                self._store, path, key, stream, self._calls, discard, self._reported, streams=self._streams
            )
        except BaseException:
            stream.close()
            raise

    def _answer(self, future: "Future[Any]", within: float = 0.0) -> Any:
        """Return the answer to a call; see `Calls.answer`."""
        with self._reported():
            return self._calls.answer(future, within)

    def _changed(self, future: "Future[Any]", within: float = 0.0) -> None:
        """Wait for the end of a call that changes something.

        Only a timeout is reported to the breaker: a store may refuse changes, or be full, and still serve its records.
        Raises `PermissionError` for a refusal.
        """
        try:
            self._calls.answer(future, within)
        except TimeoutError as error:
            self._breaker.failed(error)
            raise
        except TierUnusable as error:
            raise PermissionError(str(error)) from None

    def _learn(self, key: ChunkKey, *, present: bool) -> None:
        """Remember whether a record is present."""
        with self._mutex:
            (self._absent if present else self._present).pop(key, None)
            (self._present if present else self._absent)[key] = True

    async def _put(self, key: ChunkKey, blob: bytes) -> None:
        """Upload a record. Without the check, the file system of a mount point would get it."""
        await self._check_mount()
        await self._store.put_async(self._path(key), blob, use_multipart=len(blob) > WHOLE_BYTES)

    async def _check_mount(self) -> None:
        """Raise `TierUnusable` while a directory's file system is not mounted."""
        mount = self._mount
        if mount is not None and not await in_thread(lambda: os.path.ismount(mount)):
            raise TierUnusable(f"{self._title}: {mount} is not mounted")

    async def _look_up(self, keys: Sequence[ChunkKey]) -> None:
        """Learn which records are present. A store that answers some requests in time responds."""
        turn, seconds, answers = asyncio.Semaphore(AT_ONCE), self._calls.deadline * PROMPTLY, list[bool]()

        async def ask(key: ChunkKey) -> None:
            try:
                async with turn:
                    if not self.usable:
                        return
                    with self._calls.translated(seconds):
                        present = await asyncio.wait_for(self._exists(key), seconds)
                self._learn(key, present=present)
                answers.append(present)
            except (OSError, TierUnusable) as error:
                if not answers:
                    with contextlib.suppress(OSError), self._reported():
                        raise error
            finally:
                with self._mutex:
                    self._asked.discard(key)

        await asyncio.gather(*map(ask, keys))
        if answers:
            self._breaker.worked()

    async def _exists(self, key: ChunkKey) -> bool:
        """Return whether a record's object exists."""
        try:
            await self._store.head_async(self._path(key))
        except MISSING:
            return False
        return True


def _mount_of(folder: Path) -> Path | None:
    """Return the mount point of a folder's file system. None if it is the root, which is always mounted."""
    return next((path for path in (folder, *folder.parents[:-1]) if os.path.ismount(path)), None)


def _unfinished(folder: Path) -> Iterator[Path]:
    """Yield old files that the library has not renamed to the names of records, because their writers were killed."""
    for path in folder.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            if UNFINISHED.fullmatch(path.name) and path.stat().st_mtime < time.time() - UNFINISHED_SECONDS:
                yield path


def _close(stream: "Future[ObjectStream]") -> None:
    if not stream.cancelled() and stream.exception() is None:
        stream.result().close()


async def _next_page(stream: Any) -> Sequence[Any]:
    """Return the next objects of a listing; none at its end."""
    try:
        page: Sequence[Any] = await stream.__anext__()
    except StopAsyncIteration:
        page = ()
    return page
