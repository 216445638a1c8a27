"""Opens the chunk store that the settings name: in this process, or in a cache server."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from lmc.config.settings import Settings
from lmc.documents.keeper import DocumentKeeper
from lmc.documents.known import KnownDocument
from lmc.documents.learn_queue import LearnQueue, Unlearned
from lmc.engine.geometry import Geometry
from lmc.errors import need_msgspec
from lmc.shapes import GIB
from lmc.storage.contract import ChunkStore
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.opening import open_tiers
from lmc.storage.tiers.tier import Tier

if TYPE_CHECKING:
    from lmc.server.client.remote_store import RemoteStore

log = logging.getLogger(__name__)


def open_store(
    settings: Settings,
    geometry: Geometry,
    *,
    device: torch.device | str = "cpu",
    shared: bool = False,
    tiers: Sequence[Tier] | None = None,
    model: str = "",
    tokenizer: str = "",
) -> ChunkStore:
    """Open a store for the chunks of a geometry.

    Without a server, the store has slabs in memory and on `device`, over `tiers` or over those of the settings. With
    `shared`, other processes can map the memory, and no slab is on `device`. A server gets the `model`'s name and the
    location of its `tokenizer`. Raises `StorageError` or `ConfigError`.
    """
    if settings.server is not None:
        return _attached(settings, geometry, model, tokenizer)
    budget, size = settings.max_local_cpu_size * GIB, geometry.part_bytes
    slab = Slab.of_size(budget, geometry.shares, size, shared=shared)
    if shared and settings.max_local_device_size:
        log.warning("max_local_device_size is for transformers only: vLLM has the memory of its GPU")
    on_device = 0 if shared else settings.max_local_device_size * GIB
    device_slab = Slab.of_size(on_device, geometry.parts, size, device) if on_device else None
    tiers = open_tiers(settings, geometry.item_bytes) if tiers is None else tiers
    return Store(slab, tiers, device=device_slab, document_share=settings.document_share)


def keeper_in_server(store: ChunkStore, unqueue: Callable[[KnownDocument], object]) -> DocumentKeeper:
    """Return a keeper that sends pins and time limits to a store's cache server; `unqueue` as for `RemoteKeeper`."""
    from lmc.server.client.remote_keeper import RemoteKeeper

    remote = _in_server(store)
    assert remote is not None
    return RemoteKeeper(remote, unqueue=unqueue)


def share_learning(
    store: ChunkStore,
    queue: LearnQueue,
    namespaces: Callable[[], Iterable[bytes]],
    has_time: Callable[[], bool],
    learn: Callable[[Unlearned], object],
) -> None:
    """Share the queue of documents to learn with the other clients of a store's cache server, if it has one.

    The arguments are those of `RemoteLearning`.
    """
    if (remote := _in_server(store)) is not None:
        from lmc.server.client.remote_learning import RemoteLearning

        remote.learning = RemoteLearning(queue, namespaces, has_time, learn)


def administered_at(store: ChunkStore, address: str, explain_token: str) -> None:
    """Send this process' admin address, which also explains prompts, to a store's cache server, if it has one.

    The server sends `explain_token` when it requests an explanation.
    """
    if (remote := _in_server(store)) is not None:
        remote.administered_at(address, explain_token)


def _in_server(store: ChunkStore) -> "RemoteStore | None":
    """Return a store as `RemoteStore` if it is in a cache server, or None if it is in this process."""
    if isinstance(store, Store):
        return None
    from lmc.server.client.remote_store import RemoteStore

    assert isinstance(store, RemoteStore)
    return store


def _attached(settings: Settings, geometry: Geometry, model: str, tokenizer: str) -> ChunkStore:
    need_msgspec()
    from lmc.server.client.remote_store import RemoteStore
    from lmc.server.sizes import Sizes

    assert settings.server is not None
    sizes = Sizes(geometry.shares, geometry.part_bytes, geometry.item_bytes)
    return RemoteStore(
        settings.server,
        sizes,
        deadline=settings.load_deadline,
        model=model,
        tokenizer=tokenizer,
        chunk_size=geometry.chunk_size,
    )
