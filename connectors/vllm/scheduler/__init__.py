"""The scheduler's side, in the process of vLLM's scheduler: it decides what is loaded, blended, saved and learned."""
