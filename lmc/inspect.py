"""What tiers hold, by namespace, for the command line. Only headers are read.

Inspection changes nothing on a disk, whoever owns it. In Redis, reading a header counts as a use of the record.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lmc.config import Settings
from lmc.errors import ConfigError, CorruptRecord, InputError, TierUnusable
from lmc.keys import ChunkKey
from lmc.redis_url import parse_redis_url
from lmc.storage.disk import UNBOUNDED, DiskTier
from lmc.storage.tier import Tier

AT_ONCE = 500  # headers that are asked for together
SHORT = 12  # hex digits of a namespace's digest that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLocation:
    """Where a tier is, and how to open it."""

    name: str
    read_only: Callable[[], Tier]
    writable: Callable[[], Tier]  # raises TierUnusable if another process owns the tier

    @contextmanager
    def opened(self, *, change: bool = False) -> Iterator[Tier]:
        """Yield the tier; raise `TierUnusable` if there is none, if it does not answer, or if it fails in the block."""
        try:
            with closing(self.read_only()) as tier:
                if not tier.usable:
                    raise TierUnusable(f"{self.name} does not answer")
                if not change:
                    yield tier
                    return
                with closing(self.writable()) as changeable:  # Opened first, it would make a tier where none is.
                    yield changeable
        except OSError as error:
            raise TierUnusable(f"{self.name}: {error}") from error


@dataclass(slots=True, kw_only=True)
class Holding:
    """The records of one namespace in one place."""

    keys: list[ChunkKey] = field(default_factory=list)
    tokens: int = 0
    bytes: int = 0
    layers: set[int] = field(default_factory=set)
    codecs: set[str] = field(default_factory=set)
    used: list[float] = field(default_factory=list)  # the least and the most recent use; empty if there are no records

    def add(self, other: "Holding") -> None:
        """Add the records of another holding."""
        self.keys += other.keys
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.layers |= other.layers
        self.codecs |= other.codecs
        both = self.used + other.used
        self.used = [min(both), max(both)] if both else []


def places(directory: Path | None) -> list[TierLocation]:
    """Return the tier in the directory, or the tiers that the settings name; raise `ConfigError` if they name none."""
    if directory is not None:
        return [_disk(directory)]
    settings = Settings.load()
    found = [_disk(settings.local_disk)] if settings.local_disk is not None else []
    if settings.remote_url is not None:
        found.append(_remote(settings, settings.remote_url))
    if not found:
        raise ConfigError(
            "no tier to look at: give its directory, or set local_disk or remote_url (LMC_LOCAL_DISK, LMC_REMOTE_URL, "
            "or the YAML file that LMC_CONFIG_FILE names)"
        )
    return found


def survey(tier: Tier) -> tuple[dict[bytes, Holding], list[ChunkKey]]:
    """Return what a tier holds by namespace digest, and the records whose headers cannot be read."""
    found: dict[bytes, Holding] = {}
    unreadable = []
    entries = list(tier.entries())
    for number, entry in enumerate(entries):
        if number % AT_ONCE == 0:
            tier.announce([one.key for one in entries[number : number + AT_ONCE]])
        try:
            reader = tier.open(entry.key)
        except CorruptRecord:
            unreadable.append(entry.key)
            continue
        if reader is None:  # It has gone since it was listed.
            continue
        with closing(reader):
            meta = reader.meta
        record = Holding(keys=[entry.key], tokens=meta.tokens, bytes=entry.bytes, used=[entry.used])
        record.layers.add(meta.parts)
        record.codecs.add(meta.codec)
        found.setdefault(meta.namespace, Holding()).add(record)
    return found, unreadable


def total(holdings: Iterable[Holding]) -> Holding:
    """Return the sum of all holdings."""
    everything = Holding()
    for holding in holdings:
        everything.add(holding)
    return everything


def find_namespace(prefix: str, namespaces: Iterable[bytes]) -> bytes:
    """Return the namespace whose digest starts with `prefix`; raise `InputError` if it is not exactly one."""
    known = sorted({namespace.hex() for namespace in namespaces})
    if not re.fullmatch(r"[0-9a-f]{1,64}", prefix.lower()):
        raise InputError(f"namespace {prefix!r} must be the first hex digits of a digest, as lmc stat shows them")
    found = [name for name in known if name.startswith(prefix.lower())]
    if len(found) > 1:
        raise InputError(f"{len(found)} namespaces start with {prefix}: {', '.join(found)}; give more digits")
    if not found:
        there = f"there are {', '.join(name[:SHORT] for name in known)}" if known else "there are no records"
        raise InputError(f"no namespace starts with {prefix}: {there}")
    return bytes.fromhex(found[0])


def _disk(directory: Path) -> TierLocation:
    return TierLocation(
        name=f"disk tier {directory}",
        read_only=lambda: DiskTier(directory, UNBOUNDED, read_only=True),
        writable=lambda: DiskTier(directory, UNBOUNDED),
    )


def _remote(settings: Settings, url: str) -> TierLocation:
    def connect() -> Tier:
        from lmc.engine.tiers import open_redis

        return open_redis(settings)

    return TierLocation(name=str(parse_redis_url(url)), read_only=connect, writable=connect)
