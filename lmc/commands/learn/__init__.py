"""`lmc learn`: computes the KV of documents before prompts need it."""
