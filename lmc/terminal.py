"""Standard output for terminals and for pipes."""

import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import Annotated

import typer
from rich.console import Console

from lmc.errors import InputError
from lmc.keys import MAX_TTL_SECONDS, UNIT_SECONDS

AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]

MAX_NAMES = 10  # names that `some_of` shows
# The characters that a terminal obeys, and those that reverse the direction of writing.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
PIPE_COLUMNS = 1 << 16  # width of a file or pipe, so that lines are not wrapped


def escape_in_output() -> None:
    """Make standard output and error escape what their encoding lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # None if the parent process has closed it
            stream.reconfigure(errors="backslashreplace")


def console(*, error: bool = False) -> Console:
    """Return a console on standard output or standard error.

    It is as wide as the terminal. In a file or a pipe, lines are not wrapped.
    """
    stream = sys.stderr if error else sys.stdout
    return Console(width=None if stream is not None and stream.isatty() else PIPE_COLUMNS, stderr=error)


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as `90`, `90s`, `30m`, `12h` or `7d`; raise `InputError` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    seconds = float(match[1]) * UNIT_SECONDS[match[2] or "s"] if match else 0.0
    if not 0 < seconds < MAX_TTL_SECONDS:
        hint = "use a number of seconds, or a number with s, m, h or d, such as 7d, below 100 years"
        raise InputError(f"invalid time {text!r}: {hint}")
    return seconds


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, whose plural must be regular."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def some_of(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of the others."""
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def printable(text: str) -> str:
    """Return a text with its control characters escaped, except line ends and tabs, so that a terminal shows them."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def all_of(count: int, noun: str) -> str:
    """Return a count with its noun and "was" or "were"."""
    return f"{counted(count, noun)} {'was' if count == 1 else 'were'}"


def time_text(seconds: float) -> str:
    """Return a time, in seconds since 1970, as readable text in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def to_minute(seconds: float) -> str:
    """Return a time for a table whose column says UTC, up to its minute."""
    return time_text(seconds)[: len("2026-01-01 00:00")]


def print_json(content: object) -> None:
    """Print plain data as JSON for programs."""
    is_unicode = str(getattr(sys.stdout, "encoding", None)).lower().startswith("utf")
    print(json.dumps(content, ensure_ascii=not is_unicode))  # noqa: T201
