"""The memory tier: slots in one slab of host memory, which processes may share."""
