"""What all SQLite databases of lmc have in common."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
