"""The cache server's side in an engine's process."""
