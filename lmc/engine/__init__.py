"""The cache engine: finds, loads and stores the chunks of a prompt. Both connectors are built on it."""

from lmc.documents.learn_queue import Unlearned
from lmc.engine.cache_engine import CacheEngine
from lmc.engine.index import NewChunk
from lmc.engine.pieces import Piece
from lmc.engine.planner import DocumentMatch, FoundBy, Match, Plan

__all__ = ["CacheEngine", "DocumentMatch", "FoundBy", "Match", "NewChunk", "Piece", "Plan", "Unlearned"]
