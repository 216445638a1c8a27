"""The errors that lmc raises, as one tree.

LmcError
├── ConfigError        a setting is unknown, has a bad value, or contradicts another
├── InputError         a prompt or document that cannot be served (empty, too long, out of vocabulary)
├── UnsupportedModel   a model whose keys cannot be re-rotated exactly, or whose layers we do not know
├── StorageError
│   ├── NoMemory       a slab does not fit where it was asked for
│   ├── TierUnusable   a tier cannot be opened: in use, not writable, of another format
│   └── CorruptRecord  stored bytes are not what was written; inside the store this is a miss
└── ChunkLost          a planned chunk could not be read after all: plan again without it
"""


class LmcError(Exception):
    """Root of every error that lmc raises on purpose."""


class ConfigError(LmcError, ValueError):
    """A setting that cannot work; the message names the key, the value, its source and what would be right."""


class InputError(LmcError, ValueError):
    """A prompt or document that cannot be served."""


class UnsupportedModel(LmcError):
    """A model that lmc cannot blend exactly; the message says why."""


class StorageError(LmcError):
    """Something about the places where bytes are kept."""


class NoMemory(StorageError):
    """A slab does not fit: the message has the sum that was asked for and what is there."""


class TierUnusable(StorageError):
    """A tier cannot be opened."""


class CorruptRecord(StorageError):
    """Stored bytes that are not what was written."""


class ChunkLost(LmcError):
    """A chunk that was promised is gone (evicted, or its record was corrupt).

    `keys` are the lost ones. Nothing wrong was delivered; the caller plans again and finds them missing.
    """

    def __init__(self, keys: list[bytes]) -> None:
        super().__init__(f"{len(keys)} planned chunk(s) could not be read: {', '.join(k.hex()[:12] for k in keys[:4])}")
        self.keys = keys
