"""The manifest: records learned documents, so that an interrupted run can continue.

It is a SQLite database with one row per document, which is committed when the document is stored.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from lmc.databases import transaction
from lmc.documents.sources import Document
from lmc.errors import InputError
from lmc.small_files import user_cache, writing

OTHER_FILE = "use --manifest for another file"
BEGINNING = b"SQLite format 3\x00"  # of every database
VERSION = 0x6C6D6301  # "lmc" and a number; a database of another program has another one
PATIENCE_SECONDS = 10.0  # Another run may write to the same manifest.
TABLE = "CREATE TABLE IF NOT EXISTS learned (id TEXT PRIMARY KEY, digest TEXT, documents TEXT) WITHOUT ROWID"


def manifest_path(*target: str) -> Path:
    """Return the default path of the manifest of a target, such as a server, a tenant and a separator."""
    return user_cache() / "learned" / f"{sha256(repr(target).encode()).hexdigest()[:16]}.sqlite"


class Manifest:
    """The documents that have been learned into one target. Use it in a `with` statement."""

    def __init__(self, path: Path) -> None:
        """Open the manifest of earlier runs, or create one.

        Raises `InputError` if the file cannot be written, or is not a manifest.
        """
        self.path = path
        self._forgotten = set[str]()  # documents that are to be learned again
        with self._using():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab+") as file:
                file.seek(0)
                if (beginning := file.read(len(BEGINNING))) not in (b"", BEGINNING):
                    raise InputError(f"{path} is not a manifest of lmc learn; {OTHER_FILE}")
            self._database = sqlite3.connect(path, timeout=PATIENCE_SECONDS, isolation_level=None)
            try:
                # A commit survives a killed process. After a power failure, a few documents are learned again.
                self._database.execute("PRAGMA synchronous = NORMAL")
                if not beginning:
                    with transaction(self._database):
                        self._database.execute(TABLE)
                        self._database.execute(f"PRAGMA user_version = {VERSION}")
                elif self._database.execute("PRAGMA user_version").fetchone() != (VERSION,):
                    raise InputError(f"{path} is not a manifest of lmc learn; {OTHER_FILE}")
            except BaseException:
                self._database.close()
                raise

    def __enter__(self) -> "Manifest":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def has(self, document: Document) -> bool:
        """Return whether this text was learned under all of its ids."""
        rows, digest = [self._row(name) for name in (document.id, *document.also)], document.digest
        learned = all(row is not None and row[0] == digest for row in rows)
        return learned and document.id not in self._forgotten

    def ids(self, document: Document) -> list[str]:
        """Return the ids under which a text was stored; empty if it was not learned."""
        row = self._row(document.id)
        return list(json.loads(row[1])) if row is not None else []

    def forget(self, documents: Iterable[Document]) -> None:
        """Forget documents that are to be learned again. Their rows stay until the first one is learned."""
        self._forgotten.update(document.id for document in documents)

    def add(self, document: Document, ids: Sequence[str]) -> None:
        """Record a text as stored, as the documents with these ids. Raises `InputError` if this fails."""
        forgotten, digest, stored = [(name,) for name in self._forgotten], document.digest, json.dumps(list(ids))
        rows = [(name, digest, stored) for name in (document.id, *document.also)]
        with self._using(), transaction(self._database):
            self._database.executemany("DELETE FROM learned WHERE id = ?", forgotten)
            self._database.executemany("INSERT OR REPLACE INTO learned VALUES (?, ?, ?)", rows)
        self._forgotten.clear()

    def _row(self, name: str) -> tuple[str, str] | None:
        with self._using():
            found = self._database.execute("SELECT digest, documents FROM learned WHERE id = ?", (name,))
            row: tuple[str, str] | None = found.fetchone()
            return row

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Raise `InputError` with the name of the file for an error of the block, which reads or writes it."""
        try:
            with writing(f"the manifest {self.path}", OTHER_FILE):
                yield
        except sqlite3.Error as error:
            raise InputError(f"cannot use the manifest {self.path}: {error}; {OTHER_FILE}") from None
