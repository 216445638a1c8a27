"""The manifest: records learned documents, so that an interrupted run can continue.

It is a file with one JSON line per document. The line is written when the document is stored.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TextIO

from lmc.documents.sources import Document
from lmc.errors import InputError
from lmc.small_files import user_cache


def manifest_path(*target: str) -> Path:
    """Return the default path of the manifest of a target, such as a server, a tenant and a separator."""
    return user_cache() / "learned" / f"{sha256(repr(target).encode()).hexdigest()[:16]}.jsonl"


class Manifest:
    """The documents that have been learned into one target. Use it in a `with` statement."""

    def __init__(self, path: Path, *, again: bool = False) -> None:
        """Read the documents of earlier runs, or ignore them if all documents are learned `again`.

        Raises `InputError` if the file cannot be written.
        """
        self.path = path
        self._learned: dict[str, tuple[str, list[str]]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            ends_in_a_line = True
            if path.exists() and not again:
                text = path.read_text(encoding="utf-8", errors="replace")
                ends_in_a_line = not text or text.endswith("\n")
                for line in text.splitlines():
                    with suppress(ValueError, TypeError, KeyError):  # A killed process may leave half a line.
                        entry = json.loads(line)
                        self._learned[entry["id"]] = entry["digest"], entry.get("documents", [])
            self._file: TextIO = path.open("a", encoding="utf-8")
            self._outdated = again  # The first new line replaces the earlier lines.
            if not ends_in_a_line:
                self._file.write("\n")
        except OSError as error:
            raise InputError(
                f"cannot write the manifest {path}: {error.strerror}; use --manifest for another file"
            ) from None

    def __enter__(self) -> "Manifest":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def has(self, document: Document) -> bool:
        """Return whether this text was learned under this id."""
        return self._learned.get(document.id, ("", []))[0] == document.digest

    def ids(self, document: Document) -> list[str]:
        """Return the document ids of a learned text; empty if an earlier version of lmc did not record them."""
        return self._learned[document.id][1]

    def add(self, document: Document, ids: Sequence[str]) -> None:
        """Record a text as stored, as the documents with these ids."""
        if self._outdated:
            self._file.truncate(0)
            self._outdated = False
        self._learned[document.id] = document.digest, list(ids)
        self._file.write(json.dumps({"id": document.id, "digest": document.digest, "documents": list(ids)}) + "\n")
        self._file.flush()
