"""Opens the chunk store that the settings name: in this process, or in a cache server.

Connectors open a store, and hand it to a cache engine.
"""

import logging
from collections.abc import Sequence

import torch

from lmc.config.settings import Settings
from lmc.errors import need_msgspec
from lmc.keys import model_label
from lmc.shapes import GIB
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.contract import ChunkStore
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.opening import open_tiers
from lmc.storage.tiers.tier import Tier

log = logging.getLogger(__name__)


def check_server(settings: Settings) -> None:
    """Wait until the cache server of the settings responds, if there is one, before a model is loaded.

    Raises `TierUnusable` if it does not start, and `ConfigError` if it has another version.
    """
    if settings.server is not None:
        need_msgspec()
        from lmc.server.client.connection import wait_for_server

        wait_for_server(settings.server)


def open_store(
    settings: Settings,
    layout: ChunkLayout,
    *,
    device: torch.device | str = "cpu",
    shared: bool = False,
    tiers: Sequence[Tier] | None = None,
    model: str = "",
    tokenizer: str = "",
) -> ChunkStore:
    """Open a store for chunks of one layout.

    Without a server, the store has slabs in memory and on `device`, over `tiers` or over those of the settings. With
    `shared`, other processes can map the memory, and no slab is on `device`. A server gets the `model`'s name and the
    location of its `tokenizer`. Raises `StorageError` or `ConfigError`.
    """
    if settings.server is not None:
        need_msgspec()
        from lmc.server.client.remote_store import RemoteStore

        return RemoteStore(
            settings.server,
            layout,
            deadline=settings.load_deadline,
            model=model_label(model),
            tokenizer=tokenizer,
            chunk_size=settings.chunk_size,
        )
    budget, size = settings.max_local_cpu_size * GIB, layout.part_bytes
    slab = Slab.of_size(budget, layout.parallelism, size, shared=shared)
    if shared and settings.max_local_device_size:
        log.warning("max_local_device_size is for transformers only: vLLM has the memory of its GPU")
    on_device = 0 if shared else settings.max_local_device_size * GIB
    device_slab = Slab.of_size(on_device, layout.parts, size, device) if on_device else None
    tiers = open_tiers(settings, layout.item_bytes) if tiers is None else tiers
    return Store(slab, tiers, device=device_slab, document_share=settings.document_share)
