"""Places where KV bytes are kept. Knows bytes, keys and layers; never tokens or models."""
