"""Lifelines: lock files that show a cache server whether processes of its clients are still alive.

Each client has a lifeline. The client and all its processes that map the slab hold a shared lock on it. The system
releases the lock when the last of them ends, even by a kill. A later server finds the lifelines of its predecessor's
clients.
"""

import fcntl
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from lmc.storage.memory.memory_files import locked
from lmc.storage.tiers.tier_guard import TierGuard

LOCK_RETRY_SECONDS = 1.0

complain = TierGuard().complain  # logs each kind of problem at most once a minute


class Lifelines:
    """The lifelines in a directory."""

    def __init__(self, folder: Path, group: int | None = None) -> None:
        """Remove lifelines of ended clients. Processes of a `group` may also lock new lifelines."""
        self._folder, self._group = folder, group
        self.older = [path for path in folder.iterdir() if not _removed(path)] if folder.exists() else []

    def new(self) -> Path:
        """Create a lifeline for a client and return its path.

        Its name is random, because process numbers repeat: in a container, every server is process 1.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # not earlier: the start of a server may fail
        if self._group is not None:
            os.chown(self._folder, -1, self._group)
            self._folder.chmod(0o750)
        path = self._folder / secrets.token_hex(16)
        path.touch(mode=0o600)
        if self._group is not None:
            os.chown(path, -1, self._group)
            path.chmod(0o640)
        return path


def wait_until_gone(path: Path, opened: int | None = None) -> None:
    """Wait until no process holds the lock of a lifeline, and remove the lifeline.

    Only the lock shows that it is safe to continue. Therefore errors, such as too many open files, are retried. If the
    file was removed, as by a program that cleans up, `opened` is used, which is its descriptor.
    """
    while True:
        try:
            with suppress(FileNotFoundError), path.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                path.unlink(missing_ok=True)
            if opened is not None:
                fcntl.flock(opened, fcntl.LOCK_EX)
            return
        except OSError as error:
            complain("lifelines", f"cannot check whether a client has ended ({error}): its slots stay unused")
            time.sleep(LOCK_RETRY_SECONDS)


def _removed(path: Path) -> bool:
    """Remove a lifeline unless a process has locked it; return whether it was removed."""
    try:
        os.close(locked(path, alone=True))
    except BlockingIOError:
        return False
    path.unlink()
    return True
