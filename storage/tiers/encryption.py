"""Encryption: a tier that wraps another tier, and encrypts its records with AES-256-GCM.

The parts of a record are encrypted, and its label, which has the tokens and the name of a document. Not hidden are its
key, sizes, times of use, the name of the model, and the digest of the tenant. Chunk keys are digests of tokens: who
reads a store, and guesses a text, can find out whether it is there.

A record is encrypted with a key of its own: HKDF-SHA256 (RFC 5869) of the secret key, a random salt, and the chunk's
key. So nonces can be numbers: one secret key may encrypt any number of records, where random nonces would allow 2**32
parts (NIST SP 800-38D, 8.3). A part stays as large as it was. The record names the codec `aes256gcm`, after that of its
parts and a plus if they have one. Its label is in base64

    8 bytes        digest of the secret key
    16 bytes       salt
    parts × 16     tags of the parts; the nonce of part i is i + 1
    rest           the encrypted label and its tag, with the nonce 0

The tag of the label also covers the record's metadata and the tags of its parts. The inner tier computes checksums over
encrypted bytes, so it can be checked without keys.
"""

import base64
import binascii
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmc.errors import ConfigError, CorruptRecord
from lmc.keys import ChunkKey, tenant_of
from lmc.storage.tiers.record import NO_CODEC, RecordMeta, removed_if_corrupt, scratch, split_parts
from lmc.storage.tiers.tier import RecordReader, Tier, Wrapped, Written, is_local

log = logging.getLogger(__name__)

NAME = "aes256gcm"  # of the codec
SECRET, DIGEST, SALT, TAG = 32, 8, 16, 16  # bytes
UNREADABLE_KEYS = 100_000  # that a tier remembers
HOW = "make a key with: openssl rand -base64 32"


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A secret key, which other keys are derived from."""

    secret: bytes

    def __repr__(self) -> str:
        return f"SecretKey({self.digest.hex()})"

    @property
    def digest(self) -> bytes:
        """A digest of the key, which does not reveal it."""
        return hashlib.sha256(b"lmc secret key" + self.secret).digest()[:DIGEST]

    def for_record(self, key: ChunkKey, salt: bytes) -> bytes:
        """Return the key of one record."""
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        derived: bytes = HKDF(SHA256(), SECRET, salt=salt, info=b"lmc record" + key).derive(self.secret)
        return derived


class SecretKeys:
    """The secret keys of all tenants. Each has one that new records are encrypted with, and older ones."""

    def __init__(self, by_tenant: Mapping[str, Sequence[SecretKey]]) -> None:
        """Take keys by the digest of the tenant, the newest first. Those of `""` are for all other tenants.

        Raises `ConfigError` if there are keys, and the package for them is missing.
        """
        self._newest = {tenant: keys[0] for tenant, keys in by_tenant.items()}
        self._all = {key.digest: key for keys in by_tenant.values() for key in keys}
        if self._all:
            _need_cryptography()

    def newest(self, tenant: str) -> SecretKey | None:
        """Return the key that new records of a tenant are encrypted with, or None if they are not encrypted."""
        return self._newest.get(tenant) or self._newest.get("")

    def of_digest(self, digest: bytes) -> SecretKey | None:
        """Return a key, or None if this process does not have it."""
        return self._all.get(digest)


def read_keys(setting: str | None) -> SecretKeys:
    """Return the keys of the setting `encryption_key`: a key in base64 or hex, or the path of a file of keys.

    Raises `ConfigError`, which does not contain keys.
    """
    if setting is None:
        return SecretKeys({})
    if _decoded(setting) is not None:
        return parse_keys([setting])
    path = Path(setting.removeprefix("file://")).expanduser()
    if not path.is_absolute():
        raise ConfigError(f"encryption_key: neither a key of {SECRET} bytes nor an absolute path; {HOW}")
    try:
        return parse_keys(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"encryption_key: cannot read {path}: {error}") from None


def parse_keys(lines: Iterable[str]) -> SecretKeys:
    """Return the keys of a file of keys.

    A line is a key, or the cache salt of a tenant, white space, and a key of this tenant. The first key of a tenant
    encrypts; the others are for older records. Lines that begin with `#` are comments. Raises `ConfigError`, which does
    not contain keys.
    """
    by_tenant: dict[str, list[SecretKey]] = {}
    for number, line in enumerate(lines, 1):
        if not (text := line.strip()) or text.startswith("#"):
            continue
        *salt, key = text.rsplit(None, 1)
        if (secret := _decoded(key)) is None:
            raise ConfigError(f"encryption_key: line {number} does not end with a key of {SECRET} bytes; {HOW}")
        by_tenant.setdefault(tenant_of("".join(salt)), []).append(SecretKey(secret))
    if not by_tenant:
        raise ConfigError(f"encryption_key: the file has no key; {HOW}")
    return SecretKeys(by_tenant)


class Encrypted(Wrapped):
    """Encrypts the written records of tenants that have a key, and decrypts the records that are read.

    A record whose key is missing is a miss, and stays until its chunk is written again with a newer key.
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
        return EncryptedReader(reader, self.inner, *opened)

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Encrypt a record and write it. It replaces one whose key is missing."""
        if (key := self._keys.newest(meta.tenant)) is None:
            return self.inner.write(meta, parts)
        if meta.key in self._unreadable:
            self.inner.delete(meta.key)
            self._unreadable.discard(meta.key)
        if self.inner.contains([meta.key])[0]:
            return Written.PRESENT
        return self.inner.write(*encrypt_record(meta, parts, key))

    def headers(self) -> Iterator[tuple[RecordMeta, float]]:
        """See `LocalTier.headers`. A label that cannot be decrypted is empty."""
        assert is_local(self.inner)
        for meta, used in self.inner.headers():
            if is_encrypted(meta):
                try:
                    opened = _opened(meta, self._keys)
                except CorruptRecord:
                    opened = None  # Reading the record finds out whether its header or the tier's index is wrong.
                yield (opened[0] if opened else replace(meta, label="")), used
            else:
                yield meta, used

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

    def __init__(self, inner: RecordReader, tier: Tier, meta: RecordMeta, key: bytes, tags: Sequence[bytes]) -> None:
        self.meta = meta
        self._inner, self._tier, self._key, self._tags = inner, tier, key, tags
        self.request, self.close = inner.request, inner.close

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Read parts and decrypt them. A part that was changed deletes the record."""
        self._inner.read(first, count, into)
        views = split_parts(into, self.meta.stored[first : first + count])
        with removed_if_corrupt(self._tier.delete, self.meta.key):
            for part, view in enumerate(views, first):
                _decrypt(self._key, part + 1, view, self._tags[part])


def is_encrypted(meta: RecordMeta) -> bool:
    """Return whether a record's parts and label are encrypted."""
    return meta.codec == NAME or meta.codec.endswith(f"+{NAME}")


def encrypt_record(
    meta: RecordMeta, parts: Sequence[memoryview], key: SecretKey
) -> tuple[RecordMeta, Sequence[memoryview]]:
    """Return the encrypted record, in this thread's `scratch`."""
    salt = os.urandom(SALT)
    of_record = key.for_record(meta.key, salt)
    out = scratch(meta.offset(meta.parts))
    tags = []
    views = zip(split_parts(parts, meta.stored), split_parts([out], meta.stored), strict=True)
    for part, (plain, encrypted) in enumerate(views):
        cipher = _cipher(of_record, part + 1).encryptor()
        cipher.update_into(plain, encrypted)
        cipher.finalize()
        tags.append(cipher.tag)
    cipher = _cipher(of_record, 0).encryptor()
    cipher.authenticate_additional_data(_covered(meta, tags))
    label = cipher.update(meta.label.encode()) + cipher.finalize() + cipher.tag
    text = base64.b64encode(b"".join([key.digest, salt, *tags, label])).decode()
    codec = NAME if meta.codec == NO_CODEC else f"{meta.codec}+{NAME}"
    return replace(meta, codec=codec, label=text), [out]


def _opened(meta: RecordMeta, keys: SecretKeys) -> tuple[RecordMeta, bytes, Sequence[bytes]] | None:
    """Return the metadata of the record that was encrypted, the record's key, and the tags of its parts.

    Returns None if the secret key is missing, and raises `CorruptRecord` if it does not fit the record.
    """
    try:
        blob = base64.b64decode(meta.label, validate=True)
    except (binascii.Error, ValueError):
        raise CorruptRecord("an encrypted record without a label in base64") from None
    start, end = DIGEST + SALT, DIGEST + SALT + TAG * meta.parts
    if len(blob) < end + TAG:
        raise CorruptRecord("an encrypted record with too short a label")
    secret = keys.of_digest(blob[:DIGEST])
    if secret is None:
        return None
    key = secret.for_record(meta.key, blob[DIGEST:start])
    tags = [blob[at : at + TAG] for at in range(start, end, TAG)]
    label = bytearray(blob[end:-TAG])
    codec = NO_CODEC if meta.codec == NAME else meta.codec.removesuffix(f"+{NAME}")
    plain = replace(meta, codec=codec, label="")
    _decrypt(key, 0, memoryview(label), blob[-TAG:], _covered(plain, tags))
    return replace(plain, label=label.decode()), key, tags


def _covered(meta: RecordMeta, tags: Sequence[bytes]) -> bytes:
    """Return the bytes that the tag of the label covers beside the label."""
    names = meta.model, meta.tenant, meta.codec, meta.kind.value, meta.namespace.hex(), meta.key.hex()
    return json.dumps([*names, meta.tokens, meta.first, meta.parts, meta.part_bytes]).encode() + b"".join(tags)


def _decrypt(key: bytes, nonce: int, data: memoryview, tag: bytes, covered: bytes = b"") -> None:
    """Decrypt bytes in place. Raises `CorruptRecord` if the tag is not theirs."""
    from cryptography.exceptions import InvalidTag

    cipher = _cipher(key, nonce, tag).decryptor()
    cipher.authenticate_additional_data(covered)
    cipher.update_into(data, data)
    try:
        cipher.finalize()
    except InvalidTag:
        raise CorruptRecord("encrypted bytes are not what was written") from None


def _cipher(key: bytes, nonce: int, tag: bytes | None = None) -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.GCM(nonce.to_bytes(12, "little"), tag))


def _decoded(text: str) -> bytes | None:
    """Return the bytes of a key in base64 or hex, or None if the text is not a key."""
    text = text.strip()
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text)
    try:
        secret = base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        return None
    return secret if len(secret) == SECRET else None


def _need_cryptography() -> None:
    """Raise `ConfigError` if the package for encryption is missing."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ConfigError("encryption_key needs the package cryptography: pip install cryptography") from error
