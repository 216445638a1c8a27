"""Whatever lies in Redis, and whatever a server answers: a miss or an error, never a crash, never wrong bytes, never
much memory.
"""

import contextlib
import random
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from amount import some
from redis_servers import HOST, RedisServer
from storage_fakes import PART_BYTES, PARTS, key_of, lose, memory, meta_of, own_seconds, stored

from lmc.config.redis_url import parse_redis_url
from lmc.errors import ChunkLost, CorruptRecord, TierUnusable
from lmc.keys import FORMAT, ChunkKey
from lmc.shapes import MIB
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers import breaker
from lmc.storage.tiers.codec import Coded
from lmc.storage.tiers.record import RecordMeta, checksum, decode_header, encode_header, split_parts
from lmc.storage.tiers.redis import RedisTier
from lmc.storage.tiers.tier import Tier, Written

pytest_plugins = ["redis_servers"]
pytestmark = pytest.mark.usefixtures("every_thread_ends_well")

RECORDS, SERVERS, FORGED = some(5000), some(500), some(500)
LIMIT = 2.5  # seconds: the deadline, and room for a machine that is busy with something else
KEY, OTHER = key_of(0), key_of(1)
CODECS = ("none", "planes")
SIZE = PARTS * PART_BYTES
GREETED = {b"CLIENT": b"+OK\r\n", b"SELECT": b"+OK\r\n", b"PING": b"+PONG\r\n", b"SET": b"$-1\r\n", b"AUTH": b"+OK\r\n"}


def smooth(key: ChunkKey) -> memoryview:
    """The parts of a record that codecs make smaller."""
    whole = memory(SIZE)
    for at in range(0, SIZE, 2):
        whole[at] = key[at % 32]
    return whole


def header_name(key: ChunkKey) -> bytes:
    return b"lmc:{%s}" % key.hex().encode()


class Shelf:
    """A record's values in Redis, around the tier."""

    def __init__(self, redis: RedisServer, key: ChunkKey) -> None:
        self.redis, self.name = redis.client(), header_name(key)
        self.names = [self.name, *(b"%s:%d" % (self.name, number) for number in range(4))]

    def held(self) -> dict[bytes, bytes]:
        return {n: v for n, v in zip(self.names, self.redis.mget(self.names), strict=True) if v is not None}

    def fill(self, what: dict[bytes, bytes], odd: bytes | None = None) -> None:
        """Nothing but this is under the key; `odd` is a name whose value is no string."""
        with self.redis.pipeline(transaction=False) as pipeline:
            pipeline.unlink(*self.names)
            for name, value in what.items():
                if name == odd:
                    pipeline.rpush(name, value)
                else:
                    pipeline.set(name, value)
            pipeline.execute()


# -- records ---------------------------------------------------------------------------------------------------------


def flip(dice: random.Random, blob: bytes) -> bytes:
    changed = bytearray(blob)
    for _ in range(dice.choice([1, 1, 2, 9])):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def cut(dice: random.Random, blob: bytes) -> bytes:
    return blob[: dice.choice([0, 1, 8, 4096, dice.randrange(len(blob))])]


def extend(dice: random.Random, blob: bytes) -> bytes:
    return blob + dice.choice([b"\0", bytes(4096), dice.randbytes(dice.randrange(1, 9000))])


def shuffle(dice: random.Random, blob: bytes) -> bytes:
    a, b = sorted(dice.randrange(len(blob)) for _ in range(2))
    return blob[b:] + blob[a:b] + blob[:a]


def noise(dice: random.Random, blob: bytes) -> bytes:
    return dice.randbytes(dice.choice([1, 7, 8, 100, 4096, len(blob)]))


BYTES = (flip, cut, extend, shuffle, noise)


def hostile(dice: random.Random, meta: RecordMeta) -> bytes:
    """A header that is well made, and says something else than is there."""
    parts = dice.choice([1, 2, 4, PARTS, 4096])
    sizes: tuple[int, ...] = ()
    if dice.random() < 0.5:
        sizes = tuple(dice.choice([4096, 8192, 1 << 20, 1 << 30, 1 << 40]) for _ in range(parts))
    changes = {
        "parts": parts,
        "part_bytes": dice.choice([1, 4095, 4096, 4097, 12288, 1 << 20, 1 << 30, 1 << 32, 1 << 40]),
        "codec": dice.choice(["none", "lz4", "planes2+lz4", "planes8+lz4", "zip", "\n", "x" * 900]),
        "sizes": sizes,
        "tokens": dice.choice([0, -1, 1 << 80]),
        "label": dice.choice(["", "\x00", "'" * 50]),
    }
    for name in dice.sample(sorted(changes), dice.randint(1, 4)):
        meta = replace(meta, **{name: changes[name]})  # type: ignore[arg-type]
    return encode_header(replace(meta, checksums=tuple((meta.checksums * parts)[: meta.parts]) or (0,)))


def mutated(
    dice: random.Random, record: dict[bytes, bytes], other: bytes, name: bytes
) -> tuple[dict[bytes, bytes], bytes]:
    """A record that is not what was written, and the name of a value that is none (or nothing)."""
    what, odd = dict(record), b""
    victim = dice.choice(sorted(what))
    way = dice.randrange(8)
    if way < 3:
        what[victim] = dice.choice(BYTES)(dice, what[victim])
    elif way == 3:
        del what[victim]
    elif way == 4:
        odd = victim
    elif way == 5:
        what[name] = other
    elif way == 6:
        what[name] = hostile(dice, decode_header(what[name]))
    else:  # a whole value is that of another name
        what[victim] = what[dice.choice(sorted(what))]
    return what, odd


def taken(tier: Tier) -> bytes | None:
    """What `tier` has under `KEY`; only so much memory as a whole record needs is touched."""
    reader = tier.open(KEY)
    if reader is None:
        return None
    with contextlib.closing(reader):
        sizes = reader.meta.stored
        into = memory(sum(sizes))  # pages that nobody fills are not there
        for part, view in enumerate(split_parts([into], sizes)):
            reader.request(part, 1)
            reader.read(part, 1, [view])
        return bytes(into)


def test_records_that_are_not_what_was_written_are_never_delivered(redis):
    dice = random.Random(11)
    shelf = Shelf(redis, KEY)
    plain = RedisTier(parse_redis_url(redis.tcp_url()), deadline=10)
    right = bytes(smooth(KEY))
    records, others = [], []
    for codec in CODECS:
        for key in (KEY, OTHER):
            coded = Coded(plain, codec, 2)
            plain.delete(key)
            assert coded.write(meta_of(key), [smooth(key)]) is Written.STORED
        records.append(shelf.held())
        others.append(Shelf(redis, OTHER).held()[header_name(OTHER)])
    store = Store(Slab(2, PARTS, PART_BYTES), [coded])
    outcomes = dict.fromkeys(("right", "miss", "error"), 0)
    for case in range(RECORDS):
        pick = dice.randrange(len(CODECS))
        what, odd = mutated(dice, records[pick], others[pick], shelf.name)
        shelf.fill(what, odd)
        with traced() if case % 23 == 0 else contextlib.nullcontext():  # tracing makes everything slow
            try:
                found = through(store) if case % 2 else taken(dice.choice([coded, plain]) if pick == 0 else coded)
            except (CorruptRecord, OSError, ChunkLost):
                outcomes["error"] += 1
            else:
                outcomes["miss" if found is None else "right"] += 1
                # Of fewer or shorter parts only those can be had that are right.
                assert found is None or right.startswith(found), (case, what, odd)
        assert plain.usable, "one wrong record took the whole server away"
    assert outcomes["error"] > RECORDS / 3, outcomes
    assert outcomes["miss"] > RECORDS / 50, outcomes
    assert store.held() == 0
    assert store.check_integrity() == []
    store.close()


@contextlib.contextmanager
def traced(limit: int = 8 * MIB) -> Iterator[None]:
    """No more memory than this is taken inside, not even for a moment."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit


def through(store: Store) -> bytes | None:
    try:
        with store.pinned([KEY]) as (pin,):
            if pin is None:
                return None
            return b"".join(store.part(pin, part)[:PART_BYTES].numpy().tobytes() for part in range(PARTS))
    finally:
        lose(store, KEY)  # out of memory, not out of Redis


def test_encoded_parts_that_were_forged_with_right_checksums_do_no_harm(redis):
    """Whoever may write into Redis may lie, but not bring the process down or fill its memory."""
    dice = random.Random(12)
    shelf = Shelf(redis, KEY)
    plain = RedisTier(parse_redis_url(redis.tcp_url()), deadline=10)
    for codec in CODECS[1:]:
        coded = Coded(plain, codec, 2)
        plain.delete(KEY)
        assert coded.write(meta_of(KEY), [smooth(KEY)]) is Written.STORED
        record = shelf.held()
        meta, value = decode_header(record[shelf.name]), record[shelf.names[1]]
        with traced():
            for _ in range(FORGED):
                forged = flip(dice, value)
                parts = split_parts([memoryview(forged)], meta.stored)
                sums = tuple(checksum(part) for part in parts)
                shelf.fill({shelf.name: encode_header(replace(meta, checksums=sums)), shelf.names[1]: forged})
                with contextlib.suppress(CorruptRecord):
                    found = taken(coded)
                    assert found is not None
                    assert len(found) == SIZE
    plain.close()


def test_a_header_larger_than_any_is_removed_and_not_held_against_the_server(redis):
    """An answer of more than 4 MiB closed the connection, three of them the whole tier; and the record stayed where it
    was.
    """
    shelf = Shelf(redis, KEY)
    with contextlib.closing(RedisTier(parse_redis_url(redis.tcp_url()), deadline=10)) as tier:
        for _ in range(breaker.FAILURES):
            shelf.fill({shelf.name: bytes(5 * MIB)})
            with pytest.raises(CorruptRecord):
                tier.open(KEY)
            assert tier.usable
            assert shelf.held() == {}


def test_names_that_are_not_ours_are_no_reason_to_stop_and_are_never_removed(redis):
    """`check` looked for a brace that a name such as `lmc:{mine` does not have."""
    foreign = {b"lmc:{mine": b"1", b"lmc:{mine}": b"2", b"lmc:{mine}:0": b"3", b"lmc:": b"4", b"lmc:{}": b"5"}
    redis.client().mset(foreign)
    redis.client().rpush(b"lmc:{list", b"6")
    with contextlib.closing(RedisTier(parse_redis_url(redis.tcp_url()), deadline=10)) as tier:
        assert tier.write(meta_of(KEY), [stored(meta_of(KEY))]) is Written.STORED
        assert [entry.key for entry in tier.entries()] == [KEY]
        assert tier.check() == []
        assert tier.check(fix=True) == []
        assert redis.client().mget(list(foreign)) == list(foreign.values())


def test_a_record_whose_name_is_listed_twice_is_one_entry():
    """SCAN may name a key in two of its answers, and twice in one of them."""
    pages = iter([(b"7", 2), (b"0", 1)])

    def answer(words: list[bytes]) -> bytes:
        if words[0] != b"SCAN":
            return honest(words)
        cursor, times = next(pages)
        return b"*2\r\n%s*%d\r\n%s" % (bulk(cursor), times, bulk(header_name(KEY)) * times)

    with FakeServer(answer) as server, contextlib.closing(RedisTier(parse_redis_url(server.url), deadline=5)) as tier:
        assert [entry.key for entry in tier.entries()] == [KEY]


# -- servers ---------------------------------------------------------------------------------------------------------

Answer = Callable[[list[bytes]], "bytes | None"]


class FakeServer:
    """Answers every command as `answer` says, after greeting whoever comes as Redis does; None closes the
    connection.
    """

    def __init__(self, answer: Answer, *, greets: bool = True) -> None:
        self._answer, self._greets = answer, greets
        self._listening = socket.create_server((HOST, 0))
        self.url = f"redis://{HOST}:{self._listening.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._listening, *self._sockets):
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listening.accept()
                self._sockets.append(sock)
                thread = threading.Thread(target=self._serve, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), sock.makefile("rb") as stream:
            while line := stream.readline():
                words = []
                for _ in range(int(line[1:])):
                    words.append(stream.read(int(stream.readline()[1:])))
                    stream.readline()
                answer = self._greeting(words) if self._greets else None
                answer = self._answer(words) if answer is None else answer
                if answer is None:
                    break
                sock.sendall(answer)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _greeting(self, words: list[bytes]) -> bytes | None:
        if words[0] == b"EVAL" and words[1] == b"return 1":
            return b":1\r\n"
        if words[-1] == b"NX" or words[0] in (b"CLIENT", b"SELECT", b"PING", b"AUTH"):
            return GREETED[words[0]]
        return b"$%d\r\n%d\r\n" % (len(str(FORMAT)), FORMAT) if words == [b"GET", b"lmc:format"] else None


HEADER = encode_header(
    replace(
        meta_of(KEY), checksums=tuple(checksum(p) for p in split_parts([stored(meta_of(KEY))], (PART_BYTES,) * PARTS))
    )
)


def bulk(blob: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(blob), blob)


def honest(words: list[bytes]) -> bytes:
    """What a server with the record of `KEY` would say."""
    if words[0] in (b"GET", b"GETRANGE"):
        blob = HEADER if words[1] == header_name(KEY) else bytes(stored(meta_of(KEY)))
        return bulk(blob[int(words[2]) : int(words[3]) + 1] if words[0] == b"GETRANGE" else blob)
    if words[0] in (b"EXISTS", b"UNLINK", b"TTL", b"OBJECT"):
        return b":1\r\n"
    if words[0] == b"SCAN":
        return b"*2\r\n$1\r\n0\r\n*1\r\n" + bulk(header_name(KEY))
    return b"+OK\r\n"


ODD = [
    b"$4294967296\r\n", b"$-7\r\n", b"$3\r\nabcdef\r\n", b"$3\r\nab", b"$\r\n", b"$1e3\r\n", b"$ 5\r\nhello\r\n",
    b"$99999999999999999999999\r\n", b"*-1\r\n", b"*0\r\n", b"*1000000000\r\n", b"*4000000\r\n:1\r\n",
    b"*2\r\n:1\r\n", b"*1\r\n*1\r\n*1\r\n$-1\r\n", b"*2\r\n$1\r\n0\r\n:5\r\n", b":5\r\n", b":-1\r\n",
    b":" + b"9" * 5000 + b"\r\n", b":\r\n", b"+\r\n", b"+" + b"a" * 100_000, b"\r\n", b"\n", b"\0", b"",
    b"-MOVED 1 127.0.0.1:1\r\n", b"-ASK 1 x\r\n", b"-LOADING\r\n", b"-\r\n", b"-ERR \xff\xfe\r\n", b"-OOM\r\n",
    b"-NOAUTH\r\n", b"-EXECABORT\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(12\r\n", b"%1\r\n*0\r\n+a\r\n",
    b"~1\r\n*0\r\n", b">2\r\n+a\r\n+b\r\n", b"=5\r\ntxt:a\r\n", b"|1\r\n+a\r\n+b\r\n+c\r\n", b"*1\r\n" * 20_000,
]  # fmt: skip


def liar(seed: int) -> Answer:
    """Some of its answers are right, for a while."""
    dice = random.Random(seed)
    honesty = dice.choice([0.0, 0.3, 0.7, 0.9])

    def answer(words: list[bytes]) -> bytes | None:
        if dice.random() < honesty:
            return honest(words)
        way = dice.randrange(6)
        if way == 0:
            return None
        if way == 1:
            return dice.randbytes(dice.choice([1, 5, 100, 30_000]))
        if way == 2:
            return flip(dice, honest(words))
        if way == 3:
            return honest(words)[: dice.randrange(1, 40)]
        return dice.choice(ODD)

    return answer


def trouble_of(operation: Callable[[], object]) -> object:
    """What an operation answers, or that it raised what a tier may raise; both within the time."""
    began = own_seconds()
    try:
        return operation()
    except (OSError, CorruptRecord, TierUnusable):
        return None
    finally:
        assert own_seconds() - began < LIMIT


def try_all(tier: RedisTier) -> None:
    """Every verb of a tier: whatever it says, it says no wrong bytes."""
    right = bytes(stored(meta_of(KEY)))
    trouble_of(lambda: tier.contains([KEY, OTHER]))
    for _ in range(2):
        assert trouble_of(lambda: taken(tier)) in (None, right)
    trouble_of(lambda: tier.write(meta_of(OTHER), [stored(meta_of(OTHER))]))
    trouble_of(lambda: tier.delete(KEY))
    trouble_of(lambda: sum(1 for _ in zip(tier.entries(), range(10), strict=False)))
    trouble_of(tier.check)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The breaker tries again, and meets what the tests have for it, while a test waits."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0.001)


@pytest.mark.usefixtures("quick")
def test_a_greeting_that_announces_a_billion_items_takes_no_memory():
    """hiredis, which redis-py greets with if it is there, took 8 GB for them."""
    with traced(), FakeServer(lambda words: b"*1000000000\r\n", greets=False) as server:
        tier = RedisTier(parse_redis_url(server.url), deadline=0.05)
        assert not tier.usable
        tier.close()


@pytest.mark.usefixtures("quick")
def test_servers_that_lie_get_errors_and_misses_out_of_us_and_little_memory():
    crashes: dict[str, int] = {}
    for seed in range(SERVERS):
        tracing = traced(24 * MIB) if seed % 5 == 0 else contextlib.nullcontext()
        with tracing, FakeServer(liar(seed), greets=seed % 4 != 0) as server:
            try:
                with contextlib.closing(RedisTier(parse_redis_url(server.url), deadline=0.02)) as tier:
                    try_all(tier)
            except TierUnusable:
                pass
            except Exception as error:  # noqa: BLE001 - all of them are counted, and none is right
                crashes[f"{type(error).__name__}: {error}"[:100]] = seed
    assert crashes == {}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd[:24]))
@pytest.mark.parametrize("greets", [True, False], ids=["later", "at once"])
def test_an_answer_that_cannot_be_is_an_error_and_not_a_crash(odd, greets):
    """A deep list ended in a RecursionError, a number in place of a value in an AssertionError: neither is taken for a
    miss.
    """
    with FakeServer(lambda _: odd, greets=greets) as server:
        try:
            tier = RedisTier(parse_redis_url(server.url), deadline=0.1)
        except TierUnusable:
            return
        with contextlib.closing(tier):
            try_all(tier)


def test_an_answer_that_never_ends_is_given_up_early():
    """A list of four million values was taken one by one."""
    endless = b"*4000000\r\n" + b"$3\r\nabc\r\n" * 1_000_000
    with (
        FakeServer(lambda _: endless) as server,
        contextlib.closing(RedisTier(parse_redis_url(server.url), deadline=0.2)) as tier,
        traced(),
        pytest.raises(OSError, match="Redis at"),
    ):
        tier.contains([KEY])


def test_an_answer_of_many_long_strings_is_given_up_early():
    """Each was as long as one may be, and nobody counted them together."""
    long = b"*4000\r\n" + bulk(bytes(1 << 20)) * 40
    with (
        FakeServer(lambda _: long) as server,
        contextlib.closing(RedisTier(parse_redis_url(server.url), deadline=5)) as tier,
        traced(60 * MIB),  # what is sent is ours as well
        pytest.raises(OSError, match="without an end"),
    ):
        tier.contains([KEY])


@pytest.mark.parametrize(
    "said", ["unknown command 'AUTH', with args beginning with: 'mine' 'hunter2' ", "not hunter2!"]
)
def test_a_refusal_that_repeats_the_password_is_told_without_it(said):
    with FakeServer(lambda _: f"-ERR {said}\r\n".encode(), greets=False) as server:
        with pytest.raises(TierUnusable) as told:
            RedisTier(parse_redis_url(server.url.replace("//", "//mine:hunter2@")), deadline=1)
        assert said[:3] in str(told.value)
        assert "hunter2" not in str(told.value)


def test_half_a_value_and_then_silence_costs_one_deadline():
    """The kernel gives what it has when the time is over, and the rest was then waited for once more."""
    meta = meta_of(KEY, 1, 256 << 10)
    header = encode_header(replace(meta, checksums=(checksum(stored(meta)),)))

    def answer(words: list[bytes]) -> bytes | None:
        if words[0] in (b"GET", b"GETRANGE") and words[1] == header_name(KEY):
            return bulk(header)
        return b"$%d\r\n" % meta.stored_part + bytes(meta.stored_part // 2) if words[1].endswith(b":0") else b":1\r\n"

    with FakeServer(answer) as server, contextlib.closing(RedisTier(parse_redis_url(server.url), deadline=2)) as tier:
        reader = tier.open(KEY)
        into = memory(meta.stored_part)
        began = own_seconds()
        with pytest.raises(TimeoutError):
            reader.read(0, 1, [into])
        assert own_seconds() - began < 3.5
        reader.close()


def test_the_fake_server_can_be_read_from():
    """Else every answer of the tests above would be an error for another reason."""
    with FakeServer(honest) as server, contextlib.closing(RedisTier(parse_redis_url(server.url), deadline=5)) as tier:
        assert taken(tier) == bytes(stored(meta_of(KEY)))
        assert tier.contains([KEY]) == [True]
