"""Opens the tiers that the settings name."""

import logging
from contextlib import ExitStack, closing

from lmc.config import Settings
from lmc.errors import ConfigError
from lmc.redis_url import parse_redis_url
from lmc.shapes import GIB
from lmc.storage.codec import Coded
from lmc.storage.disk import DiskTier
from lmc.storage.tier import Tier

log = logging.getLogger(__name__)


def open_tiers(settings: Settings, item_bytes: int) -> list[Tier]:
    """Return the tiers, fastest first. Codecs split numbers of `item_bytes`.

    Raises `TierUnusable` or `ConfigError`; then nothing stays open.
    """
    tiers: list[Tier] = []
    with ExitStack() as opened:
        if settings.local_disk is not None:
            capacity = int(settings.max_local_disk_size * GIB)
            if settings.max_local_disk_size < settings.max_local_cpu_size:
                log.warning(
                    "max_local_disk_size (%s GB) is smaller than max_local_cpu_size (%s GB): a part of what is in "
                    "memory will not be on the disk, and is lost at a restart",
                    settings.max_local_disk_size,
                    settings.max_local_cpu_size,
                )
            disk = DiskTier(settings.local_disk, capacity, document_share=settings.document_share)
            opened.enter_context(closing(disk))
            tiers.append(Coded(disk, settings.local_disk_serde, item_bytes))
        if settings.remote_url is not None:
            remote = opened.enter_context(closing(open_redis(settings)))
            tiers.append(Coded(remote, settings.remote_serde, item_bytes))
        opened.pop_all()  # Without an error they stay open.
    return tiers


def open_redis(settings: Settings) -> Tier:
    """Return the Redis tier; raise `TierUnusable`, or `ConfigError` if a package for it is missing."""
    assert settings.remote_url is not None
    try:
        from lmc.storage.redis import RedisTier
    except ImportError as error:
        raise ConfigError(f"remote_url needs the package {error.name}: pip install 'redis[hiredis]' lz4") from None
    remote = parse_redis_url(settings.remote_url)
    return RedisTier(remote, deadline=settings.remote_deadline, ttl=settings.remote_ttl, prefix=settings.remote_prefix)
