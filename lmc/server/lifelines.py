"""Lifelines: files that show a cache server which processes of its clients still live.

Each client has one. The client and all its processes that map the slab lock it, together, and the system unlocks it
when the last of them has ended, however it ends. A server that comes later finds those of its predecessor's clients.
"""

import fcntl
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from lmc.storage.memory.memory_files import locked
from lmc.storage.tiers.tier_guard import TierGuard

RETRY_SECONDS = 1.0

complain = TierGuard().complain  # at most once a minute about the same


class Lifelines:
    """The lifelines in a directory."""

    def __init__(self, folder: Path, group: int | None = None) -> None:
        """Those of clients that have ended are removed. Processes of a `group` may lock new ones, too."""
        self._folder, self._group = folder, group
        self.older = [path for path in folder.iterdir() if not _removed(path)] if folder.exists() else []

    def new(self) -> Path:
        """Make one for a client, with a name that no other one has had: in a container, every server is process 1."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # Not before: a server may be refused at its start.
        if self._group is not None:
            os.chown(self._folder, -1, self._group)
            self._folder.chmod(0o750)
        path = self._folder / secrets.token_hex(16)
        path.touch(mode=0o600)
        if self._group is not None:
            os.chown(path, -1, self._group)
            path.chmod(0o640)
        return path


def wait_until_gone(path: Path) -> None:
    """Return when no process has locked a lifeline any more, and remove it.

    Nothing else says that it is safe to go on, so an error, such as too many open files, is waited out.
    """
    while True:
        try:
            with suppress(FileNotFoundError), path.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                path.unlink(missing_ok=True)
            return
        except OSError as error:
            unseen = f"cannot see whether a client has ended ({error})"
            complain("lifelines", f"{unseen}: its slots stay unused until that works")
            time.sleep(RETRY_SECONDS)


def _removed(path: Path) -> bool:
    """Remove a lifeline that nobody has locked; return whether that was so."""
    try:
        os.close(locked(path, alone=True))
    except BlockingIOError:
        return False
    path.unlink()
    return True
