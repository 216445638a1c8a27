"""Standard output for people and for pipes."""

import json
import sys
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]

UNCUT = 1 << 16  # columns


def console() -> Console:
    """Return standard output: as wide as the terminal, or wide enough for every line if it is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else UNCUT)


def time_text(seconds: float) -> str:
    """Return a time, in seconds since 1970, as people read it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def print_json(found: object) -> None:
    """Print plain data for programs."""
    print(json.dumps(found, ensure_ascii=False))  # noqa: T201
