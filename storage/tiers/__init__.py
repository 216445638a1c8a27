"""The tiers beneath memory: disk and Redis, their records, and the guard around them."""
