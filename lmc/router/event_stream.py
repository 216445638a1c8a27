"""Events of engines over ZeroMQ, in vLLM's format: numbered batches, of which some may be lost on the way.

Lost batches are asked for again at the address that the engine offers for it. What cannot be had again is reported.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import NamedTuple

from zmq import DEALER, SUB
from zmq.asyncio import Context, Socket
from zmq.error import ZMQError

from lmc.errors import ConfigError

log = logging.getLogger(__name__)

QUIET_SECONDS = 10.0  # without a batch, after which it is asked whether the last ones were lost
REPLAY_SECONDS = 5.0  # for which each batch is waited for that was asked for again
END = -1  # the number of the message behind the last of them


class Batch(NamedTuple):
    """A batch of events."""

    payload: bytes  # msgpack


class Lost(NamedTuple):
    """Nobody knows what has happened before: batches are lost for good, or this is the first one that came."""


class EventStream:
    """The batches of one publisher, in order."""

    def __init__(
        self,
        address: str,
        replay: str = "",
        topic: str = "",
        *,
        from_start: bool = False,
        quiet_seconds: float = QUIET_SECONDS,
        replay_seconds: float = REPLAY_SECONDS,
    ) -> None:
        """`replay` is where batches can be asked for again, if that is possible; `from_start` asks for all at once."""
        self._address, self._replay, self._topic, self._from_start = address, replay, topic, from_start
        self._quiet, self._patience = int(1000 * quiet_seconds), int(1000 * replay_seconds)
        self._wanted: int | None = None  # the number of the next batch
        self._last = b""  # the payload of the batch before it

    async def batches(self) -> AsyncIterator[Batch | Lost]:
        """Yield batches in their order, and `Lost` wherever some are missing, also before the first one.

        Raises `ConfigError` if an address is none.
        """
        with ExitStack() as opened:
            context = Context.instance()  # one for all engines: each has a thread of its own
            socket = opened.enter_context(_connected(context, SUB, self._address))
            socket.subscribe(self._topic)
            kept = await self._asked_again(context, 0)
            if kept is not None:  # What is published before the first batch comes can then be asked for, too.
                self._wanted, self._last = (kept[-1][0] + 1, kept[-1][1]) if kept else (0, b"")
            if not self._from_start or not kept or kept[0][0] != 0:
                yield Lost()
            for number, payload in (kept or ()) if self._from_start else ():
                yield self._taken(number, payload)
            while True:
                frames = await socket.recv_multipart() if await socket.poll(self._quiet) else None
                async for event in self._following(context, frames):
                    yield event

    async def _following(self, context: Context, frames: list[bytes] | None) -> AsyncIterator[Batch | Lost]:
        """Yield what follows from a message, or from none having come for a while."""
        number, payload = _parted(frames) if frames else (None, b"")
        if frames and number is None:
            log.warning("lmc router: %s sends something that is no batch of events", self._address)
        elif number is not None and self._wanted in (None, number):
            if self._wanted is None:  # Others may have been published before this connection was made.
                yield Lost()
            yield self._taken(number, payload)
        elif self._wanted is not None and (number != self._wanted - 1 or payload != self._last):
            async for event in self._caught_up(context, number, payload):
                yield event

    async def _caught_up(self, context: Context, number: int | None, payload: bytes) -> AsyncIterator[Batch | Lost]:
        """Yield the batches that have not come, and then the one that has.

        The last one before them is asked for, too: if it is another one now, the publisher has been started anew.
        """
        assert self._wanted is not None
        again = await self._asked_again(context, max(self._wanted - 1, 0))
        if again and again[0] == (self._wanted - 1, self._last):
            del again[0]
        elif not self._wanted and not (again and again[0][0]):
            pass  # Nothing had been published when this began.
        elif number is None and again is None:
            return  # Nobody can be asked.
        else:
            yield Lost()
            self._wanted, again = None, await self._asked_again(context, 0)
        while again:
            for one in again:
                yield self._taken(*one)
            if number is None or self._wanted is None or number <= self._wanted:
                break
            again = await self._asked_again(context, self._wanted)  # A publisher drops what its queue has no room for.
            if again and again[0][0] != self._wanted:
                break
        if number is None or (self._wanted is not None and number < self._wanted):
            return
        if self._wanted is not None and number != self._wanted:
            yield Lost()
        yield self._taken(number, payload)

    def _taken(self, number: int, payload: bytes) -> Batch:
        self._wanted, self._last = number + 1, payload
        return Batch(payload)

    async def _asked_again(self, context: Context, first: int) -> list[tuple[int, bytes]] | None:
        """Return the batches from number `first` on that the publisher still has, up to the first gap.

        Returns None if it cannot be asked, or does not answer. vLLM answers with one message for each batch and a last
        one whose number is -1, so that it needs a DEALER.
        """
        if not self._replay:
            return None
        found: list[tuple[int, bytes]] = []
        with _connected(context, DEALER, self._replay) as socket:
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while await socket.poll(self._patience):
                _, *frames = await socket.recv_multipart()
                number, payload = _parted(frames)
                if number in (None, END) or (found and number != found[-1][0] + 1):
                    return found
                found.append((number or 0, payload))
                await asyncio.sleep(0)  # What is there already is received without a pause.
        return found or None  # The last message may have been dropped as well.


def _connected(context: Context, kind: int, address: str) -> Socket:
    """Return a socket; raise `ConfigError` if an address is none."""
    socket = context.socket(kind)
    socket.linger = 0
    if kind == DEALER:
        socket.rcvhwm = 0
    try:
        socket.connect(address)
    except ZMQError as error:
        socket.close()
        message = f"{address} is no address of ZeroMQ ({error}): give one such as tcp://host:5557"
        raise ConfigError(message) from None
    return socket


def _parted(frames: list[bytes]) -> tuple[int | None, bytes]:
    """Return the number and the payload of a message of topic, number and payload; None if it is another one."""
    right = len(frames) == 3 and len(frames[1]) == 8
    return (int.from_bytes(frames[1], "big", signed=True), frames[2]) if right else (None, b"")
