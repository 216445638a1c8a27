"""The file in which pins, time limits and names of documents are noted, in the directory of a disk tier.

Each line is an object of JSON about one document. A later line about a document adds to the earlier ones.
"""

import json
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmc.documents.known import KnownDocument, pack_tokens
from lmc.small_files import replace_text

FILE = "documents.jsonl"
OF_GEOMETRY = re.compile(r"documents-[\d.]+x\d+-\d+-\d+\.jsonl")  # what `file_of_geometry` returns


def file_of_geometry(name: str) -> str:
    """Return the name of the file of a geometry. A cache server has one for each."""
    return f"documents-{name}.jsonl"


def line_about(document: KnownDocument, *, whole: bool = False) -> str:
    """Return what is noted of a document; its tokens stand in the first line about it only."""
    noted = {"id": document.id, "pinned": document.pinned, "expires": document.expires, "name": document.name}
    if whole:
        noted["namespace"] = document.namespace.hex()
        noted |= {"tokens": pack_tokens(document.tokens), "model": document.model, "tenant": document.tenant}
        noted |= {"keys": b"".join(document.keys).hex()}
    return json.dumps(noted) + "\n"


def parsed(line: str) -> dict[str, Any] | None:
    """Return what a line notes; None for half a line, which a process that was killed leaves."""
    with suppress(ValueError):
        noted = json.loads(line)
        if isinstance(noted, dict) and isinstance(noted.get("id"), str):
            return noted
    return None


def append(path: Path, lines: Sequence[str]) -> None:
    """Add lines to the file on the disk; raise `OSError`, after which the file may end with half of one."""
    with open(path, "a", encoding="utf-8", opener=_private) as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())  # A pin has to survive a power failure; pins change seldom.


def replace(path: Path, lines: Sequence[str]) -> None:
    """Write the file as a whole; raise `OSError`, and leave the old one."""
    replace_text(path, "".join(lines))


def forget_noted(directory: Path, ids: Collection[str], namespace: str | None = None) -> None:
    """Remove what is noted about documents in the directory of a disk tier that no engine uses: those with these ids,
    and those of each namespace that begins with some digits, or with none.
    """
    found = [one for one in directory.glob("documents*.jsonl") if one.name == FILE or OF_GEOMETRY.fullmatch(one.name)]
    for path in found:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        noted = list(filter(None, map(parsed, lines)))
        gone = set(ids)
        if namespace is not None:
            gone |= {one["id"] for one in noted if str(one.get("namespace", "")).startswith(namespace)}
        kept = [json.dumps(one) + "\n" for one in noted if one["id"] not in gone]
        replace(path, kept)
        if not kept:
            path.unlink()


def _private(name: str, how: int) -> int:
    """Open a file that nobody else on this machine may read: it has what tenants have stored."""
    return os.open(name, how, 0o600)
