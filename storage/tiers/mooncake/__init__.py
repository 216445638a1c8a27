"""The Mooncake tier: records in the memory of the hosts of a Mooncake Store."""

from lmc.storage.tiers.mooncake.tier import MooncakeTier

__all__ = ["MooncakeTier"]
