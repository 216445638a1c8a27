"""The worker's side, in each of vLLM's worker processes: it copies bytes and computes."""
