"""Small files that outlive a process: where those of a user are, how one is replaced, and how processes share one.

Records of chunks are not small files: see `move` in `lmc/storage/tiers/disk/files.py`.
"""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

LOCK_SECONDS = 10.0  # for which another process may change a file, before it is changed without the lock
LOOK_SECONDS = 0.01  # between two attempts to get a lock


def user_cache() -> Path:
    """Return lmc's directory in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmc"


def replace_text(file: Path, text: str) -> None:
    """Replace a whole file, as `replace_bytes` does, by a text in UTF-8."""
    replace_bytes(file, text.encode())


def replace_bytes(file: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a whole file, which only this user may read, so that readers see the old content or the new one.

    That holds for any number of threads and processes, also after one was killed; its unfinished file then stays beside
    the other. With `durable` it holds after a power failure too: the new content is on the disk when this returns.
    Raises `OSError`, and leaves the old file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # The name has to be unique among threads, and among processes in different containers, which may have equal pids.
    descriptor, aside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".tmp")
    try:
        with open(descriptor, "wb") as writing:
            writing.write(content)
            if durable:
                writing.flush()
                os.fsync(descriptor)
        Path(aside).replace(file)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise
    if durable:
        _sync_directory(file.parent)


@contextmanager
def sole_writer(file: Path) -> Iterator[None]:
    """Keep other threads and processes that use this function from changing a file inside the block.

    Read, change and replace the file in one such block: otherwise what another process has written meanwhile is lost.
    The lock is a file beside it. Where it cannot be had in time (some network file systems have no locks), the block
    runs without it, because a lost entry costs less than an engine that does not start. Raises `OSError` if no file can
    be made there.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file.with_name(f"{file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _locked(lock):
            log.warning("cannot lock %s within %g s; another process may overwrite the change", file, LOCK_SECONDS)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    """Lock an open file within `LOCK_SECONDS`, and return whether that was possible."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK_SECONDS)
        except OSError:
            return False


def _sync_directory(directory: Path) -> None:
    """Write the names of a directory to the disk, where the file system can do that for a directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
