"""The Mooncake tier: one object for each record, in the memory of the hosts of a Mooncake Store.

    PREFIX/1/abcd…   a record, named by the format's version and its key; the same bytes as on a disk

An object is complete or missing. Mooncake evicts the objects that were not used for the longest time, and keeps copies
of an object on several hosts if `replica_num` says so. See https://kvcache-ai.github.io/Mooncake.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from urllib.error import URLError
from urllib.request import urlopen

from lmc.config.mooncake_url import MooncakeURL
from lmc.keys import FORMAT, ChunkKey, RecordKind
from lmc.shapes import KIB
from lmc.storage.tiers.breaker import WritePause
from lmc.storage.tiers.mooncake.client import BUFFER_BYTES, Heads, MooncakeClient
from lmc.storage.tiers.mooncake.reader import MooncakeReader
from lmc.storage.tiers.pool import CLOSING_SECONDS, PROMPTLY, SLOWEST_RATE, PoolTier
from lmc.storage.tiers.record import RecordMeta, checksums, encode_header, header_size, removed_if_corrupt
from lmc.storage.tiers.tier import Entry, Written

HEAD_BYTES = 8 * KIB  # requested of each record when it is opened, until a longer header was met
HEADS = 64  # records whose headers are requested together
LIST_SECONDS = 30.0  # deadline for the list of all objects
PAUSE_SECONDS = 5.0  # Writing pauses for this time if the store has no memory.
SAID_EVERY = 600.0  # seconds between two warnings about that


class MooncakeTier(PoolTier):
    """Records in a Mooncake Store."""

    def __init__(self, url: MooncakeURL, *, deadline: float = 0.5, prefix: str = "lmc") -> None:
        """Make the first contact.

        A store that does not respond causes a warning, and is used as soon as it responds.
        """
        super().__init__(url.place, str(url))
        self._url, self._folder, self._prompt = url, f"{prefix}/{FORMAT}", deadline * PROMPTLY
        self._ours = re.compile(re.escape(self._folder) + "/([0-9a-f]{64})")
        self._client = MooncakeClient(url, deadline)
        self._thread = threading.local()  # `heads`: the requests for heads of records that a thread opens next
        self._pause, self._head_bytes = WritePause(), HEAD_BYTES
        try:
            self._breaker.start()
        except BaseException:
            self._client.close(responds=False)
            raise

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Check keys with one request to the master."""
        if not keys or not self.usable:
            return [False] * len(keys)
        with self._reported():
            return self._client.exist([self._path(key) for key in keys], self._prompt)

    def announce(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Request the headers of these records."""
        names = [self._path(key) for key in dict.fromkeys(keys)] if self.usable else []
        heads: dict[str, Future[Heads]] = {}
        for first in range(0, len(names), HEADS):
            together = names[first : first + HEADS]
            with contextlib.suppress(OSError):  # Each record is requested again when it is opened.
                heads |= dict.fromkeys(together, self._client.heads(together, self._head_bytes))
        self._thread.heads = heads

    def open(self, key: ChunkKey) -> MooncakeReader | None:
        """Open a record. Returns None if it is missing, or if the store is not usable."""
        if not self.usable:
            return None
        try:
            with removed_if_corrupt(self.discard, key):
                return self._reader(key, self.discard)
        except FileNotFoundError:
            return None

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Store a record, if the store does not have it."""
        if not self.usable or self._pause.lasts:
            return Written.REFUSED
        name = self._path(meta.key)
        with self._reported():
            if self._client.exist([name], self._client.deadline)[0]:
                return Written.PRESENT
        header = encode_header(replace(meta, checksums=checksums(meta, parts)))
        size = len(header) + sum(map(len, parts))
        try:
            with self._reported():
                within = self._client.deadline + size / SLOWEST_RATE
                is_document = meta.kind is RecordKind.DOCUMENT
                stored = self._client.put(name, [header, *parts], within, is_document=is_document)
        except MemoryError:
            full = OSError(f"{self._title} has no memory left: give it more hosts or a larger global_segment_size")
            self._pause.begin(full, PAUSE_SECONDS, SAID_EVERY)
            return Written.REFUSED
        return Written.STORED if stored else Written.PRESENT

    def delete(self, key: ChunkKey) -> bool:
        """Delete a record. Returns false if it was missing."""
        with self._reported():
            return self._client.remove(self._path(key))

    def entries(self) -> Iterator[Entry]:
        """Return the records, as the master's HTTP server lists them. It does not tell when they were used."""
        master = f"[{self._url.master}]" if ":" in self._url.master else self._url.master
        address = f"http://{master}:{self._url.admin_port}/get_all_keys"
        try:
            with urlopen(address, timeout=LIST_SECONDS) as answer:
                names = answer.read().decode().split()
        except (URLError, TimeoutError) as error:
            raise OSError(f"{address} does not list the records ({error}): is admin_port right?") from None
        for name in sorted(names):
            if match := self._ours.fullmatch(name):
                with self._reported():
                    size = self._client.size(name)
                if size:  # Otherwise it was removed after it was listed.
                    yield Entry(key=ChunkKey(bytes.fromhex(match[1])), bytes=size, used=0.0)

    def close(self) -> None:
        """End all requests."""
        responds = self.usable
        self._breaker.close(CLOSING_SECONDS)
        self._client.close(responds=responds)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _greet(self) -> None:
        self._client.connect()

    def _path(self, key: ChunkKey) -> str:
        return f"{self._folder}/{key.hex()}"

    def _reader(self, key: ChunkKey, discard: Callable[[ChunkKey], object]) -> MooncakeReader:
        name, announced = self._path(key), getattr(self._thread, "heads", {})
        with self._reported():
            head = self._client.head(announced.pop(name, None) or self._client.heads([name], self._head_bytes), name)
            size, first = head
            if (start := header_size(first[:8], size)) > len(first):
                self._head_bytes = min(start, BUFFER_BYTES // HEADS)
                head = self._client.head(self._client.heads([name], start), name)
        return MooncakeReader(self._client, name, key, head, discard, self._reported)
