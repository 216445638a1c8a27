"""The files that a cache server owns while it runs: its socket, the directory of its memory, and a lock for each.

A server whose start fails removes the files and directories that it has created.
"""

import logging
import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from lmc.errors import TierUnusable
from lmc.http.server import remove_stale_socket
from lmc.server.client.connection import lock_of
from lmc.storage.memory.memory_files import is_in_memory, locked

log = logging.getLogger(__name__)

SOCKET_LOCK_SECONDS = 1.0  # timeout for the lock next to a server's socket


class OwnFiles:
    """The socket at a path and a directory for memory, which this server owns exclusively until `close`."""

    def __init__(self, path: Path, group: int | None, memory: Path | None) -> None:
        """Listen for processes of this user and of a `group`; raise `TierUnusable` if this fails.

        Lock files are removed while their locks are held. A lock is valid only for the file at its path (`locked`).
        """
        self.used = False  # whether lock files and directories stay for the next server
        with ExitStack() as opened:
            lock, new = _locked_socket(path)
            opened.callback(os.close, lock)
            opened.callback(self._remove, new)
            self.listener = _listener(path, group, lock)
            opened.callback(path.unlink, missing_ok=True)  # No other server owns the path while the lock is held.
            opened.callback(self.listener.close)
            if memory:
                new = _missing(memory / "lock")
                opened.callback(self._remove, _missing(memory, *memory.parents))
                opened.callback(os.close, _owned(memory))
                opened.callback(self._remove, new)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Release the socket, the directory and their locks."""
        self._opened.close()

    def _remove(self, new: list[Path]) -> None:
        if not self.used:
            with suppress(OSError):  # Another process has put a file into the directory.
                for path in new:
                    path.rmdir() if path.is_dir() else path.unlink()


def _missing(*paths: Path) -> list[Path]:
    return [path for path in paths if not path.exists()]


def _owned(memory: Path) -> int:
    """Create and lock a directory for memory; return the descriptor of the lock.

    Raises `TierUnusable` if the directory cannot be used, or if another server has locked it. It must belong to this
    user or to root: its owner can replace files in it, and every user can create a directory in /dev/shm.
    """
    try:
        memory.mkdir(mode=0o711, parents=True, exist_ok=True)
        if (owner := memory.stat().st_uid) not in (0, os.getuid()):
            raise TierUnusable(f"{memory} belongs to user {owner}, who could change its contents: remove it first")
        if not is_in_memory(memory):
            log.warning(
                "%s is on a disk, so the system writes the memory to this disk: use a directory on tmpfs", memory
            )
        return locked(memory / "lock", alone=True)
    except BlockingIOError:
        reason = f"another cache server uses the memory in {memory}"
        raise TierUnusable(f"{reason}: use --takeover with its --socket") from None
    except OSError as error:
        raise TierUnusable(f"cannot keep memory in {memory}: {error.strerror}") from error


def _locked_socket(path: Path) -> tuple[int, list[Path]]:
    """Lock the path of a socket for the lifetime of a server; raise `TierUnusable` if another server has locked it.

    Returns the lock's descriptor, and a list with the lock file if it is new.

    The lock distinguishes a running server from a dead server's stale socket, even during start and shutdown.
    Clients wait for this lock, and hold it briefly after a server has ended.
    """
    until = time.monotonic() + SOCKET_LOCK_SECONDS
    while True:
        try:
            new = _missing(lock_of(path))
            return locked(lock_of(path), alone=True), new
        except BlockingIOError:
            if time.monotonic() > until:
                raise TierUnusable(f"a cache server already listens at {path}: use --takeover to end it") from None
            time.sleep(0.01)
        except FileNotFoundError as error:
            raise TierUnusable(f"cannot listen at {path}: create the directory {path.parent} first") from error
        except OSError as error:
            raise TierUnusable(f"cannot listen at {path}: {error.strerror or error}") from error


def _listener(path: Path, group: int | None, lock: int) -> socket.socket:
    """Return a socket that listens at a path, and replace a dead server's socket; raise `TierUnusable` if this fails.

    Clients of the `group` may also wait for the lock.
    """
    try:
        if group is not None:
            os.fchown(lock, -1, group)
            os.fchmod(lock, 0o640)
        remove_stale_socket(path)
        if path.exists():
            if path.is_socket():
                raise TierUnusable(f"another program listens at {path}: end it, or choose another path")
            raise TierUnusable(f"cannot listen at {path}: it is not a socket; remove it, or choose another path")
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
