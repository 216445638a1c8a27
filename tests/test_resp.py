"""A connection to Redis, with a peer that is slow in every way: nobody waits for it longer than it has time."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from storage_fakes import own_seconds

from lmc.storage.tiers.redis.resp import Connection, ProtocolError, command

DEADLINE = 0.4
SOON = 1.5  # seconds: the deadline, and room for a machine that is busy with something else


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with socket.create_connection(listening.getsockname()) as ours, listening.accept()[0] as theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            yield ours, theirs


def drip(act: Callable[[], object]) -> threading.Event:
    """Do something small again and again, until the other side has gone or the event is set."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.05):
            try:
                if not act():
                    return
            except OSError:
                return

    threading.Thread(target=run, daemon=True).start()
    return over


@pytest.mark.parametrize("size", [8 << 20, 200 << 10], ids=["many pieces", "one piece"])
def test_a_peer_that_takes_a_little_at_a_time_is_as_good_as_away(pair, size):
    """The kernel says what it could send within the deadline, however little: a writer was held up for minutes."""
    ours, theirs = pair
    over = drip(lambda: theirs.recv(4096))
    began = own_seconds()
    with pytest.raises(TimeoutError):
        Connection(ours, DEADLINE).send(memoryview(bytes(size)))
    assert own_seconds() - began < SOON
    over.set()


@pytest.mark.parametrize("begun", [b"$100000\r\n", b""], ids=["value", "line"])
def test_a_peer_that_says_a_byte_at_a_time_is_as_good_as_away(pair, begun):
    ours, theirs = pair
    theirs.sendall(begun)
    over = drip(lambda: theirs.send(b"+"))
    began = own_seconds()
    with pytest.raises(TimeoutError):
        Connection(ours, DEADLINE).reply()
    assert own_seconds() - began < SOON
    over.set()


def test_the_time_of_an_answer_counts_from_its_question_and_not_from_when_it_is_waited_for(pair):
    """Whoever had waited for another server first waited for this one as long once more."""
    connection = Connection(pair[0], 2.0)
    connection.post([command("PING")])
    time.sleep(1.5)
    began = own_seconds()
    with pytest.raises(TimeoutError):
        connection.collect(1)
    assert own_seconds() - began < 1.5


def test_an_answer_that_came_while_nobody_looked_is_taken_however_late(pair):
    ours, theirs = pair
    connection = Connection(ours, 0.05)
    connection.post([command("PING")])
    theirs.sendall(b"+PONG\r\n")
    time.sleep(0.1)
    assert connection.collect(1) == [b"PONG"]


def test_answers_that_somebody_else_is_owed_are_not_taken_for_one_s_own(pair):
    connection = Connection(pair[0], DEADLINE)
    with pytest.raises(ProtocolError):
        connection.collect(1)
    connection.post([command("PING")])
    for use in (connection.drain, lambda: connection.post([command("PING")])):
        with pytest.raises(ProtocolError):
            use()


def test_a_connection_that_another_thread_closes_is_an_error_and_no_crash(pair):
    ours, _ = pair
    connection = Connection(ours, DEADLINE)
    connection.post([command("PING")])
    ours.close()
    assert connection.ready()
    with pytest.raises(OSError, match="Bad file descriptor"):
        connection.collect(1)
