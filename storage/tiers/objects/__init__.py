"""The object tier: records in S3, Google Cloud Storage, Azure, or in a directory that hosts share."""

from lmc.storage.tiers.objects.tier import ObjectTier

__all__ = ["ObjectTier"]
