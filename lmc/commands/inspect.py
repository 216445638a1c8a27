"""Lists the contents of tiers by namespace, for the command line. Only headers are read.

Inspection changes nothing on a disk, even if another process owns it. In Redis, reading a header counts as a use of the
record.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lmc.config.mooncake_url import MooncakeURL
from lmc.config.remote_url import ObjectURL, RemoteURL
from lmc.config.settings import Settings
from lmc.documents.kept import pinned_keys
from lmc.errors import ConfigError, CorruptRecord, InputError, TierUnusable
from lmc.keys import ChunkKey
from lmc.shapes import GIB
from lmc.storage.tiers.disk import UNBOUNDED, DiskTier
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Entry, ListedTier

MAX_ANNOUNCED_KEYS = 500  # headers per request to a tier
NAMESPACE_DIGITS = 12  # displayed hex digits of a namespace's digest

Holdings = dict[bytes, list[tuple[Entry, RecordMeta]]]  # digest of a namespace -> its records in a tier


@dataclass(frozen=True, slots=True)
class TierLocation:
    """The name of a tier, and the function that opens it."""

    name: str
    open: Callable[[bool], ListedTier]  # True: for changes; raises TierUnusable if another process owns it
    evicts: bool = False  # The store evicts by itself, and may not know when records were used.

    @contextmanager
    def opened(self, *, change: bool = False) -> Iterator[ListedTier]:
        """Yield the tier. Raises `TierUnusable` if it does not exist, does not answer, or fails in the block."""
        try:
            with ExitStack() as stack:
                tier = stack.enter_context(closing(self.open(False)))
                if not tier.usable:
                    raise TierUnusable(f"{self.name} does not respond")
                # Open it read-only first: opening for changes would create a missing tier.
                yield stack.enter_context(closing(self.open(True))) if change else tier
        except OSError as error:
            raise TierUnusable(f"{self.name}: {error}") from error


def tier_locations(directory: Path | None) -> list[TierLocation]:
    """Return the tier in the directory, or the tiers of the settings. Raises `ConfigError` if there are none."""
    if directory is not None:
        return [_disk(directory)]
    settings = Settings.load()
    locations = [_disk(settings.local_disk)] if settings.local_disk is not None else []
    locations += [_remote(settings, remote) for remote in settings.remotes]
    if not locations:
        raise ConfigError(
            "no tier: pass the directory of a disk tier, or set local_disk or remote_url (LMC_LOCAL_DISK, "
            "LMC_REMOTE_URL, or the YAML file in LMC_CONFIG_FILE)"
        )
    return locations


def survey(location: TierLocation) -> tuple[Holdings, int]:
    """Return the records of a tier by namespace, and the number of records with unreadable headers."""
    holdings: Holdings = {}
    unreadable = 0
    with location.opened() as tier:
        entries = list(tier.entries())
        for number, entry in enumerate(entries):
            if number % MAX_ANNOUNCED_KEYS == 0:
                tier.announce([entry.key for entry in entries[number : number + MAX_ANNOUNCED_KEYS]])
            try:
                reader = tier.open(entry.key)
            except CorruptRecord:
                unreadable += 1
                continue
            if reader is not None:  # None: it was removed after it was listed.
                with closing(reader):
                    holdings.setdefault(reader.meta.namespace, []).append((entry, reader.meta))
    return holdings, unreadable


def old_records(
    tiers: Sequence[tuple[TierLocation, ListedTier]], unused_seconds: float | None, keep_gib: float | None
) -> dict[str, list[ChunkKey]]:
    """Return the keys of the records that were not used for `unused_seconds`, or the oldest ones beyond `keep_gib`.

    The records of pinned documents are left out, but count for the size. The result is by the name of the tier. Raises
    `InputError` for tiers that evict by themselves.
    """
    before = math.inf if unused_seconds is None else time.time() - unused_seconds
    pinned = {key for _, tier in tiers if isinstance(tier, DiskTier) for key in pinned_keys(tier.root)}
    found: dict[str, list[ChunkKey]] = {}
    for location, tier in tiers:
        if location.evicts:
            raise InputError(f"{location.name} evicts by itself, and does not say when its records were used")
        entries = list(tier.entries())  # least recently used first
        beyond = math.inf if keep_gib is None else sum(entry.bytes for entry in entries) - keep_gib * GIB  # bytes
        doomed = found.setdefault(location.name, [])
        for entry in entries:
            if entry.used >= before or beyond <= 0:
                break
            if entry.key not in pinned:
                doomed.append(entry.key)
                beyond -= entry.bytes
    return found


def find_namespace(prefix: str, namespaces: Iterable[bytes]) -> bytes:
    """Return the namespace whose digest starts with `prefix`. Raises `InputError` unless there is exactly one."""
    names = sorted({namespace.hex() for namespace in namespaces})
    if not re.fullmatch(r"[0-9a-f]{1,64}", prefix.lower()):
        raise InputError(f"invalid namespace {prefix!r}: use the first hex digits from `lmc stat`")
    matches = [name for name in names if name.startswith(prefix.lower())]
    if len(matches) > 1:
        raise InputError(f"{len(matches)} namespaces start with {prefix}: {', '.join(matches)}; use more digits")
    if not matches:
        shown = ", ".join(name[:NAMESPACE_DIGITS] for name in names)
        hint = f"use one of {shown}" if names else "the tier has no records"
        raise InputError(f"no namespace starts with {prefix}: {hint}")
    return bytes.fromhex(matches[0])


def _disk(directory: Path) -> TierLocation:
    return TierLocation(f"disk tier {directory}", lambda change: DiskTier(directory, UNBOUNDED, read_only=not change))


def _remote(settings: Settings, remote: RemoteURL) -> TierLocation:
    from lmc.storage.tiers.opening import open_remote

    if isinstance(remote, MooncakeURL):  # A command must not give memory that is gone when it ends.
        remote = replace(remote, global_segment_size=0)
    evicts = not isinstance(remote, ObjectURL)
    return TierLocation(str(remote), lambda _: open_remote(settings, remote, create=False), evicts=evicts)
