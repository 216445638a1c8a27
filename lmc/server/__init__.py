"""The cache server: one store for all engines of a host."""
