"""Small files are replaced as a whole, by any number of threads and processes, and no update is lost."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmc import small_files
from lmc.engine.identity import checkpoint_files, identity_of_files
from lmc.small_files import replace_bytes, replace_text, sole_writer

COUNT = 40  # changes by each writer
ADD = """
import json, sys
from pathlib import Path
from lmc.small_files import replace_text, sole_writer

file, name = Path(sys.argv[1]), sys.argv[2]
sys.stdin.readline()
for number in range(int(sys.argv[3])):
    with sole_writer(file):
        replace_text(file, json.dumps(json.loads(file.read_text()) + [f"{name}{number}"]))
"""


def test_threads_that_replace_a_file_do_not_write_into_the_file_of_each_other(tmp_path: Path) -> None:
    """The file aside was named by the process, so two threads wrote into one, and one of them could not rename it."""
    file, contents = tmp_path / "file", [letter * 300_000 for letter in (b"a", b"b", b"c", b"d")]
    together = threading.Barrier(len(contents))

    def replace_often(content: bytes) -> None:
        together.wait(60)
        for _ in range(COUNT):
            replace_bytes(file, content, durable=False)
            assert file.read_bytes() in contents

    with ThreadPoolExecutor(len(contents)) as pool:
        list(pool.map(replace_often, contents))
    assert os.listdir(tmp_path) == ["file"]


def test_no_update_of_two_processes_and_two_threads_is_lost(tmp_path: Path) -> None:
    """Each read the file, changed it and wrote it, and what another one had written meanwhile was lost."""
    file = tmp_path / "file.json"
    replace_text(file, "[]")
    command = [sys.executable, "-c", ADD, str(file)]
    others = [
        subprocess.Popen([*command, name, str(COUNT)], stdin=subprocess.PIPE, text=True) for name in ("first", "second")
    ]

    def add(name: str) -> None:
        for number in range(COUNT):
            with sole_writer(file):
                replace_text(file, json.dumps([*json.loads(file.read_text()), f"{name}{number}"]))

    with ThreadPoolExecutor(2) as pool:
        for other in others:
            assert other.stdin is not None
            other.stdin.write("go\n")
            other.stdin.flush()
        list(pool.map(add, ("third", "fourth")))
    for other in others:
        other.communicate()
        assert other.returncode == 0
    names = ("first", "second", "third", "fourth")
    assert sorted(json.loads(file.read_text())) == sorted(f"{name}{i}" for name in names for i in range(COUNT))


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "file"
    replace_text(file, "old")
    monkeypatch.setattr(*((os, "fsync", full) if step == "write" else (Path, "replace", full)))
    with pytest.raises(OSError, match="No space left"):
        replace_text(file, "new")
    assert (file.read_text(), os.listdir(tmp_path)) == ("old", ["file"])


def test_a_file_and_its_name_are_on_the_disk_when_it_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure after the rename left an empty file: its content was still in memory only."""
    synced, fsync = [], os.fsync

    def noting(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    replace_text(tmp_path / "file", "text")
    content, directory = synced
    assert (content.parent, content.name.startswith(".file."), directory) == (tmp_path, True, tmp_path)
    replace_bytes(tmp_path / "file", b"bytes", durable=False)
    assert len(synced) == 2
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_lock_that_cannot_be_had_holds_up_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(small_files, "LOCK_SECONDS", 0.05)
    with open(tmp_path / "file.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with sole_writer(tmp_path / "file"):
            replace_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    assert "another process may overwrite the change" in caplog.text


def test_engines_that_start_together_all_remember_their_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines read what was remembered, and the one that was written last forgot what the other one had read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lmc.engine.identity.FRESH_SECONDS", -1.0)
    folders = [tmp_path / name for name in "abcdefgh"]
    for folder in folders:
        folder.mkdir()
        (folder / "model.safetensors").write_text(folder.name)
        (folder / "config.json").write_text("{}")
    together = threading.Barrier(len(folders))

    def start(folder: Path) -> None:
        together.wait(60)
        identity_of_files(checkpoint_files(folder))

    with ThreadPoolExecutor(len(folders)) as pool:
        list(pool.map(start, folders))
    known = json.loads((tmp_path / "cache" / "lmc" / "checkpoints.json").read_text())
    assert set(known) == {str(file) for folder in folders for file in folder.iterdir()}
