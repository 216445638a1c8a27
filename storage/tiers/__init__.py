"""The tiers below memory: disk and Redis, their records, and the guard around them."""
