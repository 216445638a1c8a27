"""Reading a record from Redis: ranges of its parts, asked for early, received straight into the slab and verified."""

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmc.errors import CorruptRecord
from lmc.storage.record import RecordMeta, compare, split_parts
from lmc.storage.servers import Server
from lmc.storage.values import Cursor, Names, overlaps, value_sizes
from lmc.storage.wire import Fetch, ReplyError, Wire, WrongValue, command

if TYPE_CHECKING:
    from lmc.storage.redis import RedisTier


WRONGTYPE = "WRONGTYPE"  # a refusal that is about the one key alone


def refused(server: Server, error: ReplyError) -> CorruptRecord | OSError:
    """What a refusal to read means."""
    if error.code == WRONGTYPE:
        return CorruptRecord("something else under the name of a record")
    return OSError(f"{server.name}: {error}")


class RedisReader:
    """An open record."""

    def __init__(self, tier: "RedisTier", server: Server, meta: RecordMeta, header: bytes) -> None:
        self.meta = meta
        self._tier, self._server = tier, server
        self._names = Names.of(header, value_sizes(meta.offset(meta.parts)))
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
            raise refused(self._server, error) from None
        compare(cursor.checksums(), self.meta.checksums[first : first + count], first)

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
