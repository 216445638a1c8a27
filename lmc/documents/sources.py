"""Sources of documents: directories of text files, single text files, JSONL files, standard input."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from lmc.errors import InputError

STANDARD_INPUT = "-"
ENDINGS = (".txt", ".md")


@dataclass(frozen=True, slots=True)
class Document:
    """A text with an id that is unique in its source."""

    id: str
    text: str

    @property
    def digest(self) -> str:
        """The SHA-256 of the text."""
        return sha256(self.text.encode()).hexdigest()


def read_documents(source: str, id_field: str = "id", text_field: str = "text") -> list[Document]:
    """Return the documents of a source.

    A source is a directory (all `.txt` and `.md` files below it), one such file, a JSONL file, or standard input (`-`).
    Documents of white space alone are left out. Raises `InputError`, which names the file or the line, and its fault.
    """
    path = Path(source)
    is_file = os.path.isfile(source)  # unlike `Path`, accepts a name of any length
    if source == STANDARD_INPUT:
        source_documents = _from_lines(read_standard_input(), "standard input", id_field, text_field)
    elif os.path.isdir(source):
        source_documents = _from_files(path)
    elif is_file and path.suffix in ENDINGS:
        source_documents = iter([_from_file(path, path.name)])
    elif is_file:
        source_documents = _from_lines(read_text(path), source, id_field, text_field)
    else:
        raise InputError(
            f"{source} does not exist: use a directory of text files, a JSONL file, or - for standard input"
        )
    documents: dict[str, Document] = {}
    for document in source_documents:
        if document.id in documents:
            raise InputError(f"{source} has two documents with the id {document.id!r}: use unique ids")
        documents[document.id] = document
    documents = {name: document for name, document in documents.items() if document.text}
    if not documents:
        raise InputError(f"{source} has no documents with text: use a directory with .txt or .md files")
    return list(documents.values())


def _from_files(folder: Path) -> Iterator[Document]:
    for path in sorted(path for path in folder.rglob("*") if path.suffix in ENDINGS and path.is_file()):
        yield _from_file(path, path.relative_to(folder))


def _from_file(path: Path, name: str | Path) -> Document:
    """Read a document from a file.

    Bytes of its name that are not UTF-8 are written with backslashes, because they could not be sent or printed.
    """
    return Document(os.fsencode(name).decode(errors="backslashreplace"), read_text(path).strip())


def _from_lines(text: str, source: str, id_field: str, text_field: str) -> Iterator[Document]:
    hint = f'use an object such as {{"{id_field}": "a", "{text_field}": "…"}} on each line'
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        line_name = f"{source}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            text_files = f"name the file of a single text with {' or '.join(ENDINGS)} at the end"
            raise InputError(f"{line_name} is not valid JSON: {error}; {hint}, or {text_files}") from None
        if not isinstance(entry, dict):
            raise InputError(f"{line_name} is not a JSON object: {hint}")
        for field in (id_field, text_field):
            if field not in entry:
                raise InputError(
                    f"{line_name} has no field {field!r}: use --id and --text to choose from {', '.join(entry)}"
                )
        if not isinstance(entry[text_field], str) or not _is_text(entry[text_field]):
            raise InputError(f"{line_name}: {text_field!r} must be a text")
        if not isinstance(entry[id_field], str | int) or not _is_text(str(entry[id_field])):
            raise InputError(f"{line_name}: {id_field!r} must be a text or a whole number")
        yield Document(str(entry[id_field]), entry[text_field].strip())


def _is_text(text: str) -> bool:
    """Return whether a string from JSON is free of lone surrogates, such as \\ud800."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_standard_input() -> str:
    """Return the text on standard input. Raises `InputError` if it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read standard input as UTF-8 text: {error}") from None


def read_text(path: Path) -> str:
    """Return the text of a file. Raises `InputError` if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} as UTF-8 text: {getattr(error, 'strerror', None) or error}") from None
