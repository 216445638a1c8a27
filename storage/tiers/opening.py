"""Open the tiers that the settings name."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from lmc.config.redis_url import parse_redis_url
from lmc.config.settings import Settings
from lmc.errors import ConfigError
from lmc.shapes import GIB
from lmc.storage.tiers.codec import Coded, lz4_block
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.record import NO_CODEC
from lmc.storage.tiers.tier import ListedTier, Tier

log = logging.getLogger(__name__)


def open_tiers(settings: Settings, item_bytes: int) -> list[Tier]:
    """Open the tiers of the settings, and wrap them with codecs for items of `item_bytes` bytes. Fastest tier first.

    Raises `TierUnusable` or `ConfigError`, and then closes the tiers that it has opened.
    """
    with ExitStack() as opened:
        plain = [opened.enter_context(closing(tier)) for tier in open_plain_tiers(settings)]
        tiers = coded(plain, settings, item_bytes)
        opened.pop_all()  # Without an error, the tiers stay open.
    return tiers


def coded(tiers: Sequence[Tier], settings: Settings, item_bytes: int) -> list[Tier]:
    """Wrap tiers with their codecs. Raises `ConfigError` if a codec's package is missing.

    Only records written to Redis may be encoded. Every tier decodes the encoded records that it has.
    """
    return [Coded(tier, settings.remote_serde if tier.name == "redis" else NO_CODEC, item_bytes) for tier in tiers]


def described(settings: Settings) -> str:
    """Return a description of the settings' tiers, for a log line."""
    disk = f"{settings.local_disk} ({settings.max_local_disk_size:g} GB)" if settings.local_disk else "no disk"
    return f"{disk}, {parse_redis_url(settings.remote_url)}" if settings.remote_url else disk


def open_plain_tiers(settings: Settings) -> list[Tier]:
    """Open the tiers of the settings without codecs, fastest first. Raises the same errors as `open_tiers`."""
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
            tiers.append(opened.enter_context(closing(disk)))
        if settings.remote_url is not None:
            tiers.append(opened.enter_context(closing(open_redis(settings))))
        opened.pop_all()
    return tiers


def open_redis(settings: Settings) -> ListedTier:
    """Open the Redis tier. Raises `TierUnusable`, or `ConfigError` if a package for it is missing."""
    assert settings.remote_url is not None
    tier, remote = _redis_tier(), parse_redis_url(settings.remote_url)
    return tier(remote, deadline=settings.remote_deadline, ttl=settings.remote_ttl, prefix=settings.remote_prefix)


def check_packages(settings: Settings) -> None:
    """Raise `ConfigError` if a package for the tiers of the settings, or for their codecs, is missing."""
    if settings.remote_url is not None:
        _redis_tier()
    if settings.remote_serde != NO_CODEC:
        lz4_block()


def _redis_tier() -> Callable[..., ListedTier]:
    try:
        from lmc.storage.tiers.redis import RedisTier
    except ImportError as error:
        raise ConfigError(f"remote_url needs the package {error.name}: pip install 'redis[hiredis]' lz4") from None
    return RedisTier
