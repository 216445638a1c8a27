"""The disk tier: records as files in a directory of its own."""

from lmc.storage.disk.tier import UNBOUNDED, DiskTier

__all__ = ["UNBOUNDED", "DiskTier"]
