"""Small files that outlive a process: the user's directory, atomic replacement, and sharing among processes.

Records of chunks are written differently: see `move` in `lmc/storage/tiers/disk/files.py`.
"""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmc.errors import InputError

log = logging.getLogger(__name__)

LOCK_SECONDS = 10.0  # wait for a file's lock, before the file is changed without the lock
LOOK_SECONDS = 0.01  # between two attempts to get a lock


def user_cache() -> Path:
    """Return lmc's directory in the user's cache directory. Raises `InputError` if the user has no home directory."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "lmc"
    try:
        return Path.home() / ".cache" / "lmc"
    except RuntimeError:  # A container may run as a user that it does not know, without HOME.
        raise InputError("the home directory is unknown: set HOME or XDG_CACHE_HOME") from None


def replace_text(file: Path, text: str) -> None:
    """Replace a whole file by a text in UTF-8, as `replace_bytes` does."""
    replace_bytes(file, text.encode())


def replace_bytes(file: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a whole file atomically: readers see either the old content or the new content.

    This holds for any number of threads and processes, even if a writer is killed. The killed writer's unfinished
    file stays in the same directory. With `durable`, this also holds after a power failure: the new content is on the
    disk when the function returns. Only this user may read the file. Raises `OSError`, and then keeps the old file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # The temporary name must be unique among threads, and among processes of different containers with equal pids.
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
def writing(file: str, hint: str) -> Iterator[None]:
    """Raise `InputError` with the name of a `file`, and a `hint`, for an `OSError` of the block, which writes it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}; {hint}") from None


def check_writable(file: Path, hint: str) -> None:
    """Raise `InputError` with a `hint` if a file cannot be written, before minutes of work. Leaves no empty file."""
    with writing(str(file), hint):
        file.parent.mkdir(parents=True, exist_ok=True)
        existed = file.exists()
        file.open("a").close()
        if not existed:
            file.unlink()


@contextmanager
def sole_writer(file: Path) -> Iterator[None]:
    """Lock a file inside the block against other threads and processes that use this function.

    Read, change and replace the file in one block: otherwise changes of another process in the meantime are lost.
    The lock is a separate file next to it. After `LOCK_SECONDS` without the lock, the block runs without it, because
    a lost entry costs less than an engine that does not start. Some network file systems have no locks.
    Raises `OSError` if the lock file cannot be created.
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
    """Lock an open file within `LOCK_SECONDS`, and return whether this succeeded."""
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
    """Write a directory's entries to the disk, if the file system supports this."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
