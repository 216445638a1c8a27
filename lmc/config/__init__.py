"""Settings: their values, their sources, and LMCache's names for them."""
