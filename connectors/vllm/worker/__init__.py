"""What runs in each of vLLM's worker processes: it moves bytes and computes."""
