"""Writers to a disk and a Redis that are killed in the middle of it leave nothing wrong in either."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from amount import some
from redis_crash_child import KEYS, PART_BYTES, PARTS, RECORD_BYTES, cut_small
from redis_servers import RedisServer, wait_until
from storage_fakes import memory, meta_of, stored
from test_disk import used

from lmc.config.redis_url import parse_redis_url
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.redis import layout as values
from lmc.storage.tiers.redis.tier import UNFINISHED_SECONDS, RedisTier

pytest_plugins = ["redis_servers"]

ROUNDS = some(300, share=0.08)
CAPACITY = 8 * RECORD_BYTES
RIGHT = {key: bytes(stored(meta_of(key, PARTS, PART_BYTES))) for key in KEYS}
NAME = re.compile(rb"lmc:\{(?P<key>[0-9a-f]{64})\}(:(?P<token>[0-9a-f]{16}))?(:(?P<number>[0-9]+))?")
INTO = memory(PARTS * PART_BYTES)


def test_killed_writers_leave_no_wrong_record_in_two_tiers(tmp_path, redis, monkeypatch):
    monkeypatch.setattr(values, "CLASSES", values.CLASSES)
    monkeypatch.setattr(values, "LARGEST", values.LARGEST)
    monkeypatch.setattr("lmc.storage.tiers.redis.tier.LARGEST", values.LARGEST)
    cut_small()
    values_of_each = len(values.value_sizes(PARTS * PART_BYTES))
    assert values_of_each > 1
    dice = random.Random(9)
    directory = tmp_path / "tier"
    torn = {"disk": 0, "redis": 0}
    found = {"disk": 0, "redis": 0}
    asides: set[bytes] = set()
    script = Path(__file__).parent / "redis_crash_child.py"
    zygote = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        for seed in range(ROUNDS):
            print(CAPACITY, seed, redis.tcp_url(), directory, file=zygote.stdin, flush=True)
            child = int(zygote.stdout.readline())
            if seed % 4:  # the others may still be starting
                assert zygote.stdout.readline() == "begun\n"
            # Half of them in the middle of a write, a fourth when there are records, and the others at some time.
            if seed % 4 == 1:
                soon(lambda: any((directory / "tmp").glob("*")))
            elif seed % 4 == 2:
                soon(lambda: not aside(redis) <= asides)  # noqa: B023
            elif seed % 4 == 3:  # however slow the machine
                soon(lambda: used(directory) >= 6 * RECORD_BYTES and redis.ask("DBSIZE") >= 6 * (1 + values_of_each))
            else:
                time.sleep(dice.uniform(0.0, 0.06))
            os.kill(child, signal.SIGKILL)
            said = zygote.stdout.readline().replace("begun\n", "") or zygote.stdout.readline()
            assert said == f"{int(signal.SIGKILL)}\n", "it ended before it was killed"
            wait_until(lambda: b"name=lmc" not in redis.ask("CLIENT", "LIST"), "the end of the child's connections")

            assert used(directory) <= CAPACITY + RECORD_BYTES
            torn["disk"] += any((directory / "tmp").glob("*")) if directory.exists() else 0
            tier = DiskTier(directory, CAPACITY)
            assert tier.bytes == used(directory) <= CAPACITY
            found["disk"] += all_right(tier)
            tier.close()

            unfinished = nothing_else_is_left(redis)
            torn["redis"] += not unfinished <= asides
            asides |= unfinished
            remote = RedisTier(parse_redis_url(redis.tcp_url()), deadline=10)
            found["redis"] += all_right(remote)
            assert seed % 20 or remote.check() == []
            remote.close()
    finally:
        zygote.kill()  # a writer that is left over sees that its parent is gone
        zygote.communicate()
    assert min(torn.values()) >= max(1, ROUNDS // 60), f"hardly a writer was killed while it wrote: {torn}"
    assert min(found.values()) > ROUNDS, found
    tier = DiskTier(directory, CAPACITY)
    tier.check(fix=True)
    assert tier.check() == []
    tier.close()


def aside(redis: RedisServer) -> set[bytes]:
    """Names of values that are being written, or were."""
    return {name for name in redis.ask("KEYS", "*") if (match := NAME.fullmatch(name)) and match["token"]}


def soon(true: Callable[[], bool]) -> None:
    """Wait until something is true, but not for long: it may have been missed."""
    end = time.monotonic() + 0.5
    while not true() and time.monotonic() < end:
        time.sleep(0.0002)  # for the writer, where there are fewer processors than busy processes


def all_right(tier: DiskTier | RedisTier) -> int:
    """Read every record that can be seen."""
    keys = [entry.key for entry in tier.entries()]
    for key in keys:
        reader = tier.open(key)
        reader.read(0, PARTS, [INTO])
        reader.close()
        assert bytes(INTO) == RIGHT[key]
    assert tier.corrupt == 0
    return len(keys)


def nothing_else_is_left(redis: RedisServer) -> set[bytes]:
    """Every name in Redis is the format's, a header's, a value's under a header, or one that expires; return the last
    kind.
    """
    names = set(redis.ask("KEYS", "*")) - {b"lmc:format"}
    numbers = range(len(values.value_sizes(PARTS * PART_BYTES)))
    wanted: set[bytes] = set()
    unfinished: set[bytes] = set()
    with redis.client().pipeline(transaction=False) as pipeline:
        for name in sorted(names):
            pipeline.ttl(name)
        seconds = dict(zip(sorted(names), pipeline.execute(), strict=True))
    for name in names:
        match = NAME.fullmatch(name)
        assert match, name
        if match["token"]:
            # -1 is for ever; -2 says that it has expired since its name was read.
            assert seconds[name] != -1 and seconds[name] <= UNFINISHED_SECONDS, f"{name!r} stays for ever"  # noqa: PT018
            unfinished.add(name)
        elif not match["number"]:
            wanted |= {name, *(b"%s:%d" % (name, number) for number in numbers)}
    assert names - unfinished - wanted <= expired(seconds), "values without a record"
    assert wanted <= names, "a record without all of its values"
    assert {seconds[name] for name in wanted} <= {-1}
    return unfinished


def expired(seconds: dict[bytes, int]) -> set[bytes]:
    """Names that went between the two questions."""
    return {name for name, left in seconds.items() if left == -2}
