"""Storage of KV bytes in memory and tiers. It knows bytes, keys and layers; never tokens or models."""
