"""Routing policies of other routers, for comparison with ours. Each module names its source and its differences."""
