"""The database of kept documents: those with a pin, a time limit, or names that they got after they were learned.

It is in the directory of a disk tier, apart from the tier's index, which is rebuilt from the records when it is
lost: pins cannot be. A row has the tokens of its document, so that one that is in no tier can be computed again, and
they and its names are encrypted if its tenant has a secret key. A pin or a time limit is on the disk when a call
returns, and what is removed is overwritten.
"""

import json
import logging
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmc.databases import create_private, is_damage, transaction
from lmc.documents.known import KnownDocument, pack_tokens, unpack_tokens
from lmc.errors import CorruptRecord, InputError
from lmc.keys import ChunkKey
from lmc.storage.secret_keys import SecretKeys

log = logging.getLogger(__name__)

FILE = "documents.sqlite"
KEY = 32  # bytes of a chunk's key
VERSION = 1  # version of the table
PATIENCE_SECONDS = 1.0  # A command that reads the database may hold its lock for a moment. The keeper tries again.
TABLE = """
CREATE TABLE IF NOT EXISTS kept (
    layout TEXT, id TEXT, namespace BLOB, model TEXT, tenant TEXT, keys BLOB, pinned INT, expires REAL, text BLOB,
    encrypted INT, PRIMARY KEY (layout, id)
)
"""
REMOVE = "DELETE FROM kept WHERE layout = ? AND id = ?"
INSERT = "INSERT INTO kept VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (layout, id) DO"
ADD = f"{INSERT} NOTHING"
PUT = f"""
{INSERT} UPDATE SET
    pinned = excluded.pinned, expires = excluded.expires, text = excluded.text, encrypted = excluded.encrypted
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDocument:
    """A row: a document as an earlier process has kept it."""

    id: str
    namespace: bytes
    model: str
    tenant: str
    keys: Sequence[ChunkKey]
    pinned: bool
    expires: float  # seconds since 1970; 0 without a time limit
    name: str
    tokens: Sequence[int]


class KeptDocuments:
    """The rows of one chunk layout. A cache server has several layouts in one database."""

    def __init__(self, directory: Path, layout: str = "", keys: SecretKeys | None = None) -> None:
        """Use the database of a directory. It is created by the first change."""
        self.path = directory / FILE
        self._layout, self._keys = layout, keys or SecretKeys()

    def read(self) -> Iterator[KeptDocument]:
        """Yield the documents, in the order in which they were kept first, without those whose secret key is missing.

        Raises `OSError` or `sqlite3.Error`.
        """
        self._import_lines()
        if not _has_rows(self.path):
            return
        with _opened(self.path) as database:
            rows = database.execute(
                "SELECT id, namespace, model, tenant, keys, pinned, expires, text, encrypted FROM kept "
                "WHERE layout = ? ORDER BY rowid",
                (self._layout,),
            )
            for identity, namespace, model, tenant, keys, pinned, expires, text, encrypted in rows:
                with suppress(ValueError, KeyError, TypeError, CorruptRecord):  # lmc did not write this row.
                    opened = self._keys.open(text, identity.encode()) if encrypted else (text, None)
                    if opened is None:
                        continue
                    entry = json.loads(opened[0])
                    yield KeptDocument(
                        id=identity, namespace=bytes(namespace), model=str(model), tenant=str(tenant),
                        keys=_parted(keys), pinned=bool(pinned), expires=float(expires), name=str(entry["name"]),
                        tokens=unpack_tokens(entry["tokens"]),
                    )  # fmt: skip

    def write(self, documents: Iterable[KnownDocument]) -> None:
        """Write the rows of documents, and remove those for which nothing is to be kept, in one step.

        Raises `OSError` or `sqlite3.Error`, and then changes nothing.
        """
        documents = list(documents)
        rows = [self._row(document) for document in documents if document.kept or document.renamed]
        gone = [(self._layout, document.id) for document in documents if not (document.kept or document.renamed)]
        if not rows and not self.path.exists():
            return
        with _opened(self.path, change=True) as database:
            database.executemany(REMOVE, gone)
            database.executemany(PUT, rows)

    def remove(self, ids: Sequence[str]) -> None:
        """Remove the rows of documents. Raises `OSError` or `sqlite3.Error`, and then changes nothing."""
        if ids:
            with _opened(self.path, change=True) as database:
                database.executemany(REMOVE, [(self._layout, one) for one in ids])

    def set_aside(self, error: Exception) -> Path | None:
        """Rename a database that is damaged, as the error says, so that a new one can be made. Returns its new path."""
        if not isinstance(error, sqlite3.Error) or not is_damage(error):
            return None
        aside = self.path.with_name(f"{self.path.name}.damaged")
        with suppress(OSError):
            self.path.replace(aside)
            return aside
        return None

    def _import_lines(self) -> None:
        """Import the file that versions before the database had, and remove it. Rows that exist are newer.

        Each line is a JSON object about a document, and updates earlier lines about it.
        """
        path = self.path.with_name(f"documents-{self._layout}.jsonl" if self._layout else "documents.jsonl")
        if not path.exists():
            return
        entries, rows = dict[str, dict[str, Any]](), list[tuple[object, ...]]()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):  # A killed process has left half a line.
                entry = json.loads(line)
                entries.setdefault(entry["id"], {}).update(entry)
        for entry in entries.values():
            with suppress(ValueError, KeyError, TypeError):  # The line that has the tokens is missing.
                document = KeptDocument(
                    id=entry["id"], namespace=bytes.fromhex(entry["namespace"]), model=str(entry["model"]),
                    tenant=str(entry["tenant"]), keys=_parted(bytes.fromhex(entry["keys"])),
                    pinned=entry["pinned"] is True, expires=float(entry["expires"]), name=str(entry["name"]),
                    tokens=unpack_tokens(entry["tokens"]),
                )  # fmt: skip
                if document.pinned or document.expires:
                    rows.append(self._row(document))
        with _opened(self.path, change=True) as database:
            count = database.executemany(ADD, rows).rowcount if rows else 0
        path.unlink()
        log.info("imported the pins, time limits and names of %d documents from %s", count, path)

    def _row(self, document: KnownDocument | KeptDocument) -> tuple[object, ...]:
        text = json.dumps({"name": document.name, "tokens": pack_tokens(document.tokens)}).encode()
        if (secret := self._keys.newest(document.tenant)) is not None:
            text = secret.derive(document.id.encode()).seal(text)
        return (
            self._layout, document.id, document.namespace, document.model, document.tenant, b"".join(document.keys),
            document.pinned, document.expires, text, secret is not None,
        )  # fmt: skip


def forget_kept(directory: Path, ids: Collection[str], namespace: str | None = None) -> None:
    """Remove documents from the database in the directory of a disk tier that no engine uses.

    Removes the documents with these `ids`, and those whose namespace begins with the hex digits `namespace`, in upper
    or lower case. An empty `namespace` stands for all. Raises `InputError`, and then removes nothing.
    """
    path = directory / FILE
    if not _has_rows(path):
        return
    with _named_errors(path), _opened(path, change=True) as database:
        database.executemany("DELETE FROM kept WHERE id = ?", [(one,) for one in ids])
        if namespace is not None:
            database.execute("DELETE FROM kept WHERE lower(hex(namespace)) GLOB ?", (f"{namespace.lower()}*",))
        (left,) = database.execute("SELECT count(*) FROM kept").fetchone()
    if not left:
        path.unlink(missing_ok=True)


def pinned_keys(directory: Path) -> set[ChunkKey]:
    """Return the chunks of the documents that are pinned in a disk tier's directory. Raises `InputError`."""
    path, found = directory / FILE, set[ChunkKey]()
    if _has_rows(path):
        with _named_errors(path), _opened(path) as database:
            for (keys,) in database.execute("SELECT keys FROM kept WHERE pinned"):
                found.update(_parted(keys))
    return found


@contextmanager
def _opened(path: Path, *, change: bool = False) -> Iterator[sqlite3.Connection]:
    """Open the database. With `change`, it is created if needed, and the block's changes are committed at its end."""
    if change:
        create_private(path)  # It has tokens of tenants' documents.
    with closing(sqlite3.connect(path, timeout=PATIENCE_SECONDS, isolation_level=None)) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"it has version {version} instead of {VERSION}")
        if not change:
            yield database
            return
        database.executescript("PRAGMA auto_vacuum = FULL; PRAGMA secure_delete = ON; PRAGMA synchronous = EXTRA")
        with transaction(database):
            database.execute(TABLE)
            database.execute(f"PRAGMA user_version = {VERSION}")
            yield database


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Raise `InputError` with the path of the database for an error of the block."""
    try:
        yield
    except sqlite3.Error as error:
        raise InputError(f"cannot use the pins in {path} ({error}): remove the file to give them up") from None


def _has_rows(path: Path) -> bool:
    """Return whether the database exists, and is more than the file that `_opened` creates."""
    return path.exists() and path.stat().st_size > 0


def _parted(keys: bytes) -> list[ChunkKey]:
    return [ChunkKey(keys[at : at + KEY]) for at in range(0, len(keys), KEY)]
