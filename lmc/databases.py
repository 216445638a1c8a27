"""What all SQLite databases of lmc have in common."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# SQLite's codes for a database that is busy, locked or read-only, and for a lack of memory, of space or of permissions.
PASSING = frozenset({5, 6, 7, 8, 10, 13, 14})


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether a database will not be usable later either: it is damaged, or has other tables or another version.

    Otherwise it may be whole: it is locked, for example, or the disk is full.
    """
    return getattr(error, "sqlite_errorcode", 0) & 0xFF not in PASSING


def create_private(path: Path) -> None:
    """Create the empty file of a database if there is none, for this user alone.

    SQLite would create a file that everybody can read. Raises `OSError`.
    """
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit the changes of the block together at its end, or none of them if it raises an error.

    The connection needs `isolation_level=None`. Raises `sqlite3.Error`.
    """
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise
