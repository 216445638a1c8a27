"""What tiers hold, by namespace, for the command line. Only headers are read.

Inspection changes nothing on a disk, whoever owns it. In Redis, reading a header counts as a use of the record.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lmc.config.redis_url import parse_redis_url
from lmc.config.settings import Settings
from lmc.errors import ConfigError, CorruptRecord, InputError, TierUnusable
from lmc.storage.tiers.disk import UNBOUNDED, DiskTier
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Entry, Tier

AT_ONCE = 500  # headers that are asked for together
SHORT = 12  # hex digits of a namespace's digest that are shown

Holdings = dict[bytes, list[tuple[Entry, RecordMeta]]]  # the records of a tier by the digest of their namespace


@dataclass(frozen=True, slots=True)
class TierLocation:
    """Where a tier is, and how to open it."""

    name: str
    open: Callable[[bool], Tier]  # with True, to change it; raises TierUnusable if another process owns it

    @contextmanager
    def opened(self, *, change: bool = False) -> Iterator[Tier]:
        """Yield the tier; raise `TierUnusable` if there is none, if it does not answer, or if it fails in the block."""
        try:
            with ExitStack() as stack:
                tier = stack.enter_context(closing(self.open(False)))
                if not tier.usable:
                    raise TierUnusable(f"{self.name} does not answer")
                # Opened first, a tier that may be changed would make one where none is.
                yield stack.enter_context(closing(self.open(True))) if change else tier
        except OSError as error:
            raise TierUnusable(f"{self.name}: {error}") from error


def places(directory: Path | None) -> list[TierLocation]:
    """Return the tier in the directory, or the tiers that the settings name; raise `ConfigError` if they name none."""
    if directory is not None:
        return [_disk(directory)]
    settings = Settings.load()
    found = [_disk(settings.local_disk)] if settings.local_disk is not None else []
    if settings.remote_url is not None:
        from lmc.storage.tiers.opening import open_redis

        found.append(TierLocation(str(parse_redis_url(settings.remote_url)), lambda _: open_redis(settings)))
    if not found:
        raise ConfigError(
            "no tier to look at: give its directory, or set local_disk or remote_url (LMC_LOCAL_DISK, LMC_REMOTE_URL, "
            "or the YAML file that LMC_CONFIG_FILE names)"
        )
    return found


def survey(place: TierLocation) -> tuple[Holdings, int]:
    """Return what a tier holds, and how many records have headers that cannot be read."""
    found: Holdings = {}
    unreadable = 0
    with place.opened() as tier:
        entries = list(tier.entries())
        for number, entry in enumerate(entries):
            if number % AT_ONCE == 0:
                tier.announce([one.key for one in entries[number : number + AT_ONCE]])
            try:
                reader = tier.open(entry.key)
            except CorruptRecord:
                unreadable += 1
                continue
            if reader is not None:  # Otherwise it has gone since it was listed.
                with closing(reader):
                    found.setdefault(reader.meta.namespace, []).append((entry, reader.meta))
    return found, unreadable


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
    return TierLocation(f"disk tier {directory}", lambda change: DiskTier(directory, UNBOUNDED, read_only=not change))
