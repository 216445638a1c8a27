"""Open the tiers that the settings name."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from lmc.config.mooncake_url import MooncakeURL
from lmc.config.redis_url import RedisURL
from lmc.config.remote_url import ObjectURL, RemoteURL
from lmc.config.settings import Settings
from lmc.errors import ConfigError, TierUnusable
from lmc.shapes import GIB
from lmc.storage.secret_keys import read_keys
from lmc.storage.tiers.codec import Coded, lz4_block
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.encryption import Encrypted
from lmc.storage.tiers.record import NO_CODEC
from lmc.storage.tiers.tier import ListedTier, Tier

log = logging.getLogger(__name__)

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # variables with the address of another S3
PACKAGES = {
    "redis": "'redis[hiredis]' lz4",
    "mooncake": "mooncake-transfer-engine (or -cuda13; -non-cuda on hosts without GPUs)",
    "objects": "obstore cachetools",
    "directory": "obstore cachetools",
}
LIBRARIES = "Mooncake needs apt-get install libibverbs1 libnl-3-200 libnuma1"
# Options of obstore's HTTP client. Among the options of a store, they make obstore panic.
CLIENT_OPTIONS = {
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type", "http1_only"),
    *("http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "http2_max_frame_size"),
    *("http2_only", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes"),
    *("proxy_url", "randomize_addresses", "timeout", "user_agent"),
}
ANSWER_SECONDS = 60.0  # An object store has to answer a request completely within this time.


def open_tiers(settings: Settings, item_bytes: int) -> list[Tier]:
    """Open the tiers of the settings, and wrap them as `coded` does. Fastest tier first.

    Raises `TierUnusable` or `ConfigError`, and then closes the tiers that it has opened.
    """
    with ExitStack() as opened:
        plain = [opened.enter_context(closing(tier)) for tier in open_plain_tiers(settings)]
        tiers = coded(plain, settings, item_bytes)
        opened.pop_all()  # Without an error, the tiers stay open.
    return tiers


def coded(tiers: Sequence[Tier], settings: Settings, item_bytes: int) -> list[Tier]:
    """Wrap tiers with encryption, and with codecs for items of `item_bytes` bytes.

    Only records written to a remote tier may be encoded. Every tier decodes the encoded records that it has. Raises
    `ConfigError` if a package is missing, or for an invalid `encryption_key`.
    """
    keys = read_keys(settings.encryption_key)
    codecs = [settings.remote_serde if tier.shared else NO_CODEC for tier in tiers]
    return [Coded(Encrypted(tier, keys), codec, item_bytes) for tier, codec in zip(tiers, codecs, strict=True)]


def described(settings: Settings) -> str:
    """Return a description of the settings' tiers, for a log line."""
    disk = f"{settings.local_disk} ({settings.max_local_disk_size:g} GB)" if settings.local_disk else "no disk"
    return ", ".join([disk, *map(str, settings.remotes)])


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
        tiers += [opened.enter_context(closing(open_remote(settings, remote))) for remote in settings.remotes]
        opened.pop_all()
    return tiers


def open_remote(settings: Settings, remote: RemoteURL, *, create: bool = True) -> ListedTier:
    """Open a remote tier. Raises `TierUnusable`, or `ConfigError` if a package for it is missing.

    Without `create`, a shared directory has to exist.
    """
    if isinstance(remote, ObjectURL) and remote.is_directory and not create and not Path(remote.path).is_dir():
        raise TierUnusable(f"no {remote}: mount it, or correct remote_url")
    tier, of_remote = _tier_class(remote), {"deadline": settings.remote_deadline, "prefix": settings.remote_prefix}
    if isinstance(remote, RedisURL):
        return tier(remote, ttl=settings.remote_ttl, **of_remote)
    if settings.remote_ttl:
        instead = "Mooncake evicts" if isinstance(remote, MooncakeURL) else "objects expire by a lifecycle rule"
        log.warning("remote_ttl = %d has no effect in %s: %s", settings.remote_ttl, remote, instead)
    if isinstance(remote, MooncakeURL):
        return tier(remote, **of_remote)
    return tier(object_store(remote, settings.remote_deadline), str(remote), name=remote.place, **of_remote)


def check_packages(settings: Settings) -> None:
    """Raise `ConfigError` if a package for the tiers of the settings, or for what they are wrapped with, is missing.

    The same holds for an invalid `encryption_key`.
    """
    for remote in settings.remotes:
        _tier_class(remote)
    if settings.remote_serde != NO_CODEC:
        lz4_block()
    read_keys(settings.encryption_key)


def _tier_class(remote: RemoteURL) -> Callable[..., ListedTier]:
    try:
        if isinstance(remote, RedisURL):
            from lmc.storage.tiers.redis import RedisTier

            return RedisTier
        if isinstance(remote, MooncakeURL):
            from lmc.storage.tiers.mooncake import MooncakeTier

            return MooncakeTier
        from lmc.storage.tiers.objects import ObjectTier

        return ObjectTier
    except ImportError as error:
        if error.name is None:  # A library of the system is missing, such as libibverbs.so.1.
            raise ConfigError(f"remote_url ({remote}): {error}; {LIBRARIES}") from None
        raise ConfigError(f"remote_url needs the package {error.name}: pip install {PACKAGES[remote.place]}") from None


def object_store(remote: ObjectURL, deadline: float) -> Any:
    """Return the client of an object store. Credentials come from the environment, as its users expect."""
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore, from_url

    if remote.is_directory:
        try:
            return LocalStore(remote.path, mkdir=True)
        except (BaseError, OSError) as error:
            raise TierUnusable(f"cannot use {remote}: {error}") from None
    config = dict(remote.options)
    if own := sorted(CLIENT_OPTIONS & config.keys()):
        raise ConfigError(
            f"remote_url ({remote}): {', '.join(own)} cannot be set there: an endpoint that begins with http:// needs "
            "no allow_http, remote_deadline is the timeout, and a proxy is set in the environment (HTTPS_PROXY)"
        )
    addresses = (*config.values(), *(os.environ.get(name) for name in ENDPOINTS))
    client = {
        "connect_timeout": timedelta(seconds=deadline),
        "timeout": timedelta(seconds=ANSWER_SECONDS),
        "allow_http": any(str(address).startswith("http://") for address in addresses),
    }
    try:
        return from_url(
            f"{remote.scheme}://{remote.bucket}/{remote.path}",
            config=config,
            client_options=client,
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=deadline)},
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"remote_url ({remote}): {str(error).splitlines()[0]}") from None
