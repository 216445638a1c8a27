"""Parses the URLs of remote tiers: a Redis, a Mooncake Store, an object store, or a shared directory.

Nothing is opened.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from lmc.config.mooncake_url import SCHEMES, MooncakeURL, parse_mooncake_url
from lmc.config.redis_url import RedisURL, parse_redis_url

# Titles of object stores by URL scheme.
STORES = {
    "s3": "S3 bucket",
    "s3a": "S3 bucket",
    "gs": "Google Cloud Storage bucket",
    "az": "Azure container",
    "abfs": "Azure container",
    "abfss": "Azure container",
    "file": "shared directory",
    "fs": "shared directory",  # LMCache's name
}
SEVERAL = re.compile(r"\s+(?=[a-z][\w+.-]*://)", re.IGNORECASE)  # The white space between two URLs.
NUMBER_SIGN = "a # in the URL of a remote tier is written as %23"
SECRET = re.compile("key|secret|token|password|sas|credential", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectURL:
    """The address of an object store, or of a directory that hosts share."""

    scheme: str
    bucket: str = ""
    path: str = ""  # prefix of the names of objects, or the directory
    # Such as ("endpoint", "http://minio:9000"); also a login.
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory that hosts share."""
        return not self.bucket

    @property
    def place(self) -> str:
        """The name of the tier; see `lmc.storage.places`."""
        return "directory" if self.is_directory else "objects"

    def __str__(self) -> str:
        return f"{STORES[self.scheme]} {'/'.join(filter(None, (self.bucket, self.path)))}"


RemoteURL = RedisURL | MooncakeURL | ObjectURL


def split_urls(value: object) -> list[str]:
    """Return the URLs in a list, or in a text with white space between them."""
    texts = value if isinstance(value, list | tuple) else [value]
    return [url for text in texts for url in SEVERAL.split(str(text).strip()) if url]


def parse_remote_urls(value: str) -> list[RemoteURL]:
    """Return the parsed URLs of remote tiers, in their order.

    Raises `ValueError` for an invalid URL, and for two tiers of the same kind.
    """
    remotes = [parse_remote_url(url) for url in split_urls(value)]
    if why := _of_one_kind(remotes):
        raise ValueError(why)
    return remotes


def parse_remote_url(url: str) -> RemoteURL:
    """Return the parsed URL of a remote tier.

    Raises `ValueError` for an invalid URL. The message contains neither the URL nor a password.
    """
    if "#" in url:  # What follows it would be dropped.
        raise ValueError(NUMBER_SIGN)
    scheme, mark, _ = url.strip().partition("://")
    if mark and scheme.lower() in STORES:
        return _parse_object_url(url.strip(), scheme.lower())
    return parse_mooncake_url(url) if mark and scheme.lower() in SCHEMES else parse_redis_url(url)


def why_wrong(value: object) -> str:
    """Return why URLs of remote tiers are wrong; empty if only the URL of a Redis is."""
    urls = split_urls(value)
    for url in urls:
        if url.partition("://")[0].lower() in (*STORES, *SCHEMES) or "#" in url:
            try:
                parse_remote_url(url)
            except ValueError as error:
                return str(error)
    with suppress(ValueError):
        return _of_one_kind([parse_remote_url(url) for url in urls])
    return ""


def _of_one_kind(remotes: list[RemoteURL]) -> str:
    """Return which two tiers are of the same kind; empty if there are none."""
    first: dict[str, RemoteURL] = {}
    for remote in remotes:
        if first.setdefault(remote.place, remote) is not remote:
            return f"two remote tiers of one kind: {first[remote.place]} and {remote}; leave one of the two out"
    return ""


def _parse_object_url(url: str, scheme: str) -> ObjectURL:
    split = urlsplit(url)
    path, options = unquote(split.path), parse_qsl(split.query, keep_blank_values=True)
    login, _, bucket = split.netloc.rpartition("@")
    if login and STORES[scheme] == STORES["az"] and ":" not in login:  # abfss://container@account.dfs.core.windows.net
        options += [("account_name", bucket.partition(".")[0])]
        login, bucket = "", login
    if any(SECRET.search(name) for name, _ in options) or (login and STORES[scheme] != STORES["s3"]):
        raise ValueError("credentials do not belong in the URL of an object store; set them in the environment")
    if STORES[scheme] == STORES["file"]:
        # LMCache writes fs://host:port/path. The host means nothing for a directory that is mounted here.
        is_relative = bucket in (".", "..") or (scheme == "file" and bucket not in ("", "localhost"))
        if not Path(path).is_absolute() or path == "/" or options or is_relative:
            raise ValueError("a shared directory is written as file:///path")
        return ObjectURL(scheme=scheme, path=path)
    if ":" in bucket or "@" in path:
        raise ValueError("a / in the secret of an object store's URL is written as %2F")
    if any("@" in value for _, value in options):
        raise ValueError("credentials do not belong in the endpoint of an object store; set them in the environment")
    if not bucket or "," in bucket:
        raise ValueError("an object store is written as s3://bucket/prefix")
    if login:
        key, _, secret = login.partition(":")
        options += [("access_key_id", unquote(key)), ("secret_access_key", unquote(secret))]
    return ObjectURL(scheme=scheme, bucket=bucket, path=path.strip("/"), options=tuple(options))
