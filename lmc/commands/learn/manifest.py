"""The manifest: records learned documents, so that an interrupted run can continue.

It is a file with one JSON line per document. The line is written when the document is stored.
"""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import TextIO

from lmc.documents.sources import Document
from lmc.errors import InputError
from lmc.small_files import user_cache, writing

OTHER_FILE = "use --manifest for another file"
LINE_START = '{"id": '


def manifest_path(*target: str) -> Path:
    """Return the default path of the manifest of a target, such as a server, a tenant and a separator."""
    return user_cache() / "learned" / f"{sha256(repr(target).encode()).hexdigest()[:16]}.jsonl"


class Manifest:
    """The documents that have been learned into one target. Use it in a `with` statement."""

    def __init__(self, path: Path) -> None:
        """Read the documents of earlier runs.

        Raises `InputError` if the file cannot be written, or has lines that are not those of a manifest.
        """
        self.path = path
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
            self._learned = dict(filter(None, map(self._entry, text.split("\n"))))
            self._file: TextIO = path.open("a", encoding="utf-8")
            self._outdated = False  # The file has lines about documents that are to be learned again.
            if text and not text.endswith("\n"):
                self._file.write("\n")

    def __enter__(self) -> "Manifest":
        return self

    def __exit__(self, *_: object) -> None:
        with self._writing():
            self._file.close()

    def has(self, document: Document) -> bool:
        """Return whether this text was learned under this id."""
        return self._learned.get(document.id, ("", []))[0] == document.digest

    def ids(self, document: Document) -> list[str]:
        """Return the document ids of a learned text; empty if an earlier version of lmc did not record them."""
        return self._learned[document.id][1]

    def forget(self, documents: Sequence[Document]) -> None:
        """Forget documents that are to be learned again. Their lines leave the file when the first one is learned."""
        for document in documents:
            self._outdated |= self._learned.pop(document.id, None) is not None

    def add(self, document: Document, ids: Sequence[str]) -> None:
        """Record a text as stored, as the documents with these ids. Raises `InputError` if this fails."""
        self._learned[document.id] = document.digest, list(ids)
        with self._writing():
            if self._outdated:
                self._file.truncate(0)
                self._outdated = False
                self._file.writelines(map(self._line, self._learned))
            else:
                self._file.write(self._line(document.id))
            self._file.flush()

    def _line(self, name: str) -> str:
        digest, ids = self._learned[name]
        return json.dumps({"id": name, "digest": digest, "documents": ids}) + "\n"

    def _entry(self, line: str) -> tuple[str, tuple[str, list[str]]] | None:
        """Return the id of a line, with the digest and the document ids; None for the part that a killed run has left.

        Raises `InputError` for a line of another file.
        """
        try:
            entry = json.loads(line)
            return str(entry["id"]), (entry["digest"], entry.get("documents", []))
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, ValueError) and LINE_START.startswith(line[: len(LINE_START)]):
                return None
            raise InputError(f"{self.path} is not a manifest of lmc learn; {OTHER_FILE}") from None

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"the manifest {self.path}", OTHER_FILE)
