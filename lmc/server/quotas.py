"""Quotas: how much memory of a cache server models and tenants may take, and the weights of their fair shares."""

import logging
import threading
from pathlib import Path
from typing import Any

import msgspec

from lmc.errors import InputError
from lmc.small_files import replace_text
from lmc.storage.change_log import ChangeLog
from lmc.storage.eviction import Weights

log = logging.getLogger(__name__)

QUOTAS_FILE = "quotas.json"  # in the directory of memory or of the disk tier


class Owners(msgspec.Struct, frozen=True):
    """A group of chunk owners: a model, a tenant, or a tenant with one model."""

    model: str | None = None  # None for all models
    tenant: str | None = None  # digest of the cache salt; None for all tenants

    def cover(self, model: str, tenant: str) -> bool:
        """Return whether the owner of a chunk or of a document belongs to this group."""
        return self.model in (None, model) and self.tenant in (None, tenant)


class Quota(Owners, frozen=True, kw_only=True):
    """A limit for the total memory of some owners' chunks, and the weight of their fair share."""

    bytes: int | None = None  # None for no limit
    weight: float = 1.0


class Quotas(Weights):
    """All quotas of a server. Any thread may call any method."""

    def __init__(self, changes: ChangeLog, directory: Path | None) -> None:
        """Read the quotas from a file in `directory`, if any; they stay valid for later servers."""
        self._changes, self._file = changes, directory / QUOTAS_FILE if directory else None
        self._mutex = threading.Lock()
        self._quotas: tuple[Quota, ...] = ()
        if self._file is not None:
            try:
                self._quotas = tuple(msgspec.json.decode(self._file.read_bytes(), type=list[Quota]))
            except FileNotFoundError:
                pass
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("cannot read %s (%s): started without quotas", self._file, error)

    def all(self) -> list[tuple[Quota, int]]:
        """Return each quota, and how many of its bytes are used."""
        return [(quota, self._changes.taken("host", quota.model, quota.tenant)) for quota in self._quotas]

    def get(self, model: str | None, tenant: str | None) -> Quota:
        """Return the quota of a model, a tenant, or a tenant with one model; without one, a quota without limit."""
        matches = (quota for quota in self._quotas if (quota.model, quota.tenant) == (model, tenant))
        return next(matches, Quota(model=model, tenant=tenant))

    def of_model(self, model: str) -> float:
        """See `Weights.of_model`."""
        return self.get(model, None).weight

    def of_tenant(self, model: str, tenant: str) -> float:
        """See `Weights.of_tenant`."""
        return self.get(model, tenant).weight * self.get(None, tenant).weight

    def change(self, model: str | None, tenant: str | None, **values: Any) -> None:
        """Set the memory limit or the weight for a model, a tenant, or a tenant with one model, and keep the other.

        Raises `InputError` for a name that is not valid Unicode text.
        """
        with self._mutex:
            quota = msgspec.structs.replace(self.get(model, tenant), **values)
            others = [other for other in self._quotas if (other.model, other.tenant) != (model, tenant)]
            is_default = quota == Quota(model=model, tenant=tenant)
            quotas = (*others, *(() if is_default else (quota,)))
            try:
                encoded = msgspec.json.encode(quotas)
            except UnicodeEncodeError:
                raise InputError("names of models and tenants must be valid Unicode text") from None
            self._quotas = quotas
            if self._file is not None:
                try:
                    replace_text(self._file, encoded.decode())
                except OSError as error:
                    log.warning("cannot write %s (%s): quotas will end with this server", self._file, error.strerror)

    def excess(self, model: str, tenant: str, size: int) -> list[tuple[Quota, int]]:
        """Return the quotas that `size` more bytes of an owner would exceed, and the excess of each in bytes."""
        if not self._quotas:  # the usual case; this runs twice for each stored chunk
            return []
        covering = [quota for quota in self._quotas if quota.bytes is not None and quota.cover(model, tenant)]
        used = [self._changes.taken("host", quota.model, quota.tenant) for quota in covering]
        excesses = [current + size - (quota.bytes or 0) for quota, current in zip(covering, used, strict=True)]
        return [(quota, by) for quota, by in zip(covering, excesses, strict=True) if by > 0]
