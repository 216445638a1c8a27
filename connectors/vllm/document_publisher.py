"""Publishes document events over ZeroMQ as vLLM publishes KV events: in numbered batches, which can be asked for again.

LMC_DOCUMENT_EVENTS=tcp://*:5558                 where subscribers connect; the topic is `lmc.documents`
LMC_DOCUMENT_EVENTS=tcp://*:5558,tcp://*:5559    and where they ask for batches that they have missed
"""

import os
import re
import time
from collections.abc import Sequence
from typing import Any

import zmq

from lmc.connectors.vllm import vllm_api
from lmc.connectors.vllm.document_events import DocumentMoved
from lmc.errors import ConfigError

ADDRESS, TOPIC = "LMC_DOCUMENT_EVENTS", "lmc.documents"


class DocumentPublisher:
    """One engine's publisher. Engine number n of several data-parallel ones has the ports + n."""

    def __init__(self, address: str, engine: int = 0) -> None:
        """Raise `ConfigError` if the addresses cannot be had."""
        where, _, replay = address.replace(" ", "").partition(",")
        hint = "give one such as tcp://*:5558"
        if not all(re.fullmatch(r"tcp://.+:\d+|(ipc|inproc)://.+", one) for one in filter(None, (where, replay))):
            raise ConfigError(f"{ADDRESS} = {address} is no address of ZeroMQ: {hint}")
        try:
            self._zmq: Any = vllm_api.ZmqEventPublisher(engine, where, replay or None, topic=TOPIC)
        except (zmq.ZMQError, ValueError) as error:
            raise ConfigError(f"{ADDRESS} = {address} cannot be had ({error}): {hint}") from error

    def publish(self, moved: Sequence[DocumentMoved]) -> None:
        """Send events, as one batch."""
        if moved:
            self._zmq.publish(vllm_api.EventBatch(ts=time.time(), events=list(map(_message, moved))))

    def close(self) -> None:
        """Send what waits, and close the sockets."""
        self._zmq.shutdown()


def _message(moved: DocumentMoved) -> dict[str, Any]:
    """Return an event as a map with its type, which is how vLLM's KV events are encoded."""
    kind = {"type": "DocumentStored", "tokens": moved.tokens} if moved.stored else {"type": "DocumentRemoved"}
    return kind | {"digest": moved.digest, "document": moved.document, "medium": moved.medium, "salt": moved.salt}


def publisher_if_wanted(engine: int) -> DocumentPublisher | None:
    """Return the publisher that the environment asks for, if it does."""
    address = os.environ.get(ADDRESS, "")
    return DocumentPublisher(address, engine) if address else None
