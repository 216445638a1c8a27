"""The Redis tier: records in a Redis server, cluster or sentinel group that processes and hosts share."""

from lmc.storage.tiers.redis.tier import RedisTier

__all__ = ["RedisTier"]
