"""Small files that outlive a process: where those of a user are, and how one is replaced."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return lmc's directory in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmc"


def replace_text(file: Path, text: str) -> None:
    """Write a whole file so that other processes see the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(text)
    aside.replace(file)
