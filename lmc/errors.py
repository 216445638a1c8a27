"""The errors that lmc raises, as one tree.

LmcError
├── ConfigError        a setting is unknown, invalid, or contradicts another
├── InputError         a prompt or document that cannot be served (empty, too long, out of vocabulary)
│   └── NotFound       a name or an id that does not exist
├── UnsupportedModel   a model whose keys cannot be re-rotated exactly, or whose layers lmc does not know
├── StorageError
│   ├── NoMemory       a slab does not fit into the memory in which it was requested
│   ├── TierUnusable   a tier cannot be opened: in use, not writable, or in another format
│   └── CorruptRecord  stored bytes differ from the written bytes; inside the store this is a miss
└── ChunkLost          a chunk of a plan could not be read; plan again without it
"""


class LmcError(Exception):
    """The root of every error that lmc raises on purpose."""


class ConfigError(LmcError, ValueError):
    """An invalid setting. The message names the key, the value, its source, and what would be valid."""


def needs_transformers(what: str, error: ImportError) -> ConfigError:
    """Return the error for a feature that runs a model with transformers, whose packages are an optional extra."""
    return ConfigError(f"{what} needs {error.name}: pip install torch transformers bm25s")


def need_msgspec() -> None:
    """Raise `ConfigError` if msgspec is missing, which encodes the messages of a cache server and its clients."""
    try:
        import msgspec  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"a cache server needs the package {error.name}: pip install msgspec") from None


class InputError(LmcError, ValueError):
    """A prompt or document that cannot be served."""


class NotFound(InputError):
    """A name or an id that does not exist."""


class UnsupportedModel(LmcError):
    """A model that lmc cannot blend exactly. The message says why."""


class StorageError(LmcError):
    """An error of memory or of a tier."""


class NoMemory(StorageError):
    """A slab does not fit. The message gives the requested and the available memory."""


class TierUnusable(StorageError):
    """A tier cannot be opened."""


class CorruptRecord(StorageError):
    """Stored bytes differ from the written bytes."""


class ChunkLost(LmcError):
    """Chunks of a plan cannot be read, because they were evicted or their records are corrupt.

    `keys` are the keys of these chunks. No wrong bytes were delivered. The caller plans again without these chunks.
    """

    def __init__(self, keys: list[bytes]) -> None:
        super().__init__(f"{len(keys)} planned chunk(s) could not be read: {', '.join(k.hex()[:12] for k in keys[:4])}")
        self.keys = keys
