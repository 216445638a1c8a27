"""Sources of documents: directories of text files, single text files, JSON and JSONL files, standard input."""

import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any

from lmc.documents.names import joined_names
from lmc.errors import InputError
from lmc.terminal import all_of, counted, some_of

STANDARD_INPUT = "-"
ENDINGS = (".txt", ".md", ".markdown", ".rst", ".html", ".htm", ".csv")  # files that are read, as they are
JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
UNREAD_FOLDER = "node_modules"  # has the README files of packages
DEFAULT_ID = "id"  # field of a JSON object with the document's id; objects without it are numbered


@dataclass(frozen=True, slots=True)
class Document:
    """A text with an id that is unique in its source. Other files of the source may have the same text."""

    id: str
    text: str
    also: tuple[str, ...] = ()  # ids of others with this text

    @property
    def name(self) -> str:
        """All ids of the text, as the name of a known document."""
        return joined_names((self.id, *self.also))

    @property
    def digest(self) -> str:
        """The SHA-256 of the text."""
        return sha256(self.text.encode()).hexdigest()

    def changed(self, text: str, ending: str) -> "Document":
        """Return a document with another text, and with `ending` at the end of each id."""
        return Document(f"{self.id}{ending}", text, tuple(f"{name}{ending}" for name in self.also))


@dataclass(slots=True)
class Corpus:
    """The documents of a source, each text once, and what could not be read."""

    documents: list[Document] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # name of a file or of an entry -> why it is not a document
    notes: list[str] = field(default_factory=list)  # files that were left out, and texts that occur again

    @property
    def warnings(self) -> list[str]:
        """All that was left out, in words."""
        faults = [f"{name}: {why}" for name, why in self.skipped.items()]
        return [*([f"skipped {some_of(faults)}"] if faults else []), *self.notes]


def read_documents(
    source: str,
    id_field: str = DEFAULT_ID,
    text_field: str = "text",
    patterns: Sequence[str] = (),
    *,
    keeps_crlf: bool = False,
) -> Corpus:
    """Return the documents of a source.

    A source is a directory, a text file, a JSON or JSONL file, or standard input (`-`). Of a directory, files with one
    of `ENDINGS` are read, or those that match one of the `patterns`. Documents of white space alone are left out.
    Line ends of text files become `\\n`, as programs in Python read them, unless `keeps_crlf`.
    Raises `InputError` if there is no document; it names the first file or entry that could not be read.
    """
    reader, path = _Reader(id_field, text_field, keeps_crlf=keeps_crlf), Path(source)
    if patterns and not os.path.isdir(source):
        raise InputError(f"--glob chooses files of a directory, and {source} is not a directory: leave --glob out")
    if source == STANDARD_INPUT:
        reader.add_entries("standard input", read_standard_input())
    elif os.path.isdir(source):
        reader.add_folder(path, patterns)
    elif os.path.exists(source):  # A file or a pipe. Unlike `Path`, this accepts a name of any length.
        ending = path.suffix.lower()
        by_ending = True if ending in ENDINGS else False if ending in JSON_ENDINGS else None
        reader.add_file(path, path.name, is_text=by_ending)
    else:
        raise InputError(
            f"{source} does not exist: use a directory of text files, a JSON or JSONL file, or - for standard input"
        )
    corpus = reader.finish()
    if not corpus.documents:
        is_input = source == STANDARD_INPUT
        unmatched = [f"no file matches --glob {' '.join(patterns)}"] if patterns and not corpus.skipped else []
        causes = [*unmatched, *corpus.warnings] or [reader.hint if is_input else f"use {', '.join(ENDINGS)} files"]
        name = "standard input" if is_input else source
        raise InputError(f"{name} has no documents with text: {'; '.join(causes)}")
    return corpus


class _Reader:
    """Reads files and JSON objects into a corpus."""

    def __init__(self, id_field: str, text_field: str, *, keeps_crlf: bool) -> None:
        self._id_field, self._text_field, self._keeps_crlf = id_field, text_field, keeps_crlf
        self._corpus = Corpus()
        self._ids: dict[str, int] = {}  # id -> the last number that was appended to it
        self._names: dict[str, dict[str, str]] = {}  # text -> the names that it was read with -> their ids
        self._copies: list[str] = []  # ids whose text has another id before
        self._unread: Counter[str] = Counter()  # kind of file -> number of files that were left out

    def finish(self) -> Corpus:
        """Return all that was read, with notes about what was left out."""
        notes = []
        if self._unread:
            kinds = ", ".join(counted(count, kind) for kind, count in sorted(self._unread.items()))
            notes.append(f"not read: {kinds}; --glob of lmc learn and lmc size chooses files")
        if self._copies:
            notes.append(f"{all_of(len(self._copies), 'repeated text')} learned once: {some_of(self._copies)}")
        self._corpus.notes = notes
        for text, names in self._names.items():
            first, *others = names.values()
            self._corpus.documents.append(Document(first, text, tuple(others)))
        return self._corpus

    def add_folder(self, folder: Path, patterns: Sequence[str]) -> None:
        """Read the files below a folder that match one of `patterns`, or by default those with one of `ENDINGS`.

        A pattern with a / is compared with the path in the folder, where ** stands for any folders; others are compared
        with names only. Hidden files and folders are not read, and links to folders are not followed. Raises
        `InputError` for an empty pattern.
        """
        if not all(patterns):
            raise InputError("--glob is empty: use a pattern such as '*.md'")
        wanted = [pattern.split("/") if "/" in pattern else ["**", pattern] for pattern in patterns]
        for path in sorted(self._files(folder)):
            name, ending = path.relative_to(folder), path.suffix.lower()
            if wanted and not any(_matches(name.parts, pattern) for pattern in wanted):
                continue
            if not wanted and ending not in ENDINGS:
                self._unread[f"{ending or 'other'} file"] += 1
            elif self._is_file(path, name):
                self.add_file(path, name, is_text=ending not in JSON_ENDINGS)

    def _files(self, folder: Path) -> Iterator[Path]:
        def skip(error: OSError) -> None:
            self._corpus.skipped[name_of(os.path.relpath(error.filename, folder))] = str(error.strerror)

        for parent, folders, files in os.walk(folder, onerror=skip):
            folders[:] = [name for name in folders if not name.startswith(".") and name != UNREAD_FOLDER]
            self._unread["linked folder"] += sum(os.path.islink(os.path.join(parent, name)) for name in folders)
            yield from (Path(parent, name) for name in files if not name.startswith("."))
        self._unread = +self._unread

    def _is_file(self, path: Path, name: PurePath) -> bool:
        """Return whether a path is a file. A broken link, or a file in a folder without permission, is skipped."""
        try:
            return stat.S_ISREG(path.stat().st_mode)
        except FileNotFoundError:
            why = "it is a broken link"
        except OSError as error:
            why = str(error.strerror)
        self._corpus.skipped[name_of(name)] = why
        return False

    def add_file(self, path: Path, name: str | PurePath, *, is_text: bool | None) -> None:
        """Read a file as one text, or as JSON objects. With None, its first character decides."""
        try:
            text = read_text(path, keeps_crlf=self._keeps_crlf)
        except InputError as error:
            self._corpus.skipped[name_of(name)] = str(error)
            return
        if is_text is None:
            is_text = not text.lstrip().startswith(("{", "["))
        if is_text:
            self._add(name_of(name), text)
        else:
            self.add_entries(name_of(name), text)

    def add_entries(self, name: str, text: str) -> None:
        """Read a JSON array of objects, one object, or one object on each line."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, list | dict):
            for number, entry in enumerate(content if isinstance(content, list) else [content], 1):
                self._add_entry(entry, f"{name}, entry {number}", f"{name}:{number}")
            return
        hint = f"; {self.hint}, or name the file of a single text with {' or '.join(ENDINGS[:2])} at the end"
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                label = f"{name}, line {number}"
                try:
                    self._add_entry(json.loads(line), label, f"{name}:{number}")
                except (ValueError, RecursionError) as error:
                    self._corpus.skipped[label] = f"it is not valid JSON: {error}{hint}"
                    hint = ""  # once is enough

    def _add_entry(self, entry: Any, label: str, number: str) -> None:
        """Add the document of a JSON object, whose id is `number` if it has none."""
        if not isinstance(entry, dict):
            self._corpus.skipped[label] = f"it is not a JSON object: {self.hint}"
            return
        title, text = _value(entry, self._id_field), _value(entry, self._text_field)
        if title is None and self._id_field == DEFAULT_ID:
            title = number
        missing = [name for name, value in (("id", title), ("text", text)) if value is None]
        if missing:
            name = self._id_field if missing[0] == "id" else self._text_field
            why = f"it has no {name!r}: use --{missing[0]} to choose from {', '.join(entry)}"
        elif not isinstance(text, str) or not _is_text(text):
            why = f"{self._text_field!r} must be a text"
        elif not isinstance(title, str | int) or not _is_text(str(title)):
            why = f"{self._id_field!r} must be a text or a whole number"
        else:
            self._add(str(title), text)
            return
        self._corpus.skipped[label] = why

    @property
    def hint(self) -> str:
        """What JSON must look like."""
        return f'use an object such as {{"{self._id_field}": "a", "{self._text_field}": "…"}} on each line'

    def _add(self, name: str, text: str) -> None:
        text = text.strip()
        if not text:
            return
        names = self._names.setdefault(text, {})
        if names:
            self._copies.append(f"{name} (as {next(iter(names.values()))})")
        if name in names:
            return
        unique, number = name, self._ids.get(name, 1)
        while unique in self._ids:  # Parts of a file often have the name of the file.
            number += 1
            unique = f"{name} ({number})"
        self._ids[name] = number
        self._ids.setdefault(unique, 1)
        names[name] = unique


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a pattern, as `Path.glob` matches them."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skipped:], pattern[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _value(entry: dict[str, Any], field: str) -> Any:
    """Return a field of a JSON object, such as `text` or `metadata.source`; None if it is missing."""
    if field in entry:
        return entry[field]
    first, dot, rest = field.partition(".")
    inner = entry.get(first)
    return _value(inner, rest) if dot and isinstance(inner, dict) else None


def name_of(name: str | PurePath) -> str:
    """Return a file's name, with backslashes for bytes that are not UTF-8, which could not be sent or printed."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _is_text(text: str) -> bool:
    """Return whether a string from JSON is free of lone surrogates, such as \\ud800."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_standard_input() -> str:
    """Return the text on standard input, without a byte order mark.

    Raises `InputError` if it is closed, or is not UTF-8.
    """
    if sys.stdin is None:
        raise InputError("standard input is closed: pipe a text into the command, or name a file")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read standard input as UTF-8 text: {error}") from None


def read_text(path: Path, *, keeps_crlf: bool = False) -> str:
    """Return the text of a file, without a byte order mark. Raises `InputError` if it cannot be read as UTF-8.

    Line ends become `\\n`, unless `keeps_crlf`.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="" if keeps_crlf else None) as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} as UTF-8 text: {getattr(error, 'strerror', None) or error}") from None
