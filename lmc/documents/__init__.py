"""Documents: which are known, pinned, waiting to be learned, and who is told of changes."""
