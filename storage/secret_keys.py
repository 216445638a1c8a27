"""The secret keys of tenants, and what is derived from them: AES-256-GCM for records and for the tokens of documents.

What is encrypted together has a key of its own: HKDF-SHA256 (RFC 5869) of the secret key, a random salt, and a subject,
such as the key of the chunk. So nonces can be numbers, and one secret key may encrypt any number of records. Random
nonces would allow 2**32 encryptions (NIST SP 800-38D, 8.3). A sealed text is

    8 bytes     digest of the secret key, so that several can be in use
    16 bytes    salt
    rest        the encrypted text and its tag, with the nonce 0
"""

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmc.errors import ConfigError, CorruptRecord
from lmc.keys import tenant_of

SECRET, DIGEST, SALT, TAG = 32, 8, 16, 16  # bytes
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

    def derive(self, subject: bytes, salt: bytes = b"") -> "DerivedKey":
        """Return the key for a subject, with a new salt if none is given."""
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        salt = salt or os.urandom(SALT)
        return DerivedKey(self.digest + salt, HKDF(SHA256(), SECRET, salt=salt, info=subject).derive(self.secret))


class DerivedKey:
    """A key that encrypts a few texts once. Each has another number, which is its nonce."""

    def __init__(self, origin: bytes, key: bytes) -> None:
        """Use the AES key `key`. `origin` is the digest of the secret key and the salt."""
        self.origin, self._key = origin, key

    def encrypt(self, number: int, text: memoryview, into: memoryview) -> bytes:
        """Encrypt a text into other memory of the same size, and return its tag."""
        cipher = self._cipher(number).encryptor()
        cipher.update_into(text, into)
        cipher.finalize()
        tag: bytes = cipher.tag
        return tag

    def decrypt(self, number: int, text: memoryview, tag: bytes, covered: bytes = b"") -> None:
        """Decrypt a text in place. Raises `CorruptRecord` if the tag is not that of the text and what it covers."""
        from cryptography.exceptions import InvalidTag

        cipher = self._cipher(number, tag).decryptor()
        cipher.authenticate_additional_data(covered)
        cipher.update_into(text, text)
        try:
            cipher.finalize()
        except InvalidTag:
            raise CorruptRecord("encrypted bytes are not what was written") from None

    def seal(self, text: bytes, covered: bytes = b"") -> bytes:
        """Return a sealed text. Its tag also covers other bytes, which are not in it."""
        cipher = self._cipher(0).encryptor()
        cipher.authenticate_additional_data(covered)
        sealed: bytes = self.origin + cipher.update(text) + cipher.finalize() + cipher.tag
        return sealed

    def _cipher(self, number: int, tag: bytes | None = None) -> Any:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        return Cipher(algorithms.AES(self._key), modes.GCM(number.to_bytes(12, "little"), tag))


class SecretKeys:
    """The secret keys of all tenants. Each has one that encrypts, and older ones."""

    def __init__(self, by_tenant: Mapping[str, Sequence[SecretKey]] | None = None) -> None:
        """Take keys by the digest of the tenant, the newest first. Those of `""` are for all other tenants.

        Raises `ConfigError` if there are keys, and the package for them is missing.
        """
        by_tenant = by_tenant or {}
        self._newest = {tenant: keys[0] for tenant, keys in by_tenant.items()}
        self._all = {key.digest: key for keys in by_tenant.values() for key in keys}
        if self._all:
            _need_cryptography()

    def newest(self, tenant: str) -> SecretKey | None:
        """Return the key that encrypts what belongs to a tenant, or None if it is not encrypted."""
        return self._newest.get(tenant) or self._newest.get("")

    def open(self, sealed: bytes, subject: bytes, covered: bytes = b"") -> tuple[bytes, DerivedKey] | None:
        """Return a sealed text and its key, or None if this process does not have the secret key.

        Raises `CorruptRecord` if the text was changed, or sealed with something else.
        """
        if len(sealed) < DIGEST + SALT + TAG:
            raise CorruptRecord("a sealed text is too short")
        if (secret := self._all.get(sealed[:DIGEST])) is None:
            return None
        key = secret.derive(subject, sealed[DIGEST : DIGEST + SALT])
        text = bytearray(sealed[DIGEST + SALT : -TAG])
        key.decrypt(0, memoryview(text), sealed[-TAG:], covered)
        return bytes(text), key


def read_keys(setting: str | None) -> SecretKeys:
    """Return the keys of the setting `encryption_key`: a key in base64 or hex, or the path of a file of keys.

    Raises `ConfigError`, which does not contain keys.
    """
    if setting is None:
        return SecretKeys()
    if _decoded(setting) is not None:
        return parse_keys([setting])
    path = Path(os.path.expanduser(setting.removeprefix("file://")))  # `Path.expanduser` fails for an unknown user.
    if not path.is_absolute():
        raise ConfigError(f"encryption_key: neither a key of {SECRET} bytes nor an absolute path; {HOW}")
    try:
        return parse_keys(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        named = path if path.parent.is_dir() else "the file that it names"  # A mistyped key may look like a path.
        raise ConfigError(f"encryption_key: cannot read {named}: {getattr(error, 'strerror', 'no UTF-8')}") from None


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


def _decoded(text: str) -> bytes | None:
    """Return the bytes of a key in base64 or hex, or None if the text is not a key."""
    text = text.strip()
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text)
    padded = text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4)
    try:
        secret = base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        return None
    return secret if len(secret) == SECRET else None


def _need_cryptography() -> None:
    """Raise `ConfigError` if the package for encryption is missing or too old."""
    try:
        SecretKey(bytes(SECRET)).derive(b"test").encrypt(1, memoryview(b"test"), memoryview(bytearray(4)))
    except (ImportError, ValueError) as error:
        raise ConfigError("encryption_key needs the package cryptography: pip install 'cryptography>=43'") from error
