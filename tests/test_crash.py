"""Writers that are killed in the middle of it leave nothing wrong behind."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from amount import some
from storage_crash_child import KILLS_ITSELF
from storage_fakes import RECORD_BYTES, key_of, meta_of, stored, waits_of
from test_disk import used
from tier_contract import read

from lmc.storage.tiers.disk import DiskTier

ROUNDS = some(100, share=0.2)
CAPACITY = 60 * RECORD_BYTES
KEYS = {key_of(i) for i in range(200)}


def let_run(process: int, seconds: float) -> None:
    """Wait so long, and as long again as its most delayed thread was ready and had no CPU."""
    started = time.monotonic()
    while time.monotonic() - started - max(waits_of(process).values(), default=0) / 1e9 < seconds:
        time.sleep(0.001)


def test_killed_writers_leave_no_wrong_record(tmp_path):
    dice = random.Random(6)
    directory = tmp_path / "tier"
    torn = found = 0
    script = Path(__file__).parent / "storage_crash_child.py"
    zygote = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        for seed in range(ROUNDS):
            print(directory, CAPACITY, seed, file=zygote.stdin, flush=True)
            child = int(zygote.stdout.readline())
            if seed % KILLS_ITSELF:
                let_run(child, dice.uniform(0.0, 0.08))  # sometimes while it is still reading the directory
                os.kill(child, signal.SIGKILL)
            assert zygote.stdout.readline() == f"{int(signal.SIGKILL)}\n", "it ended before it was killed"

            assert used(directory) <= CAPACITY
            torn += any((directory / "tmp").glob("*")) if directory.exists() else 0
            tier = DiskTier(directory, CAPACITY)
            assert not any((directory / "tmp").iterdir())
            assert tier.bytes == used(directory) <= CAPACITY
            assert {meta.key for meta, _ in tier.headers()} == {entry.key for entry in tier.entries()}
            assert tier.faults() == []
            for entry in list(tier.entries()):
                assert entry.key in KEYS
                assert read(tier, entry.key) == bytes(stored(meta_of(entry.key)))
                found += 1
            assert tier.corrupt == 0
            tier.close()
    finally:
        zygote.kill()  # a writer that is left over sees that its parent is gone
        zygote.communicate()
    assert torn >= ROUNDS // KILLS_ITSELF, "a writer was not killed while it wrote: this test proves less"
    assert found > ROUNDS
    tier = DiskTier(directory, CAPACITY)
    tier.check(fix=True)
    assert tier.check() == []
    tier.close()
