"""Publishes document events over ZeroMQ like vLLM's KV events: in numbered batches that subscribers can request again.

LMC_DOCUMENT_EVENTS=tcp://*:5558                 address for subscribers; the topic is `lmc.documents`
LMC_DOCUMENT_EVENTS=tcp://*:5558,tcp://*:5559    the second address is for requests for missed batches

A message has three frames: topic, number (8 bytes, from 0 on), and a msgpack list. The list has the time in seconds
since 1970, the events, and the data-parallel rank of the engine.
"""

import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

from lmc.documents.events import DocumentEvents, DocumentMoved
from lmc.errors import ConfigError
from lmc.http.address import (
    DOCUMENT_EVENTS,
    DOCUMENT_TOPIC,
    EVENTS_HINT,
    address_of_engine,
    event_addresses,
    may_be_ipv6,
)
from lmc.shapes import MIB
from lmc.storage.tiers.tier_guard import logged

POLL_SECONDS = 0.2  # interval between two checks for changes
ERROR_PAUSE_SECONDS = 5.0  # pause after an error
# Batches kept for subscribers that missed them: up to this number, and up to this size. An event takes 230 bytes, so
# there is room for 370,000 documents on two media, as many as are known by default, and for later changes.
MAX_REPLAY_BATCHES, MAX_REPLAY_BYTES = 10_000, 256 * MIB
MAX_SUBSCRIBER_BATCHES = 100_000  # maximum number of batches queued for a slow subscriber; it loses further batches
LAST = (-1).to_bytes(8, "big", signed=True)  # the number in the last message of a response
MAX_BATCH_EVENTS = 1000  # maximum number of events in a batch


class DocumentPublisher:
    """Publishes which documents appeared and left. Engine n of several data-parallel ones adds n to the ports.

    Its own thread checks for changes, so changes are also published while the engine is idle.
    """

    def __init__(
        self, address: str, events: DocumentEvents, engine: int = 0, *, setting: str = DOCUMENT_EVENTS
    ) -> None:
        """Bind the sockets. Errors name the `setting` that contains the address.

        Raises `ConfigError` if an address cannot be bound, or as `event_addresses`.
        """
        addresses = event_addresses(address, setting)
        import msgspec
        import zmq

        self._pack, self._engine = msgspec.msgpack.Encoder().encode, engine
        self._number, self._kept, self._kept_bytes = 0, deque[tuple[bytes, bytes]](), 0
        self._lost = False  # whether subscribers cannot know yet that a batch is missing
        with ExitStack() as opened:
            try:
                self._sockets: list[Any] = [
                    opened.enter_context(zmq.Context.instance().socket(kind))
                    for kind, _ in zip((zmq.PUB, zmq.ROUTER), addresses, strict=False)
                ]
                for socket, target in zip(self._sockets, addresses, strict=True):
                    socket.set_hwm(MAX_SUBSCRIBER_BATCHES)
                    socket.linger = 0
                    socket.ipv6 = may_be_ipv6(target)
                    socket.bind(address_of_engine(target, engine))
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot listen at {setting} = {address} ({error}): {EVENTS_HINT}") from error
            self._close_sockets = opened.pop_all().close
        self._events, self._ended = events, threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmc-document-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the remaining events, and close the sockets."""
        self._ended.set()
        self._thread.join()
        self._close_sockets()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                logged(self._answer, then="subscribers must request missed batches again")
                logged(self._publish, then="all documents will be announced again")
            except Exception:  # noqa: BLE001 - it is logged
                self._ended.wait(ERROR_PAUSE_SECONDS)
        logged(self._publish, then="the last changes of documents were not announced")

    def _answer(self) -> None:
        """Wait for `POLL_SECONDS`, and meanwhile answer requests for missed batches."""
        if len(self._sockets) == 1:
            self._ended.wait(POLL_SECONDS)
            return
        replay_socket, until = self._sockets[1], time.monotonic() + POLL_SECONDS
        while (remaining := until - time.monotonic()) > 0 and replay_socket.poll(1000 * remaining):
            client, *request = replay_socket.recv_multipart()
            if len(request) == 2 and len(request[1]) == len(LAST):
                for number, payload in self._kept:
                    if number >= request[1]:
                        replay_socket.send_multipart((client, b"", DOCUMENT_TOPIC.encode(), number, payload))
                replay_socket.send_multipart((client, b"", b"", LAST, b""))

    def _publish(self) -> None:
        """Publish the changes. An error skips a number, so that subscribers notice it and request everything again."""
        try:
            moved = self._events.take()
            for at in range(0, len(moved) or self._lost, MAX_BATCH_EVENTS):  # An empty batch shows that one is missing.
                self._send(list(map(_message, moved[at : at + MAX_BATCH_EVENTS])))
            self._lost = False
        except Exception:
            self._number += 1
            self._lost = True
            self._events.begin_anew()
            raise

    def _send(self, events: list[dict[str, Any]]) -> None:
        batch = self._number.to_bytes(8, "big"), self._pack([time.time(), events, self._engine])
        self._sockets[0].send_multipart((DOCUMENT_TOPIC.encode(), *batch))
        self._number += 1
        if len(self._sockets) == 1:  # No subscriber can request batches again.
            return
        self._kept.append(batch)
        self._kept_bytes += len(batch[1])
        while len(self._kept) > MAX_REPLAY_BATCHES or self._kept_bytes > MAX_REPLAY_BYTES:
            _, payload = self._kept.popleft()
            self._kept_bytes -= len(payload)


def _message(moved: DocumentMoved) -> dict[str, Any]:
    """Return an event as a map with its type, in the encoding of vLLM's KV events."""
    kind = {"type": "DocumentStored", "tokens": moved.tokens} if moved.stored else {"type": "DocumentRemoved"}
    names = {"document": moved.document, "medium": moved.medium, "salt": moved.salt}
    return kind | {"digest": moved.digest, "model": moved.model, "tenant": moved.tenant, **names}
