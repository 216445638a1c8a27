"""Standard output for people and for pipes."""

import json
import sys

from rich.console import Console

UNCUT = 1 << 16  # columns


def console() -> Console:
    """Return standard output: as wide as the terminal, or wide enough for every line if it is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else UNCUT)


def print_json(found: object) -> None:
    """Print plain data for programs."""
    print(json.dumps(found, ensure_ascii=False))  # noqa: T201
