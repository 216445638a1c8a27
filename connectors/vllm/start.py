"""Opens the cache engine of a vLLM engine, with the sizes and names that its workers report."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmc.blend.markers import Markers
from lmc.config.settings import Settings
from lmc.connectors.vllm.messages import WorkerFacts
from lmc.connectors.vllm.scheduler.kv_groups import KVGroups
from lmc.documents.events import DocumentEvents
from lmc.documents.publisher import DocumentPublisher
from lmc.engine import CacheEngine
from lmc.errors import ConfigError
from lmc.keys import Namespace
from lmc.open_store import open_store
from lmc.shapes import KVShape
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.tiers.tier import Tier
from lmc.storage.worker_parts import Parallelism

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Setup:
    """The objects and facts that the scheduler's side of the connector needs."""

    engine: CacheEngine
    groups: KVGroups  # the engine's KV cache groups, with its block pool
    stages: tuple[int, ...]  # number of layers of each pipeline stage
    ranks: int  # number of workers
    batch_tokens: int  # maximal number of tokens that the engine computes in a step
    decode_tokens: int = 1  # maximal number of tokens that a request that decodes computes in a step
    longest: int  # maximal number of tokens of a request; the model may lack RoPE angles for later positions
    by_priority: bool  # The engine serves requests by priority, and not in the order of arrival.
    blends: bool  # The model can be blended, and the settings allow it.
    refused: str = ""  # why nothing is blended; empty if `blends`
    markers: Markers | None = None  # the markers that split prompts; None without a tokenizer or blending
    tokenizer: Any = None
    caches_prefixes: bool = True  # The engine uses its own prefix cache.
    announces: bool = False  # KV events are enabled.
    extra_keys: Callable[[Any, int, int], tuple[Any, ...] | None] | None = None  # extra keys of a block, for KV events
    hash_blocks: Callable[[Any], list[bytes]] | None = None  # the engine's hashes of a request, for `lmc explain`
    trace: Callable[[Any, str, float, float, Mapping[str, Any]], None] | None = None  # sends a span, if vLLM traces
    counts_images: bool = False  # The engine numbers images instead of hashing them.
    clock: Callable[[], float] = time.monotonic


def settings_of_engine(settings: Settings, engines: int, number: int) -> Settings:
    """Return the settings of one of several data-parallel engines: each has its own directory on disk."""
    if engines == 1 or settings.local_disk is None:
        return settings
    return settings.model_copy(update={"local_disk": settings.local_disk / f"dp{number}"})


def with_fitting_chunks(settings: Settings, block_size: int) -> Settings:
    """Return settings whose chunks consist of whole blocks.

    For models with a state, vLLM makes blocks as large as a state, and their size is known only at start.
    """
    size = -(-settings.chunk_size // block_size) * block_size
    if size == settings.chunk_size:
        return settings
    log.info("raised chunk_size from %d to %d, a multiple of the block size %d", settings.chunk_size, size, block_size)
    return settings.model_copy(update={"chunk_size": size})


def check_chunk_size(settings: Settings, block_size: int) -> None:
    """Raise `ConfigError` if a chunk does not consist of whole blocks."""
    if settings.chunk_size % block_size:
        near = max(1, round(settings.chunk_size / block_size)) * block_size
        raise ConfigError(
            f"chunk_size = {settings.chunk_size} is not a multiple of the engine's block size of {block_size} tokens; "
            f"set chunk_size (LMC_CHUNK_SIZE) to {near}, or --block-size to a divisor of it"
        )


def layers_of_stages(workers: Sequence[WorkerFacts]) -> tuple[int, ...]:
    """Return how many layers each pipeline stage has."""
    return tuple(len(worker.page_bytes) for worker in sorted(workers, key=lambda w: w.rank) if worker.rank[1] == 0)


def open_engine(
    settings: Settings,
    workers: Sequence[WorkerFacts],
    groups: KVGroups,
    model: str,
    hashing: str,
    *,
    tiers: Sequence[Tier] | None = None,
    prefix: Sequence[int] = (),
    name: str = "",
    tokenizer: str = "",
) -> CacheEngine:
    """Create the slab and open the tiers, by default the tiers of the settings.

    `model` is the model's identity, and `hashing` is the algorithm of the engine's block hashes. A chunk has one part
    for each layer and rank. Documents are learned after the tokens of `prefix`. `name` is the model's name for
    operators, and `tokenizer` is the path or id of its tokenizer. Raises `ConfigError`, `NoMemory` or `TierUnusable`.
    """
    check_chunk_size(settings, groups.block_size)
    first, ranks = workers[0], max(worker.rank[1] for worker in workers) + 1
    stages, dtype = layers_of_stages(workers), getattr(torch, first.dtype.removeprefix("torch."))
    shape = KVShape(
        layers=sum(stages), kv_heads=first.kv_heads, head_dim=first.head_dim, value_dim=first.value_dim, dtype=dtype
    )
    page_bytes = max(size for worker in workers for size in worker.page_bytes)
    layout = ChunkLayout(
        Parallelism(stages, ranks), page_bytes * (settings.chunk_size // groups.block_size), dtype.itemsize
    )
    pages = "|".join(f"{worker.rank}{worker.page_bytes}{worker.layout}" for worker in workers)
    namespace = Namespace.of(
        shape,
        model=model,
        rope=first.rope,
        chunk_size=settings.chunk_size,
        layout=f"{pages}|block {groups.block_size}|{hashing}",
        tensor_parallel=ranks,
    )
    if first.dtypes:  # The shape has one of them, and layers of the same shape may have other types.
        namespace = replace(namespace, dtype=first.dtypes)
    store = open_store(settings, layout, shared=True, tiers=tiers, model=name, tokenizer=tokenizer)
    return CacheEngine(
        settings,
        store,
        layout,
        shape,
        namespace,
        prefix=prefix,
        model=name,
        divisible=not groups.windowed,
        states=bool(groups.states),
        processor=first.processor,
    )


def publisher_if_wanted(engine: CacheEngine, number: int) -> DocumentPublisher | None:
    """Return a publisher of document events; None if the settings name no address for it."""
    address = engine.settings.document_events
    if not address:
        return None
    events = DocumentEvents(engine.store.changes, engine.known.get, engine.names.salt_of, engine.background)
    return DocumentPublisher(address, events, number)
