"""`lmc learn`: computes the KV of documents ahead of the prompts that need them."""
