"""Receives engines' events over ZeroMQ in vLLM's format: numbered batches. Some may be lost.

Lost batches are requested again at the engine's replay address. A loss that cannot be replayed is reported as `Lost`.
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
from lmc.http.address import may_be_ipv6

log = logging.getLogger(__name__)

QUIET_SECONDS = 10.0  # without a batch, before a replay checks whether batches were lost
REPLAY_SECONDS = 5.0  # timeout for each replayed batch
END = -1  # number of the message that ends a replay


class Lost(NamedTuple):
    """Earlier events are unknown: batches are lost for good, or this is the start of the stream."""


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
        """`replay` is the replay address, if the engine has one. `from_start` replays all batches at the start."""
        self._address, self._replay, self._topic, self._from_start = address, replay, topic, from_start
        self._quiet, self._patience = int(1000 * quiet_seconds), int(1000 * replay_seconds)
        self._next: int | None = None  # the number of the next batch
        self._last = b""  # payload of the batch before it

    async def batches(self) -> AsyncIterator[bytes | Lost]:
        """Yield batches in order, as msgpack, and `Lost` where some are missing, including before the first one.

        Raises `ConfigError` if an address is invalid.
        """
        with ExitStack() as opened:
            context = Context.instance()  # shared by all engines, because each context has a thread
            socket = opened.enter_context(_connected(context, SUB, self._address))
            socket.subscribe(self._topic)
            replayed = await self._replayed(context, 0)
            if replayed is not None:  # Batches published before the first one arrives can be replayed too.
                self._next, self._last = (replayed[-1][0] + 1, replayed[-1][1]) if replayed else (0, b"")
            if not self._from_start or not replayed or replayed[0][0] != 0:
                yield Lost()
            for number, payload in (replayed or ()) if self._from_start else ():
                yield self._taken(number, payload)
            while True:
                frames = await socket.recv_multipart() if await socket.poll(self._quiet) else None
                async for event in self._following(context, frames):
                    yield event

    async def _following(self, context: Context, frames: list[bytes] | None) -> AsyncIterator[bytes | Lost]:
        """Yield the events that follow from a message, or from none for a while."""
        number, payload = _parted(frames) if frames else (None, b"")
        if frames and number is None:
            log.warning("lmc router: %s sent a message that is not a batch of events", self._address)
        elif number is not None and self._next in (None, number):
            if self._next is None:  # Others may have been published before this connection.
                yield Lost()
            yield self._taken(number, payload)
        elif self._next is not None and (number != self._next - 1 or payload != self._last):
            async for event in self._catch_up(context, number, payload):
                yield event

    async def _catch_up(self, context: Context, number: int | None, payload: bytes) -> AsyncIterator[bytes | Lost]:
        """Yield the missing batches, and then the one that arrived.

        The replay includes the last batch before them: if that has changed, the publisher was restarted.
        """
        assert self._next is not None
        replayed = await self._replayed(context, max(self._next - 1, 0))
        if replayed and replayed[0] == (self._next - 1, self._last):
            del replayed[0]
        elif not self._next and not (replayed and replayed[0][0]):
            pass  # Nothing had been published at the start.
        elif number is None and replayed is None:
            return  # The publisher offers no replay.
        else:
            yield Lost()
            self._next, replayed = None, await self._replayed(context, 0)
        while replayed:
            for batch in replayed:
                yield self._taken(*batch)
            if number is None or self._next is None or number <= self._next:
                break
            replayed = await self._replayed(context, self._next)  # A publisher drops batches when its queue is full.
            if replayed and replayed[0][0] != self._next:
                break
        if number is None or (self._next is not None and number < self._next):
            return
        if self._next is not None and number != self._next:
            yield Lost()
        yield self._taken(number, payload)

    def _taken(self, number: int, payload: bytes) -> bytes:
        self._next, self._last = number + 1, payload
        return payload

    async def _replayed(self, context: Context, first: int) -> list[tuple[int, bytes]] | None:
        """Return the batches from number `first` on that the publisher still has, up to the first gap.

        Returns None without a replay address or an answer. vLLM answers with one message per batch and a last one with
        the number -1, which needs a DEALER socket.
        """
        if not self._replay:
            return None
        batches: list[tuple[int, bytes]] = []
        with _connected(context, DEALER, self._replay) as socket:
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while await socket.poll(self._patience):
                _, *frames = await socket.recv_multipart()
                number, payload = _parted(frames)
                if number in (None, END) or (batches and number != batches[-1][0] + 1):
                    return batches
                batches.append((number or 0, payload))
                await asyncio.sleep(0)  # Messages that have arrived are received without a pause.
        return batches or None  # The end message may have been dropped too.


def _connected(context: Context, kind: int, address: str) -> Socket:
    """Return a connected socket. Raises `ConfigError` if the address is invalid."""
    socket = context.socket(kind)
    socket.linger = 0
    if kind == DEALER:
        socket.rcvhwm = 0
    socket.ipv6 = may_be_ipv6(address)
    try:
        socket.connect(address)
    except ZMQError as error:
        socket.close()
        message = f"invalid ZeroMQ address {address} ({error}): use one such as tcp://host:5557"
        raise ConfigError(message) from None
    return socket


def _parted(frames: list[bytes]) -> tuple[int | None, bytes]:
    """Return the number and the payload of a message. The number is None if it is not a batch."""
    valid = len(frames) == 3 and len(frames[1]) == 8
    return (int.from_bytes(frames[1], "big", signed=True), frames[2]) if valid else (None, b"")
