"""The cache server: one chunk store for all engines of a host."""
