"""lmc inside vLLM: exact offload of KV pages, and CacheBlend, as a KV connector."""
