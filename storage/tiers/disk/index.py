"""The index of a disk tier: what its records are, in a SQLite database, so that a start need not read the records.

    records    key, size, time of the last use, kind: small rows, read at each start in the order of use
    headers    the fields of `RecordMeta`, except checksums: read when an engine looks for what is stored. With a rowid,
               because a table without one has rows of more than a kilobyte in pages of their own.

Records come first: a row follows its file, at most `COMMIT_SECONDS` later, and changes are committed together. A killed
process may therefore leave files without a row, and rows without a file. It also leaves the index marked as incomplete,
and then `DiskTier` compares it with the directory.

The database is in WAL mode, in which commits survive a killed process, but the last ones are lost in a power failure.
The mark itself is synced to the disk. See https://sqlite.org/wal.html.
"""

import errno
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lmc.databases import create_private, is_damage, transaction
from lmc.keys import ChunkKey, RecordKind
from lmc.storage.locks import Rank, new_lock
from lmc.storage.tiers.record import RecordMeta

log = logging.getLogger(__name__)

FILE = "index.sqlite"
VERSION = 1  # version of the tables; a database of another version is rebuilt
COMMIT_SECONDS = 0.5  # Changes are committed together after this time.
OLDEST, LATEST = -(1 << 63), (1 << 63) - 1  # the smallest and the greatest time that SQLite stores
PAGE_ROWS = 1000  # rows that are read at once
RETRY_SECONDS = 10.0  # after a commit that failed
MAX_WAITING = 1 << 18  # changes that wait for a commit, about 50 MB; beyond it, the index is given up and rebuilt
PATIENCE_SECONDS = 5.0  # A command that reads the index may hold its lock for a moment.
IN_MEMORY = ":memory:"
ROW_BYTES = 214  # size of a record's rows, besides its label
KINDS = {kind.value: kind for kind in RecordKind}
TABLES = """
CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, bytes INT, used INT, kind TEXT) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON records (used, bytes, kind);
CREATE TABLE IF NOT EXISTS headers (
    key BLOB PRIMARY KEY, namespace BLOB, tokens INT, first INT, parts INT, part_bytes INT, codec TEXT, label TEXT,
    model TEXT, tenant TEXT
);
CREATE TABLE IF NOT EXISTS state (complete INT);
INSERT INTO state SELECT 0 WHERE NOT EXISTS (SELECT * FROM state);
"""


def index_bytes(label: int) -> int:
    """Return about how many bytes the index takes for a record with a label of `label` bytes."""
    return (ROW_BYTES + label) * 5 // 4  # SQLite fills four fifths of a page.


class IndexLost(OSError):
    """The database is damaged or cannot be read. `clears` is the index's `clears` when the reading began."""

    def __init__(self, error: Exception, path: Path, clears: int) -> None:
        super().__init__(errno.EIO, f"the index cannot be read ({error})", str(path))
        self.clears = clears


class _Row(NamedTuple):
    """A record that the database does not have yet."""

    meta: RecordMeta
    bytes: int
    used: int  # in nanoseconds since 1970


class DiskIndex:
    """The rows of a directory's records. Any thread may call any method.

    If the database cannot be used, for example on a full disk, the index is kept in memory and ends with the process.
    """

    def __init__(self, root: Path) -> None:
        """Open or create the index of a directory, and mark it as incomplete until `close`."""
        self._path, self._mutex, self._work = root / FILE, new_lock(Rank.LEAF), threading.Lock()
        self._rows: dict[ChunkKey, _Row | None] = {}  # changes to commit; None for a record that was removed
        self._uses: dict[ChunkKey, int] = {}  # times of last uses to commit
        self._changed, self._ended = threading.Event(), threading.Event()
        self._failed = self._closed = False
        self._damaged = False  # The file is not right, and is removed by `close`.
        self._lacks_changes = False  # Changes were dropped, so it must not be read.
        self.clears = 0  # number of calls of `clear`
        try:
            self._database = self._open(str(self._path))
            # Whether the index has all records of the directory. A process that is killed leaves it incomplete.
            self.complete = bool(self._database.execute("SELECT complete FROM state").fetchone()[0])
            self._mark(complete=False)
        except (sqlite3.Error, TypeError) as error:
            if isinstance(error, TypeError) or is_damage(error):  # A type error: it has no row of its state.
                log.warning("the index %s cannot be used (%s) and is rebuilt", self._path, error)
                self._database, self.complete = self._open_anew(), False
            else:
                log.warning("the index %s cannot be used now (%s): all records are read", self._path, error)
                self._database, self.complete = self._open(IN_MEMORY), False
                self._damaged = True  # It will lack what happens from now on.
        self._thread = threading.Thread(target=self._commit_regularly, name="lmc-disk-index", daemon=True)
        self._thread.start()

    def records(self) -> Iterator[tuple[ChunkKey, int, RecordKind]]:
        """Yield the key, the size in bytes and the kind of all records, least recently used first.

        A record that is used meanwhile may be yielded again.
        """
        for _, size, kind, key in self._by_use("SELECT used, bytes, kind, key FROM records", (OLDEST, 0, "", b"")):
            yield key, size, KINDS.get(kind, RecordKind.PAGES)

    def headers(self, keys: Mapping[ChunkKey, ChunkKey]) -> Iterator[tuple[RecordMeta, float]]:
        """Yield the headers of all records without sizes and checksums of parts.

        Documents come first, and of each kind the most recently used one. With a header comes the time of the last use,
        in seconds since 1970. One that is used meanwhile may be yielded again. Headers have the key objects of `keys`,
        as far as it has equal ones, so that a caller who keeps both needs the memory once.
        """
        query = (
            "SELECT used, bytes, kind, key, namespace, tokens, first, parts, part_bytes, codec, label, model, tenant "
            "FROM records CROSS JOIN headers USING (key)"
        )
        began, newest = time.time_ns(), (LATEST, 0, "", b"")
        document = RecordKind.DOCUMENT.value
        documents = self._by_use(query, newest, f"AND kind = '{document}'", down=True)
        others = self._by_use(query, newest, f"AND kind != '{document}'", down=True)
        used_meanwhile = self._by_use(query, (began, 0, "", b""))  # They may have moved past the rows that are read.
        for row in chain(documents, others, used_meanwhile):
            used, _, kind, key, namespace, tokens, first, parts, part_bytes, codec, label, model, tenant = row
            meta = RecordMeta(
                key=keys.get(key, ChunkKey(key)), kind=KINDS.get(kind, RecordKind.PAGES), namespace=namespace,
                tokens=tokens, first=first, parts=parts, part_bytes=part_bytes, codec=codec, label=label, model=model,
                tenant=tenant,
            )  # fmt: skip
            yield meta, used / 1e9

    def uses(self) -> dict[ChunkKey, float]:
        """Return the time of the last use of each record, in seconds since 1970."""
        return {ChunkKey(key): used / 1e9 for key, used in self._fetch(self.clears, "SELECT key, used FROM records")}

    def beginning_with(self, first: int) -> set[ChunkKey]:
        """Return the keys of the records whose first byte is `first`."""
        low, high = bytes([first]), bytes([first, *[255] * 32])
        query = "SELECT key FROM records WHERE key BETWEEN ? AND ?"
        return {ChunkKey(key) for (key,) in self._fetch(self.clears, query, low, high)}

    def put(self, meta: RecordMeta, size: int, used: int) -> None:
        """Add a record of `size` bytes, last `used` at this time in nanoseconds since 1970."""
        with self._mutex:
            self._rows[meta.key] = _Row(meta, size, used)
            self._uses.pop(meta.key, None)
        self._changed.set()

    def remove(self, key: ChunkKey) -> None:
        """Remove a record. An unknown key is ignored."""
        with self._mutex:
            self._rows[key] = None
            self._uses.pop(key, None)
        self._changed.set()

    def use(self, key: ChunkKey, used: int) -> None:
        """Record the time of a record's last use, in nanoseconds since 1970."""
        with self._mutex:
            self._uses[key] = used
        self._changed.set()

    def flush(self) -> bool:
        """Commit all changes now. Returns false if that fails; they are committed later."""
        with self._work:
            with self._mutex:
                rows, self._rows = self._rows, {}
                uses, self._uses = self._uses, {}
            if not rows and not uses:
                return not self._lacks_changes
            try:
                self._commit(rows, uses)
            except sqlite3.Error as error:
                with self._mutex:
                    self._rows, self._uses = rows | self._rows, uses | self._uses
                    if len(self._rows) + len(self._uses) > MAX_WAITING:
                        self._rows, self._uses, self._lacks_changes = {}, {}, True
                self._damaged = self._damaged or self._lacks_changes or is_damage(error)
                if not self._failed:
                    log.warning("the index %s cannot be written (%s); records are still found", self._path, error)
                self._failed = True
                return False
            except (ValueError, OverflowError):  # SQLite does not take a value, such as a number of more than 64 bits.
                self._commit_one_by_one(rows, uses)
            self._failed = False
            return not self._lacks_changes

    def clear(self) -> None:
        """Begin with an empty database, because this one cannot be read. A closed index stays as it is."""
        with self._work, self._mutex:
            if self._closed:  # Another process may have opened the directory.
                return
            self._rows, self._uses = {}, {}
            self.clears += 1
            self.complete = self._failed = self._damaged = self._lacks_changes = False
            with suppress(sqlite3.Error):
                self._database.close()
            self._database = self._open_anew()

    def close(self, *, complete: bool = True) -> None:
        """Commit all changes, and mark the index as `complete`, so that the next start trusts it."""
        self._ended.set()
        self._changed.set()
        self._thread.join()
        if self.flush() and complete:
            with suppress(sqlite3.Error):  # The next start compares the index with the directory.
                self._mark(complete=True)
        with self._work:
            self._closed = True
            with suppress(sqlite3.Error):
                self._database.close()
            if self._damaged:
                with suppress(OSError):
                    self._remove()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open(self, path: str) -> sqlite3.Connection:
        """Open a database, and create its tables. Raises `sqlite3.Error` for one of another version."""
        if path != IN_MEMORY:
            with suppress(OSError):
                create_private(Path(path))
        database = sqlite3.connect(path, timeout=PATIENCE_SECONDS, check_same_thread=False, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"it has version {version} instead of {VERSION}")
            database.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT")
        except BaseException:
            database.close()
            raise
        return database

    def _open_anew(self) -> sqlite3.Connection:
        """Remove the database, and create an empty one; in memory if that fails, too."""
        try:
            self._remove()
            return self._open(str(self._path))
        except (sqlite3.Error, OSError) as error:
            log.warning("the index %s cannot be created (%s): the next start reads all records", self._path, error)
            return self._open(IN_MEMORY)

    def _remove(self) -> None:
        for path in self._path.parent.glob(f"{FILE}*"):
            path.unlink(missing_ok=True)

    def _mark(self, *, complete: bool) -> None:
        with self._work:
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute("UPDATE state SET complete = ?", (complete,))
            self._database.execute("PRAGMA synchronous = NORMAL")

    def _by_use(
        self, query: str, start: tuple[Any, ...], condition: str = "", *, down: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query after `start` in the order of `by_use`, whose columns come first, up or down.

        A `condition` leaves out other rows.

        Each page is a query of its own: an open one keeps SQLite from emptying its write-ahead log, which then grows
        for as long as a caller takes to read all rows.
        """
        clears, after, order = self.clears, "<" if down else ">", "DESC" if down else "ASC"
        query += f" WHERE (used, bytes, kind, key) {after} (?, ?, ?, ?) {condition}"
        query += f" ORDER BY used {order}, bytes {order}, kind {order}, key {order} LIMIT {PAGE_ROWS}"
        while rows := self._fetch(clears, query, *start):
            yield from rows
            start = rows[-1][:4]

    def _fetch(self, clears: int, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query, after all changes so far.

        Raises `IndexLost` if the database cannot be read, or has been replaced since `self.clears` was `clears`.
        """
        self.flush()
        with self._work:
            try:
                if clears != self.clears:
                    raise sqlite3.DatabaseError("it was rebuilt meanwhile")
                if self._lacks_changes:
                    raise sqlite3.DatabaseError("it could not be written for long")
                return self._database.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise IndexLost(error, self._path, clears) from error

    def _commit(self, rows: Mapping[ChunkKey, _Row | None], uses: Mapping[ChunkKey, int]) -> None:
        gone = [(key,) for key, row in rows.items() if row is None]
        new = [row for row in rows.values() if row is not None]
        database = self._database
        with transaction(database):
            for table in ("records", "headers"):
                database.executemany(f"DELETE FROM {table} WHERE key = ?", gone)
            database.executemany(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)",
                [(row.meta.key, row.bytes, row.used, row.meta.kind.value) for row in new],
            )
            database.executemany(
                "INSERT OR REPLACE INTO headers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [_header(row.meta) for row in new],
            )
            database.executemany(
                "UPDATE records SET used = ? WHERE key = ?", [(used, key) for key, used in uses.items()]
            )

    def _commit_one_by_one(self, rows: Mapping[ChunkKey, _Row | None], uses: Mapping[ChunkKey, int]) -> None:
        """Commit each row by itself. A row that SQLite does not take is left out; its record is found while this runs.

        Raises nothing: a row that cannot be committed now is compared with the directory at the next start.
        """
        for key, row in rows.items():
            try:
                self._commit({key: row}, {})
            except (sqlite3.Error, ValueError, OverflowError) as error:
                log.warning("the index %s cannot take the record %s: %s", self._path, key.hex(), error)
        with suppress(sqlite3.Error, ValueError, OverflowError):
            self._commit({}, uses)

    def _commit_regularly(self) -> None:
        while not self._ended.is_set():  # A close sets this before it wakes the thread.
            self._changed.wait()
            if self._ended.wait(COMMIT_SECONDS):
                return
            self._changed.clear()
            if not self.flush():
                self._changed.set()
                if self._ended.wait(RETRY_SECONDS):
                    return


def read_uses(root: Path) -> dict[ChunkKey, float]:
    """Return the times of last uses from the index of a directory that another process may own.

    Returns nothing if the directory has no index, or if it cannot be read.
    """
    path = root / FILE
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=PATIENCE_SECONDS)
        ) as database:
            return {ChunkKey(key): used / 1e9 for key, used in database.execute("SELECT key, used FROM records")}
    except sqlite3.Error:
        return {}


def _text(text: str) -> str:
    """Return a text without what UTF-8 cannot encode, such as parts of file names in other encodings."""
    return text.encode(errors="replace").decode()


def _header(meta: RecordMeta) -> tuple[object, ...]:
    return (
        meta.key, meta.namespace, meta.tokens, meta.first, meta.parts, meta.part_bytes, meta.codec, _text(meta.label),
        _text(meta.model), meta.tenant,
    )  # fmt: skip
