"""Publishes document events over ZeroMQ as vLLM publishes KV events: in numbered batches, which can be asked for again.

LMC_DOCUMENT_EVENTS=tcp://*:5558                 where subscribers connect; the topic is `lmc.documents`
LMC_DOCUMENT_EVENTS=tcp://*:5558,tcp://*:5559    and where they ask for batches that they have missed

A subscriber gets messages of three frames: topic, number (8 bytes, the first one is 0), and a list in msgpack of the
time in seconds since 1970, the events, and the number of the engine among several data-parallel ones.
"""

import re
import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

from lmc.documents.events import DocumentEvents, DocumentMoved
from lmc.errors import ConfigError
from lmc.http.address import DOCUMENT_EVENTS, address_of_engine
from lmc.storage.tiers.tier_guard import logged

TOPIC = "lmc.documents"
LOOK_SECONDS = 0.2  # between two looks for changes
AGAIN_SECONDS = 5.0  # after an error
KEPT = 10_000  # batches that can be asked for again
WAITING = 100_000  # batches for a subscriber that is slow; others are lost to it
LAST = (-1).to_bytes(8, "big", signed=True)  # the number in the last message of an answer
MOST_CHANGES = 1000  # in a batch
HINT = "give one such as tcp://*:5558"


def event_addresses(address: str) -> list[str]:
    """Return where events are published, and where they are sent again, if that is wanted.

    Raises `ConfigError` if these are no addresses, or without pyzmq and msgspec.
    """
    try:
        import msgspec  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{DOCUMENT_EVENTS} needs {error.name}: pip install pyzmq msgspec") from None
    addresses = [one for one in address.replace(" ", "").split(",") if one]
    named = all(re.fullmatch(r"tcp://.+:\d+|(ipc|inproc)://.+", one) for one in addresses)
    if not named or len(addresses) not in (1, 2):
        raise ConfigError(f"{DOCUMENT_EVENTS} = {address} is no address of ZeroMQ: {HINT}")
    return addresses


class DocumentPublisher:
    """Publishes the documents that have appeared and left. Number n of several engines has the ports + n.

    A thread of its own looks for changes, so that they are published while the engine is idle, too.
    """

    def __init__(self, address: str, events: DocumentEvents, engine: int = 0) -> None:
        """Raise `ConfigError` if the addresses cannot be had, or as `event_addresses`."""
        addresses = event_addresses(address)
        import msgspec
        import zmq

        self._pack, self._engine = msgspec.msgpack.Encoder().encode, engine
        self._number, self._kept = 0, deque[tuple[bytes, bytes]](maxlen=KEPT)
        self._lost = False  # whether readers have still to notice that a batch is missing
        with ExitStack() as opened:
            try:
                self._sockets: list[Any] = [
                    opened.enter_context(zmq.Context.instance().socket(kind))
                    for kind, _ in zip((zmq.PUB, zmq.ROUTER), addresses, strict=False)
                ]
                for one, where in zip(self._sockets, addresses, strict=True):
                    one.set_hwm(WAITING)
                    one.linger = 0
                    one.bind(address_of_engine(where, engine))
            except zmq.ZMQError as error:
                raise ConfigError(f"{DOCUMENT_EVENTS} = {address} cannot be had ({error}): {HINT}") from error
            self._close_sockets = opened.pop_all().close
        self._events, self._ended = events, threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmc-document-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is left, and close the sockets."""
        self._ended.set()
        self._thread.join()
        self._close_sockets()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                logged(self._answer, then="whoever has asked for batches again has to ask once more")
                logged(self._publish, then="all documents are announced again")
            except Exception:  # noqa: BLE001 - it is logged
                self._ended.wait(AGAIN_SECONDS)
        logged(self._publish, then="the last changes of documents are not announced")

    def _answer(self) -> None:
        """Wait, and meanwhile send batches again to those who ask."""
        if len(self._sockets) == 1:
            self._ended.wait(LOOK_SECONDS)
            return
        asking, until = self._sockets[1], time.monotonic() + LOOK_SECONDS
        while (left := until - time.monotonic()) > 0 and asking.poll(1000 * left):
            client, *question = asking.recv_multipart()
            if len(question) == 2 and len(question[1]) == len(LAST):
                for number, payload in self._kept:
                    if number >= question[1]:
                        asking.send_multipart((client, b"", TOPIC.encode(), number, payload))
                asking.send_multipart((client, b"", b"", LAST, b""))

    def _publish(self) -> None:
        """Send what has changed. An error costs a number, so that readers notice and ask for everything again."""
        try:
            moved = self._events.take()
            for at in range(0, len(moved) or self._lost, MOST_CHANGES):  # An empty batch shows that one is missing.
                self._send(list(map(_message, moved[at : at + MOST_CHANGES])))
            self._lost = False
        except Exception:
            self._number += 1
            self._lost = True
            self._events.begin_anew()
            raise

    def _send(self, events: list[dict[str, Any]]) -> None:
        batch = self._number.to_bytes(8, "big"), self._pack([time.time(), events, self._engine])
        self._sockets[0].send_multipart((TOPIC.encode(), *batch))
        self._kept.append(batch)
        self._number += 1


def _message(moved: DocumentMoved) -> dict[str, Any]:
    """Return an event as a map with its type, which is how vLLM's KV events are encoded."""
    kind = {"type": "DocumentStored", "tokens": moved.tokens} if moved.stored else {"type": "DocumentRemoved"}
    names = {"document": moved.document, "medium": moved.medium, "salt": moved.salt}
    return kind | {"digest": moved.digest, "model": moved.model, "tenant": moved.tenant, **names}
