"""What a cache server has for itself while it lives: its socket, the directory of its memory, and a lock for each.

A server that has answered nobody, because its start was refused, removes what was not there before it.
"""

import logging
import os
import socket
import stat
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from lmc.errors import TierUnusable
from lmc.server.client.connection import lock_of
from lmc.storage.memory.memory_files import is_in_memory, locked

log = logging.getLogger(__name__)

LOCK_SECONDS = 1.0  # for which a server waits for the lock beside its socket


class OwnFiles:
    """The socket at a path, and a directory for memory, which nobody else has until `close`."""

    def __init__(self, path: Path, group: int | None, memory: Path | None) -> None:
        """Listen for processes of this user and of a `group`; raise `TierUnusable` if that is not possible.

        Locks are removed while they are held, and count only for the file that is at their path (`locked`).
        """
        self.used = False  # Whether locks and directories stay for the next server.
        with ExitStack() as opened:
            lock, new = _locked_socket(path)
            opened.callback(os.close, lock)
            opened.callback(self._remove, new)
            self.listener = _listener(path, group, lock)
            opened.callback(path.unlink, missing_ok=True)  # Nobody else has it while the lock is held.
            opened.callback(self.listener.close)
            if memory:
                new = _missing(memory / "lock")
                opened.callback(self._remove, _missing(memory, *memory.parents))
                opened.callback(os.close, _owned(memory))
                opened.callback(self._remove, new)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Let others have them."""
        self._opened.close()

    def _remove(self, new: list[Path]) -> None:
        if not self.used:
            with suppress(OSError):  # Somebody else has put something into a directory.
                for path in new:
                    path.rmdir() if path.is_dir() else path.unlink()


def _missing(*paths: Path) -> list[Path]:
    return [path for path in paths if not path.exists()]


def _owned(memory: Path) -> int:
    """Take a directory for memory; raise `TierUnusable` if it cannot be used, or another server has it.

    Whoever owns the directory can put other files in it, and everybody may make one in /dev/shm.
    """
    try:
        memory.mkdir(mode=0o711, parents=True, exist_ok=True)
        if (owner := memory.stat().st_uid) not in (0, os.getuid()):
            raise TierUnusable(f"{memory} belongs to user {owner}, who could change what is in memory: remove it first")
        if not is_in_memory(memory):
            log.warning("%s is on a disk, to which all of the memory will be written: choose one on tmpfs", memory)
        return locked(memory / "lock", alone=True)
    except BlockingIOError:
        there = f"another cache server has the memory in {memory}"
        raise TierUnusable(f"{there} (--takeover with its --socket takes it over)") from None
    except OSError as error:
        raise TierUnusable(f"cannot keep memory in {memory}: {error.strerror}") from error


def _locked_socket(path: Path) -> tuple[int, list[Path]]:
    """Take the name of a socket for the life of a server; raise `TierUnusable` if another server has it.

    Returns the lock, and its file if that is new.

    The lock tells a server that lives from one that has died and left its socket, also while the two start and end.
    Clients wait for it, and have it for a moment when a server has ended.
    """
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            new = _missing(lock_of(path))
            return locked(lock_of(path), alone=True), new
        except BlockingIOError:
            if time.monotonic() > until:
                raise TierUnusable(f"a cache server listens at {path} already (--takeover ends it)") from None
            time.sleep(0.01)
        except FileNotFoundError as error:
            raise TierUnusable(f"cannot listen at {path}: make the directory {path.parent} first") from error
        except OSError as error:
            raise TierUnusable(f"cannot listen at {path}: {error.strerror or error}") from error


def _listener(path: Path, group: int | None, lock: int) -> socket.socket:
    """Listen at a path, in the place of a server that has died; raise `TierUnusable` if that is not possible.

    Clients of the `group` may wait for the lock, too.
    """
    try:
        if group is not None:
            os.fchown(lock, -1, group)
            os.fchmod(lock, 0o640)
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
        with ExitStack() as opened:
            listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            before = os.umask(0o177 if group is None else 0o117)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            opened.callback(path.unlink)
            if group is not None:
                os.chown(path, -1, group)
            listener.listen()
            opened.pop_all()
    except OSError as error:
        raise TierUnusable(f"cannot listen at {path}: {error.strerror or error}") from error
    return listener
