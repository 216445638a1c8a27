"""Lists the contents of tiers by namespace, for the command line. Only headers are read.

Inspection changes nothing on a disk, even if another process owns it. In Redis, reading a header counts as a use of the
record.
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
from lmc.storage.tiers.tier import Entry, ListedTier

AT_ONCE = 500  # headers per request to a tier
SHORT = 12  # displayed hex digits of a namespace's digest

Holdings = dict[bytes, list[tuple[Entry, RecordMeta]]]  # digest of a namespace -> its records in a tier


@dataclass(frozen=True, slots=True)
class TierLocation:
    """The name of a tier, and the function that opens it."""

    name: str
    open: Callable[[bool], ListedTier]  # True: for changes; raises TierUnusable if another process owns it

    @contextmanager
    def opened(self, *, change: bool = False) -> Iterator[ListedTier]:
        """Yield the tier. Raises `TierUnusable` if it does not exist, does not answer, or fails in the block."""
        try:
            with ExitStack() as stack:
                tier = stack.enter_context(closing(self.open(False)))
                if not tier.usable:
                    raise TierUnusable(f"{self.name} does not answer")
                # Open it read-only first: opening for changes would create a missing tier.
                yield stack.enter_context(closing(self.open(True))) if change else tier
        except OSError as error:
            raise TierUnusable(f"{self.name}: {error}") from error


def places(directory: Path | None) -> list[TierLocation]:
    """Return the tier in the directory, or the tiers of the settings. Raises `ConfigError` if there are none."""
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
    """Return the records of a tier by namespace, and the number of records with unreadable headers."""
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
            if reader is not None:  # None: it was removed after it was listed.
                with closing(reader):
                    found.setdefault(reader.meta.namespace, []).append((entry, reader.meta))
    return found, unreadable


def find_namespace(prefix: str, namespaces: Iterable[bytes]) -> bytes:
    """Return the namespace whose digest starts with `prefix`. Raises `InputError` unless there is exactly one."""
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
