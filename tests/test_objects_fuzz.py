"""Whatever an S3 server answers: the right bytes, a miss or an error, within the deadline. Never wrong bytes.

A proxy in front of a real server replaces some of its answers. What it replaces follows from the seed, the request, and
how often this request came, and so not from the order of requests that are in flight at the same time.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from amount import some
from s3_servers import Answer, Lie, Proxy, bucket, find_rclone, rclone_server, s3_server
from storage_fakes import (
    PART_BYTES,
    PARTS,
    eventually,
    expected,
    get,
    key_of,
    lose,
    memory,
    meta_of,
    own_seconds,
    raw_record,
    stored,
)

from lmc.errors import ChunkLost, CorruptRecord, TierUnusable
from lmc.keys import FORMAT
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers import breaker
from lmc.storage.tiers.objects import ObjectTier
from lmc.storage.tiers.objects import tier as objects_tier
from lmc.storage.tiers.record import file_of
from lmc.storage.tiers.tier import Tier

pytestmark = pytest.mark.usefixtures("every_thread_ends_well")

SERVERS = some(300)
DEADLINE = 0.3
LIMIT = 5.0  # seconds: a few deadlines, and room for a machine that is busy with something else
KEY, OTHER = key_of(0), key_of(1)
RIGHT = bytes(stored(meta_of(KEY)))


# -- lies ------------------------------------------------------------------------------------------------------------


def flipped(dice: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(dice.choice([1, 1, 9])):
        if changed:
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def wrong_body(dice: random.Random, answer: Answer) -> Answer:
    """Another body, with its length."""
    body = answer.body
    at = dice.randrange(len(body) + 1)
    other = raw_record(meta_of(OTHER))
    body = dice.choice(
        [b"", body[:at], body[at:], body + b"\0", body * 2, bytes(len(body)), flipped(dice, body), other, other[at:]]
    )
    return Answer(answer.status, {**answer.headers, "Content-Length": str(len(body))}, body)


def wrong_length(dice: random.Random, answer: Answer) -> Answer:
    """A body that ends early, goes on after its end, or has an impossible length."""
    length = dice.choice(
        [len(answer.body) + dice.choice([1, 4096, 1 << 40]), len(answer.body) // 2, 0, -1, "", "1e3", "9" * 40]
    )
    return Answer(answer.status, {**answer.headers, "Content-Length": str(length)}, answer.body)


def wrong_range(dice: random.Random, answer: Answer) -> Answer:
    """A part of an object with status 206, which may say that it is another one."""
    whole = raw_record(meta_of(KEY))
    first = dice.choice([0, 1, 4096, 8192])
    body = whole[first : first + dice.choice([1, 4096, len(whole)])]
    said = dice.choice([first, 0, 4096, len(whole)])
    end = said + len(body) - 1
    content = dice.choice(
        [f"bytes {said}-{end}/{len(whole)}", f"bytes {said}-{end}/*", "bytes */7", "bytes 9-3/5", "all"]
    )
    headers = {**answer.headers, "Content-Length": str(len(body)), "Content-Range": content}
    return Answer(206, headers, body)


def wrong_status(dice: random.Random, answer: Answer) -> Answer:
    status = dice.choice([200, 201, 204, 206, 301, 304, 307, 400, 401, 403, 404, 409, 412, 416, 429, 500, 503, 599])
    return Answer(status, answer.headers, answer.body)


def wrong_header(dice: random.Random, answer: Answer) -> Answer:
    headers = dict(answer.headers)
    if dice.random() < 0.3:
        headers.pop(dice.choice(sorted(headers)))
    else:
        name, value = dice.choice([
            ("Last-Modified", "yesterday"), ("Last-Modified", ""), ("ETag", ""), ("ETag", "\xff"),
            ("Content-Range", "bytes 0-0/1"), ("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked"),
            ("Location", "/elsewhere"), ("X", "x" * 100_000), ("Content-Type", "text/html"), ("Content-Length", "7"),
        ])  # fmt: skip
        headers[name] = value
    return Answer(answer.status, headers, answer.body)


def endless_list(_: random.Random, answer: Answer) -> Answer:
    """A listing that says that there is more."""
    more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>"
    body = answer.body.replace(b"<IsTruncated>false</IsTruncated>", more)
    return Answer(answer.status, {**answer.headers, "Content-Length": str(len(body))}, body)


def no_http(dice: random.Random, answer: Answer) -> bytes:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return dice.choice([
        b"", b"\0" * 9, b"HTTP/1.1 200", b"HTTP/9.9 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n" + answer.body,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50, b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5000, dice.randbytes(300),
        chunked + b"ffffffffffffffff\r\n" + answer.body, chunked + b"%x\r\n" % (2 * len(answer.body)) + answer.body,
        chunked + b"zz\r\n", chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(answer.body), answer.body),
    ])  # fmt: skip


def silence(_: random.Random, answer: Answer) -> None:
    """Send no answer."""


LIES: tuple[Callable[[random.Random, Answer], "Answer | bytes | None"], ...] = (
    *(wrong_body, wrong_length, wrong_range, wrong_status, wrong_header, endless_list, no_http),
    *(wrong_body, wrong_length, wrong_range, silence),
)


def liar(seed: int) -> Lie:
    """A server that lies sometimes, or always; some of them begin after the first contact."""
    honesty, times = random.Random(seed).choice([0.0, 0.3, 0.7, 0.9]), Counter[str]()

    def lie(line: str, answer: Answer) -> Answer | bytes | None:
        times[line] += 1
        dice = random.Random(f"{seed} {line} {times[line]}")
        greets = seed % 4 and times[line] == 1 and "none" in line
        return answer if greets or dice.random() < honesty else dice.choice(LIES)(dice, answer)

    return lie


# -- what is tried ---------------------------------------------------------------------------------------------------


def outcome(operation: Callable[[], object]) -> object:
    """What an operation returns, or the error that a tier may raise; both within the time."""
    began = own_seconds()
    try:
        return operation()
    except (OSError, CorruptRecord, TierUnusable) as error:
        return error
    finally:
        assert own_seconds() - began < LIMIT


def taken(tier: Tier, order: list[int]) -> bytes | None:
    """What a tier has under `KEY`, read part by part in an order."""
    reader = tier.open(KEY)
    if reader is None:
        return None
    with closing(reader):
        assert (reader.meta.parts, reader.meta.stored_part) == (PARTS, PART_BYTES), "of the right header"
        into = memory(PARTS * PART_BYTES)
        for part in order:
            reader.read(part, 1, [into[part * PART_BYTES : (part + 1) * PART_BYTES]])
        return bytes(into)


def try_all(tier: Tier) -> Counter[str]:
    """Call each method of a tier. Returns how often a read was right, a miss or an error."""
    found = Counter[str]()
    for order in ([0, 1, 2], [2, 0, 1]):
        read = outcome(lambda order=order: taken(tier, order))
        assert read is None or isinstance(read, Exception) or read == RIGHT
        found["miss" if read is None else "right" if read == RIGHT else "error"] += 1
    for work in (
        lambda: tier.contains([KEY, OTHER]),
        lambda: tier.write(meta_of(OTHER), [stored(meta_of(OTHER))]),
        lambda: list(tier.entries()),
        tier.check,
        lambda: tier.delete(OTHER),
    ):
        outcome(work)
    return found


def put_right(port: int, folder: str) -> None:
    """Put the record of `KEY` into a folder, past the tier."""
    bucket(port, folder).put(f"lmc/{FORMAT}/{file_of(KEY)}", raw_record(meta_of(KEY)))


def works(tier: Tier, port: int, folder: str) -> bool:
    """Whether a tier is used and reads the record, which requests that were late may have deleted."""
    put_right(port, folder)
    return tier.usable and outcome(lambda: taken(tier, [0, 1, 2])) == RIGHT


@pytest.fixture(scope="module")
def s3() -> Iterator[int]:
    with rclone_server() if find_rclone() else s3_server() as port:
        yield port


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is not used tries again while a test waits."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(objects_tier, "LIST_SECONDS", DEADLINE)
    monkeypatch.setattr(objects_tier, "PAUSE_SECONDS", 0.0)


def test_servers_that_lie_get_errors_and_misses_out_of_a_tier_and_afterwards_it_works(s3):
    outcomes, crashes = Counter[str](), dict[str, int]()
    for seed in range(SERVERS):
        folder = f"lies{seed}"
        put_right(s3, folder)
        with closing(Proxy(s3, liar(seed))) as proxy:
            try:
                tier = ObjectTier(bucket(proxy.port, folder), "S3", deadline=DEADLINE, lookup_seconds=DEADLINE)
            except TierUnusable:
                outcomes["refused at the start"] += 1
                continue
            with closing(tier):
                try:
                    outcomes += try_all(tier)
                except Exception as error:  # noqa: BLE001 - All of them are counted, and none is right.
                    crashes[f"{type(error).__name__}: {error}"[:200]] = seed
                proxy.lie = None
                proxy.go_on.set()
                eventually(lambda tier=tier, folder=folder: works(tier, s3, folder))
    assert crashes == {}
    assert min(outcomes[name] for name in ("right", "miss", "error")) > SERVERS / 10, outcomes


def test_a_listing_that_begins_anew_is_an_error(s3, monkeypatch):
    """Earlier, such a listing never ended."""
    monkeypatch.setattr(objects_tier, "LISTED", 1)
    monkeypatch.setattr(objects_tier, "LIST_SECONDS", 30.0)
    put_right(s3, "endless")
    with (
        closing(Proxy(s3)) as proxy,
        closing(ObjectTier(bucket(proxy.port, "endless"), "S3", deadline=30, lookup_seconds=30)) as tier,
    ):
        assert [entry.key for entry in tier.entries()] == [KEY]
        pages: list[Answer] = []

        def lie(_: str, answer: Answer) -> Answer:
            pages.append(endless_list(random.Random(), answer))
            return pages[0]

        proxy.lie = lie
        with pytest.raises(OSError, match="S3 lists the same objects again"):
            tier.entries()


def test_servers_that_lie_get_misses_out_of_a_store(s3):
    outcomes = Counter[str]()
    for seed in range(SERVERS):
        folder = f"store{seed}"
        put_right(s3, folder)
        with closing(Proxy(s3)) as proxy:
            tier = ObjectTier(bucket(proxy.port, folder), "S3", deadline=DEADLINE, lookup_seconds=DEADLINE)
            with closing(Store(Slab(2, PARTS, PART_BYTES), [tier])) as store:
                proxy.lie = liar(seed)
                for _ in range(3):
                    try:
                        chunk = outcome(lambda store=store: get(store, KEY))
                    except ChunkLost:
                        chunk = None
                    assert chunk in (None, expected(KEY))
                    outcomes["right" if chunk else "miss"] += 1
                    lose(store, KEY)
                assert (store.held(), store.check_integrity()) == (0, [])
    assert min(outcomes[name] for name in ("right", "miss")) > SERVERS / 10, outcomes
