"""Publishes document events over ZeroMQ as vLLM publishes KV events: in numbered batches, which can be asked for again.

LMC_DOCUMENT_EVENTS=tcp://*:5558                 where subscribers connect; the topic is `lmc.documents`
LMC_DOCUMENT_EVENTS=tcp://*:5558,tcp://*:5559    and where they ask for batches that they have missed
"""

import os
import re
import threading
import time
from typing import Any

import zmq

from lmc.connectors.vllm import vllm_api
from lmc.connectors.vllm.document_events import ADDRESS, DocumentEvents, DocumentMoved
from lmc.engine import CacheEngine
from lmc.errors import ConfigError
from lmc.storage.tier_guard import logged

TOPIC = "lmc.documents"
LOOK_SECONDS = 0.2  # between two looks for changes


class DocumentPublisher:
    """One engine's publisher. Engine number n of several data-parallel ones has the ports + n.

    A thread of its own looks for changes, so that they are published while the engine is idle, too.
    """

    def __init__(self, address: str, events: DocumentEvents, engine: int = 0) -> None:
        """Raise `ConfigError` if the addresses cannot be had."""
        where, _, replay = address.replace(" ", "").partition(",")
        hint = "give one such as tcp://*:5558"
        if not all(re.fullmatch(r"tcp://.+:\d+|(ipc|inproc)://.+", one) for one in filter(None, (where, replay))):
            raise ConfigError(f"{ADDRESS} = {address} is no address of ZeroMQ: {hint}")
        # vLLM's own class listens at "*" only, and connects to other addresses.
        listening = {"_is_bind_endpoint": staticmethod(lambda endpoint: True)}
        publisher = type("Listening", (vllm_api.ZmqEventPublisher,), listening)
        try:
            self._zmq: Any = publisher(engine, where, replay or None, topic=TOPIC)
        except (zmq.ZMQError, ValueError) as error:
            raise ConfigError(f"{ADDRESS} = {address} cannot be had ({error}): {hint}") from error
        self._events, self._ended = events, threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmc-document-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is left, and close the sockets."""
        self._ended.set()
        self._thread.join()
        self._zmq.shutdown()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            logged(self._publish, then="documents that changed now are announced with the next change")
        logged(self._publish, then="the last changes of documents are not announced")

    def _publish(self) -> None:
        if moved := self._events.take():
            self._zmq.publish(vllm_api.EventBatch(ts=time.time(), events=list(map(_message, moved))))


def _message(moved: DocumentMoved) -> dict[str, Any]:
    """Return an event as a map with its type, which is how vLLM's KV events are encoded."""
    kind = {"type": "DocumentStored", "tokens": moved.tokens} if moved.stored else {"type": "DocumentRemoved"}
    names = {"document": moved.document, "medium": moved.medium, "salt": moved.salt, "tenant": moved.tenant}
    return kind | {"digest": moved.digest, **names}


def publisher_if_wanted(engine: CacheEngine, number: int) -> DocumentPublisher | None:
    """Return the publisher that the environment asks for, if it does."""
    address = os.environ.get(ADDRESS, "")
    if not address:
        return None
    events = DocumentEvents(engine.store.changes, engine.known.get, engine.salt_of, engine.background)
    return DocumentPublisher(address, events, number)
