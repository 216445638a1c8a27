"""Reading a record from Redis: ranges of its parts, requested early, received straight into the slab and verified."""

import errno
from collections.abc import Callable, Sequence

from lmc.errors import CorruptRecord
from lmc.keys import ChunkKey
from lmc.storage.record import RecordMeta, compare, removed_if_corrupt, split_parts
from lmc.storage.redis.connections import Server
from lmc.storage.redis.layout import Cursor, Names, overlaps, value_sizes
from lmc.storage.redis.resp import Connection, Fetch, ReplyError, WrongValue, command

WRONGTYPE = "WRONGTYPE"  # a refusal that concerns one key alone


def refused(server: Server, error: ReplyError) -> CorruptRecord | OSError:
    """Translate a refusal to read."""
    if error.code == WRONGTYPE:
        return CorruptRecord("something else under the name of a record")
    return OSError(f"{server.name}: {error}")


class RedisReader:
    """An open record."""

    def __init__(
        self,
        discard: Callable[[ChunkKey], None],
        delete: Callable[[ChunkKey], object],
        server: Server,
        meta: RecordMeta,
        header: bytes,
    ) -> None:
        """`discard` removes a record that turns out to be corrupt, `delete` what is left of one that is gone."""
        self.meta = meta
        self._discard, self._delete, self._server = discard, delete, server
        self._names = Names.of(header, value_sizes(meta.offset(meta.parts)))
        self._requested: list[tuple[Connection, int, int, list[Fetch]]] = []

    def request(self, first: int, count: int) -> None:
        """Have these parts sent."""
        with self._server.connection() as connection:
            self._request(connection, first, count)

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts and verify each; a corrupt or missing one deletes the record."""
        try:
            with removed_if_corrupt(self._discard, self.meta.key):
                self.verified(first, count, into)
        except FileNotFoundError:
            self._delete(self.meta.key)  # what is left of it
            raise

    def verified(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts; raise `CorruptRecord` or, for a missing part, `FileNotFoundError`."""
        cursor = Cursor(split_parts(into, self.meta.stored[first : first + count]))
        try:
            with self._server.connection() as connection:
                for fetch in self._fetches(connection, first, count):
                    connection.fetch(fetch, lambda size=fetch.length: cursor.receive(connection, size))  # type: ignore[misc]
        except WrongValue as error:
            if error.args == (0,):  # Redis has evicted it, or the whole record was removed meanwhile.
                raise FileNotFoundError(errno.ENOENT, "a value is gone", self._names.header.decode()) from None
            raise CorruptRecord(f"a value has {error} bytes, which is not its length") from None
        except ReplyError as error:
            raise refused(self._server, error) from None
        compare(cursor.checksums(), self.meta.checksums[first : first + count], first)

    def close(self) -> None:
        """Give up what was requested."""
        for connection, _, _, fetches in self._requested:
            connection.drop(fetches)
        self._requested.clear()

    def _request(self, connection: Connection, first: int, count: int) -> list[Fetch]:
        start, stop = self.meta.offset(first), self.meta.offset(first + count)
        fetches = []
        for number, begin, length in overlaps(self._names.sizes, start, stop):
            name = self._names.final[number]
            whole = length == self._names.sizes[number]
            words = ("GET", name) if whole else ("GETRANGE", name, begin, begin + length - 1)
            fetches.append(Fetch(command(*words), length))
        connection.request(fetches)
        self._requested.append((connection, first, count, fetches))
        return fetches

    def _fetches(self, connection: Connection, first: int, count: int) -> list[Fetch]:
        """Return the fetches that were requested on this connection and are still good, or else new ones."""
        for requested in list(self._requested):
            old, *wanted, fetches = requested
            if wanted == [first, count] or old is not connection:
                self._requested.remove(requested)
            if wanted == [first, count] and old is connection and not any(fetch.dropped for fetch in fetches):
                return fetches
        fetches = self._request(connection, first, count)
        self._requested.pop()
        return fetches
