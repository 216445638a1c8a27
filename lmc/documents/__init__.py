"""Documents: the known, the pinned and the queued ones, their sources, and the events about them."""
