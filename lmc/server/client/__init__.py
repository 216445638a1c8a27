"""The client of the cache server in an engine's process."""
