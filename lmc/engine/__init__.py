"""The cache engine: what is cached where for a prompt, and the chunks themselves. Both connectors are built on it."""

from lmc.engine.cache_engine import CacheEngine, DocumentKeys, Geometry, PromptView
from lmc.engine.pieces import Piece
from lmc.engine.planner import Lookup, Plan, Wish

__all__ = ["CacheEngine", "DocumentKeys", "Geometry", "Lookup", "Piece", "Plan", "PromptView", "Wish"]
