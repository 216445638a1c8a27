"""lmc: tiered KV cache offload and CacheBlend fusion. Start at `lmc.connectors.transformers` or `docs/structure.md`."""

__version__ = "0.1.0"
