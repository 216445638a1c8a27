"""Follows an engine's KV events, as vLLM publishes them, and keeps the index of blocks up to date.

When batches are lost for good, what was known of the engine is dropped.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from lmc.router.event_stream import EventStream, Lost
from lmc.router.kv_index import BlockIndex, BlockName, CacheSource, Medium

log = logging.getLogger(__name__)

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks that follow each other are on a medium. The fields are those of vLLM that count here."""

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[Token]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks have left a medium."""

    block_hashes: list[BlockName]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The engine has dropped its prefix cache."""


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one step of an engine."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockEvents:
    """The events of one cache, for the index."""

    def __init__(self, index: BlockIndex, source: CacheSource, lag: Callable[[float], None] | None = None) -> None:
        """`lag` is told the age of each batch in seconds."""
        self._index, self._source, self._lag = index, source, lag
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.unreadable = 0  # batches, for which what was known was dropped

    async def follow(self, stream: EventStream) -> None:
        """Follow the engine until cancelled."""
        async for event in stream.batches():
            if isinstance(event, Lost):
                self._index.drop(self._source)
            else:
                self.take(event.payload)
            await asyncio.sleep(0)  # Many batches may be there at once, and requests have to be answered between them.

    def take(self, payload: bytes) -> None:
        """Apply a batch. If it cannot be read, what is known of the source is dropped."""
        try:
            batch = self._decoder.decode(payload)
            if self._lag is not None:
                self._lag(max(0.0, time.time() - batch.ts))
            for event in batch.events:
                self._apply(event)
        except msgspec.MsgspecError as error:
            if not self.unreadable:
                log.warning("lmc router: KV events of %s cannot be read: %s", self._source.engine, error)
            self.unreadable += 1
            self._index.unreadable += 1
            self._index.drop(self._source)

    def _apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self._index.cleared(self._source)
            return
        medium: Medium = ((event.medium or "gpu").lower(), event.group_idx)
        if isinstance(event, BlockRemoved):
            self._index.removed(self._source, event.block_hashes, medium)
            return
        names, extra, size = event.block_hashes, event.extra_keys, event.block_size
        if size <= 0 or len(event.token_ids) != size * len(names) or (extra is not None and len(extra) != len(names)):
            raise msgspec.ValidationError(f"{len(event.token_ids)} tokens do not make {len(names)} blocks of {size}")
        self._index.stored(
            self._source, names, event.parent_block_hash, event.token_ids, size, medium, event.lora_name or "", extra
        )
