"""Read a record from Redis: ranges of its parts are requested early, received straight into the slab, and verified."""

import errno
from collections.abc import Callable, Sequence
from typing import TypeAlias

from lmc.errors import CorruptRecord
from lmc.keys import ChunkKey
from lmc.storage.tiers.record import RecordMeta, compare, is_removed, removed_if_corrupt, split_parts
from lmc.storage.tiers.redis.connections import Server
from lmc.storage.tiers.redis.layout import Cursor, overlaps, value_names, value_sizes
from lmc.storage.tiers.redis.resp import Connection, Fetch, ReplyError, WrongValue, command

WRONGTYPE = "WRONGTYPE"  # the code of a refusal that concerns only one key

Remove: TypeAlias = Callable[[ChunkKey], object]


def refused(error: ReplyError) -> CorruptRecord | ReplyError:
    """Translate a refused read into the error to raise."""
    return CorruptRecord("something else under the name of a record") if error.code == WRONGTYPE else error


class RedisReader:
    """An open record."""

    def __init__(self, discard: Remove, delete: Remove, server: Server, meta: RecordMeta, header: bytes) -> None:
        """Create a reader. `discard` removes a corrupt record, and `delete` the rest of a record that is incomplete."""
        self.meta = meta
        self._discard, self._delete, self._server = discard, delete, server
        self._sizes = value_sizes(meta.offset(meta.parts))
        self._names = value_names(header, len(self._sizes))
        self._requested: dict[tuple[int, int], tuple[Connection, list[Fetch]]] = {}

    def request(self, first: int, count: int) -> None:
        """Request these parts from the server, to be read later."""
        with self._server.connection() as connection:
            self._requested[first, count] = connection, self._request(connection, first, count)

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts, and verify each part. A corrupt or missing part deletes the record."""
        try:
            with removed_if_corrupt(self._discard, self.meta.key):
                self.verified(first, count, into)
        except FileNotFoundError:
            is_removed(self._delete, self.meta.key)  # the rest of the record
            raise

    def verified(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts. Raises `CorruptRecord` or, for a missing part, `FileNotFoundError`."""
        cursor = Cursor(split_parts(into, self.meta.stored[first : first + count]))
        try:
            with self._server.connection() as connection:
                requested, fetches = self._requested.pop((first, count), (None, []))
                if requested is not connection or any(fetch.dropped for fetch in fetches):
                    fetches = self._request(connection, first, count)
                for fetch in fetches:
                    connection.fetch(fetch, lambda size=fetch.length: cursor.receive(connection, size))  # type: ignore[misc]
        except WrongValue as error:
            if error.args == (0,):  # Redis has evicted the value, or the whole record was removed meanwhile.
                raise FileNotFoundError(errno.ENOENT, "a value is gone", self._names[0].decode()) from None
            raise CorruptRecord(f"a value has {error} bytes, which is not its length") from None
        except ReplyError as error:
            raise refused(error) from None
        compare(cursor.checksums(), self.meta.checksums[first : first + count], first)

    def close(self) -> None:
        """Drop the requested parts that were not read."""
        for connection, fetches in self._requested.values():
            connection.drop(fetches)
        self._requested.clear()

    def _request(self, connection: Connection, first: int, count: int) -> list[Fetch]:
        start, stop = self.meta.offset(first), self.meta.offset(first + count)
        fetches = []
        for number, begin, length in overlaps(self._sizes, start, stop):
            name = self._names[number]
            whole = length == self._sizes[number]
            words = ("GET", name) if whole else ("GETRANGE", name, begin, begin + length - 1)
            fetches.append(Fetch(command(*words), length))
        connection.request(fetches)
        return fetches
