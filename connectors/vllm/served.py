"""What the scheduler's side knows of one request, and what it has found for it."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lmc.blend.segments import Span
from lmc.blend.select import Policy
from lmc.connectors.vllm.messages import DocumentPart
from lmc.connectors.vllm.prefixes import Hit
from lmc.keys import ChunkKey
from lmc.storage.loads import Pin


class Role(Enum):
    """How a request is served."""

    EXACT = "exact"
    BLEND = "blend"
    LEARN = "learn"


@dataclass(slots=True, kw_only=True)
class Document:
    """A document in a prompt, and the keys of its chunks."""

    span: Span
    keys: list[ChunkKey]


@dataclass(slots=True, kw_only=True)
class Claim:
    """What is promised to the engine: tokens `[local, stop)`."""

    local: int
    stop: int
    hits: list[Hit]  # exact chunks, from the start
    exact: int  # where they end, or what the engine has
    parts: list[DocumentPart] = field(default_factory=list)  # none for an exact load
    part_keys: list[ChunkKey] = field(default_factory=list)  # of each part
    question: int = 0
    reused: list[Span] = field(default_factory=list)  # documents of which something is reused
    sources: Counter[str] = field(default_factory=Counter)  # tokens by the place they come from


@dataclass(slots=True, kw_only=True, eq=False)
class Served:
    """One request."""

    request: Any
    role: Role
    policy: Policy | None = None
    namespace: bytes = b""  # of its documents: with the tenant's salt
    documents: list[Document] = field(default_factory=list)
    question: int = 0
    pins: dict[ChunkKey, Pin] = field(default_factory=dict)
    lost: set[ChunkKey] = field(default_factory=set)  # chunks that did not come: not asked for again
    memory_only: bool = False  # what lies on tiers is not loaded: computing it was expected to be faster
    skipped: int = 0  # tokens of that kind
    claim: Claim | None = None
    asked: float | None = (
        None  # when it was first asked for, began to load, or something came last: a slow tier is waited for
    )
    since: float = 0.0  # when that began
    arrived: int = 0  # parts of what is pinned, at `asked`
    loading: bool = False  # a worker is at it
    given_up: bool = False  # a load failed, or came too late: nothing more is loaded
    salted: int | None = None  # from this block on its hashes are no longer those of its tokens alone
    approximate: int | None = None  # from this position on KV is not exact, and stays out of our exact chunks
    saved: int = 0  # full chunks that need no more looking at
    tried: bool = False  # to learn it
    learned: bool = False
    unknown: list[Span] = field(default_factory=list)
    exact_tokens: int = 0  # loaded
    sources: Counter[str] = field(default_factory=Counter)  # tokens by the place they came from
    stamp: bytes = b""  # of what the engine's hashes do not say: a LoRA adapter's files, or whose images those are
    note: str = ""
    blended: dict[str, object] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The engine's id of the request."""
        found: str = self.request.request_id
        return found

    def wait_from(self, now: float) -> None:
        """What is pinned is waited for from now on."""
        self.asked = self.since = now

    @property
    def hashes(self) -> Sequence[bytes]:
        """What its exact blocks are stored under: the engine's hashes, with the stamp if it has one."""
        found: Sequence[bytes] = self.request.block_hashes
        if not self.stamp:
            return found
        return [hashlib.sha256(self.stamp + block).digest() for block in found]

    def facts(self) -> dict[str, object] | None:
        """For the response: what was reused, recomputed, and from where; None if lmc had nothing to do with it."""
        said: dict[str, object] = {}
        if self.exact_tokens:
            said["exact_tokens"] = self.exact_tokens
        if self.sources:
            said["tokens_from"] = dict(self.sources)
        said.update(self.blended)
        if self.skipped:
            said["skipped_tokens"] = self.skipped
        if self.unknown:
            said["unknown_documents"] = len(self.unknown)
        if self.learned:
            said["learned"] = True
        if self.note:
            said["note"] = self.note
        return said or None
