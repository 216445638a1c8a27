"""lmc for Hugging Face transformers: `CachedModel` prefills prompts from stored KV."""

from lmc.connectors.transformers.model import CachedModel
from lmc.connectors.transformers.report import How, Prefilled, Report

__all__ = ["CachedModel", "How", "Prefilled", "Report"]
