"""The disk tier: records as files in a directory that only this tier uses."""

from lmc.storage.tiers.disk.files import UNBOUNDED
from lmc.storage.tiers.disk.tier import DiskTier

__all__ = ["UNBOUNDED", "DiskTier"]
