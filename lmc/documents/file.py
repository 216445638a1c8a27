"""The file of the pins, time limits and names of documents, in the directory of a disk tier.

Each line is a JSON object about one document. A later line about a document updates the earlier ones.
"""

import json
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmc.documents.known import KnownDocument, pack_tokens
from lmc.keys import ChunkKey
from lmc.small_files import replace_text

FILE = "documents.jsonl"
KEY = 32  # bytes of a chunk's key
OF_LAYOUT = re.compile(r"documents-[\d.]+x\d+-\d+-\d+\.jsonl")  # what `file_of_layout` returns


def file_of_layout(name: str) -> str:
    """Return the name of the file for a chunk layout. A cache server has one file per chunk layout."""
    return f"documents-{name}.jsonl"


def line_about(document: KnownDocument, *, whole: bool = False) -> str:
    """Return the line about a document. The first line about it is `whole`: it also has tokens, keys and tenant."""
    entry = {"id": document.id, "pinned": document.pinned, "expires": document.expires, "name": document.name}
    if whole:
        entry["namespace"] = document.namespace.hex()
        entry |= {"tokens": pack_tokens(document.tokens), "model": document.model, "tenant": document.tenant}
        entry |= {"keys": b"".join(document.keys).hex()}
    return json.dumps(entry) + "\n"


def parsed(line: str) -> dict[str, Any] | None:
    """Return the object of a line; None for an incomplete line, as a killed process leaves it."""
    with suppress(ValueError):
        entry = json.loads(line)
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            return entry
    return None


def append(path: Path, lines: Sequence[str]) -> None:
    """Append lines to the file and sync it to disk. After an `OSError`, the file may end with half a line."""
    with open(path, "a", encoding="utf-8", opener=_private) as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())  # A pin must survive a power failure; pins rarely change.


def replace(path: Path, lines: Sequence[str]) -> None:
    """Replace the whole file. An `OSError` leaves the old file in place."""
    replace_text(path, "".join(lines))


def keep_lines(path: Path, ids: Collection[str]) -> None:
    """Remove the lines about other documents than these. An `OSError` leaves the old file in place."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    replace(path, [f"{line}\n" for line in lines if (entry := parsed(line)) is not None and entry["id"] in ids])


def forget_noted(directory: Path, ids: Collection[str], namespace: str | None = None) -> None:
    """Remove documents from the files in the directory of a disk tier that no engine uses.

    Removes the documents with these `ids`, and those whose namespace begins with the hex digits `namespace`. An empty
    `namespace` stands for all.
    """
    for path in _files(directory):
        entries = _entries(path)
        removed = set(ids)
        if namespace is not None:
            removed |= {entry["id"] for entry in entries if str(entry.get("namespace", "")).startswith(namespace)}
        kept = {entry["id"] for entry in entries} - removed
        keep_lines(path, kept)
        if not kept:
            path.unlink()


def pinned_keys(directory: Path) -> set[ChunkKey]:
    """Return the chunks of the documents that one of the files in a disk tier's directory pins."""
    found = set[ChunkKey]()
    for path in _files(directory):
        pinned, keys = dict[str, bool](), dict[str, list[ChunkKey]]()
        for entry in _entries(path):
            with suppress(ValueError, TypeError):  # lmc did not write this line.
                keys.setdefault(entry["id"], keys_of(entry["id"])).extend(keys_of(entry.get("keys", "")))
                pinned[entry["id"]] = entry.get("pinned") is True
        found.update(*(keys[document] for document, is_pinned in pinned.items() if is_pinned))
    return found


def keys_of(digits: str) -> list[ChunkKey]:
    """Return the chunks of a document from the hex digits in its line. Raises `ValueError` for other text."""
    joined = bytes.fromhex(digits)
    return [ChunkKey(joined[at : at + KEY]) for at in range(0, len(joined), KEY)]


def _files(directory: Path) -> list[Path]:
    files = directory.glob("documents*.jsonl")
    return [path for path in files if path.name == FILE or OF_LAYOUT.fullmatch(path.name)]


def _entries(path: Path) -> list[dict[str, Any]]:
    return list(filter(None, map(parsed, path.read_text(encoding="utf-8", errors="replace").splitlines())))


def _private(name: str, flags: int) -> int:
    """Open a file that only its owner may read, because it has the tokens of tenants' documents."""
    return os.open(name, flags, 0o600)
