"""Settings: their values, where they come from, and the names that LMCache has for them."""
