"""The disk tier: records as files in a directory of its own."""

from lmc.storage.disk.files import UNBOUNDED
from lmc.storage.disk.tier import DiskTier

__all__ = ["UNBOUNDED", "DiskTier"]
