"""Encryption: a tier that wraps another tier, and encrypts its records with the keys of their tenants.

The parts of a record are encrypted, and its label, which has the tokens and the name of a document. Not hidden are its
key, sizes, times of use, the name of the model, and the digest of the tenant. Chunk keys are digests of tokens: who
reads a store, and guesses a text, can find out whether it is there.

Each record has a key of its own (`secret_keys.py`), and part i has the number i + 1. A part stays as large as it was.
The record names the codec `aes256gcm`, after that of its parts and a plus if they have one. Its label is, in base64,
the sealed text of the parts' tags and of the label that was written; its tag also covers the metadata. The inner tier
computes checksums over encrypted bytes, so it can be checked without keys.
"""

import base64
import binascii
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lmc.errors import CorruptRecord
from lmc.keys import ChunkKey
from lmc.storage.secret_keys import TAG, DerivedKey, SecretKey, SecretKeys
from lmc.storage.tiers.record import HEADER_LIMIT, NO_CODEC, RecordMeta, removed_if_corrupt, scratch, split_parts
from lmc.storage.tiers.tier import RecordReader, Tier, Wrapped, Written, is_local

log = logging.getLogger(__name__)

NAME = "aes256gcm"  # name of the codec
LABEL_LIMIT = HEADER_LIMIT * 3 // 4  # characters; the rest of a header is for the sizes and checksums of parts
AS_IS = "surrogatepass"  # A label may have the name of a file in another encoding.
UNREADABLE_KEYS = 100_000  # number of unreadable records that a tier remembers


class Encrypted(Wrapped):
    """Encrypts the written records of tenants that have a key, and decrypts the records that are read.

    A record whose secret key is missing is a miss, and stays until its chunk is written again with a newer key.
    """

    def __init__(self, inner: Tier, keys: SecretKeys) -> None:
        """Wrap `inner`. Without keys, records are written as they are."""
        super().__init__(inner)
        self._keys = keys
        self._unreadable: set[ChunkKey] = set()  # records whose secret key is missing

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `Tier.contains`."""
        found = self.inner.contains(keys)
        if not self._unreadable:
            return found
        return [one and key not in self._unreadable for key, one in zip(keys, found, strict=True)]

    def open(self, key: ChunkKey) -> RecordReader | None:
        """Open a record. One that was changed is deleted, and raises `CorruptRecord`."""
        reader = self.inner.open(key)
        if reader is None or not is_encrypted(reader.meta):
            return reader
        try:
            with removed_if_corrupt(self.inner.delete, key):
                opened = _opened(reader.meta, self._keys)
        except BaseException:
            reader.close()
            raise
        if opened is None:
            reader.close()
            self._note_unreadable(key)
            return None
        return EncryptedReader(reader, self.inner, opened)

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Encrypt a record and write it. It replaces a record whose encryption key is missing."""
        if (key := self._keys.newest(meta.tenant)) is None:
            return self.inner.write(meta, parts)
        if meta.key in self._unreadable:
            self.inner.delete(meta.key)
            self._unreadable.discard(meta.key)
        if self.inner.contains([meta.key])[0]:
            return Written.PRESENT
        encrypted, parts = encrypt_record(meta, parts, key)
        # The label of a document of hundreds of thousands of tokens may not fit any more.
        return self.inner.write(encrypted, parts) if len(encrypted.label) <= LABEL_LIMIT else Written.REFUSED

    def headers(self) -> Iterator[tuple[RecordMeta, float]]:
        """See `LocalTier.headers`. A label that cannot be decrypted is empty."""
        assert is_local(self.inner)
        for meta, used in self.inner.headers():
            yield (self._plain(meta) if is_encrypted(meta) else meta), used

    def _plain(self, meta: RecordMeta) -> RecordMeta:
        """Return the metadata that was encrypted."""
        try:
            if (opened := _opened(meta, self._keys)) is not None:
                return opened.meta
            self._note_unreadable(meta.key)
        except CorruptRecord:
            pass  # Reading the record finds out whether its header or the tier's index is wrong.
        return replace(meta, label="")

    def _note_unreadable(self, key: ChunkKey) -> None:
        if not self._unreadable:
            log.warning(
                "%s has records that were encrypted with a key that this process does not have: they are not used, "
                "and with a key of their tenant they are written again; encryption_key has to name all keys in use",
                self.inner.name,
            )
        if len(self._unreadable) >= UNREADABLE_KEYS:
            self._unreadable.clear()
        self._unreadable.add(key)


class EncryptedReader:
    """An open record that is decrypted while it is read, in the memory that it is read to."""

    def __init__(self, inner: RecordReader, tier: Tier, opened: "_Opened") -> None:
        self.meta, self._key, self._tags = opened.meta, opened.key, opened.tags
        self._inner, self._tier = inner, tier
        self.request, self.close = inner.request, inner.close

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Read parts and decrypt them. A part that was changed deletes the record."""
        self._inner.read(first, count, into)
        views = split_parts(into, self.meta.stored[first : first + count])
        with removed_if_corrupt(self._tier.delete, self.meta.key):
            for part, view in enumerate(views, first):
                self._key.decrypt(part + 1, view, self._tags[part])


def is_encrypted(meta: RecordMeta) -> bool:
    """Return whether a record's parts and label are encrypted."""
    return meta.codec == NAME or meta.codec.endswith(f"+{NAME}")


def encrypt_record(
    meta: RecordMeta, parts: Sequence[memoryview], secret: SecretKey
) -> tuple[RecordMeta, Sequence[memoryview]]:
    """Return the encrypted record, in this thread's `scratch`."""
    key, out = secret.derive(meta.key), scratch(meta.offset(meta.parts))
    views = zip(split_parts(parts, meta.stored), split_parts([out], meta.stored), strict=True)
    tags = [key.encrypt(part, text, into) for part, (text, into) in enumerate(views, 1)]
    sealed = key.seal(b"".join(tags) + meta.label.encode(errors=AS_IS), _covered(meta))
    codec = NAME if meta.codec == NO_CODEC else f"{meta.codec}+{NAME}"
    return replace(meta, codec=codec, label=base64.b64encode(sealed).decode()), [out]


@dataclass(frozen=True, slots=True)
class _Opened:
    """What is needed to read an encrypted record: its metadata before it was encrypted, its key, its parts' tags."""

    meta: RecordMeta
    key: DerivedKey
    tags: Sequence[bytes]


def _opened(meta: RecordMeta, keys: SecretKeys) -> _Opened | None:
    """Open an encrypted record. Returns None if its secret key is missing; raises `CorruptRecord` if it was changed."""
    try:
        sealed = base64.b64decode(meta.label, validate=True)
    except (binascii.Error, ValueError):
        raise CorruptRecord("an encrypted record without a label in base64") from None
    codec = NO_CODEC if meta.codec == NAME else meta.codec.removesuffix(f"+{NAME}")
    plain = replace(meta, codec=codec, label="")
    if (found := keys.open(sealed, meta.key, _covered(plain))) is None:
        return None
    text, key = found
    tags = [text[at : at + TAG] for at in range(0, TAG * meta.parts, TAG)]
    return _Opened(replace(plain, label=text[TAG * meta.parts :].decode(errors=AS_IS)), key, tags)


def _covered(meta: RecordMeta) -> bytes:
    """Return the metadata that the tag of the label covers."""
    names = meta.model, meta.tenant, meta.codec, meta.kind.value, meta.namespace.hex()
    return json.dumps([*names, meta.tokens, meta.first, meta.parts, meta.part_bytes]).encode()
