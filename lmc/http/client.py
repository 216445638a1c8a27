"""Sends JSON requests over HTTP to servers on this host or in its network."""

import json
import os
import socket
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from lmc.errors import InputError
from lmc.http.address import TOKEN, UNIX, admin_token

PAGE = 10_000  # documents in a page of their list
REDIRECTS = (301, 302, 303, 307, 308)  # HTTP status codes of redirects


class Unreachable(InputError):
    """A server does not respond, or denies access."""


class Refused(InputError):
    """A server has responded that a request is invalid."""

    def __init__(self, reason: str, status: int) -> None:
        """`status` is the HTTP status code of the response."""
        super().__init__(reason)
        self.status = status


class DocumentList:
    """The list of an engine's known documents, read in pages. Ask for `path` and `take` the page, until it is empty."""

    def __init__(self) -> None:
        self.documents: dict[str, dict[str, Any]] = {}  # by id
        self.path = self._first = f"/v1/documents?limit={PAGE}"
        self._again = False

    def take(self, page: dict[str, Any]) -> None:
        """Add a page. Raises `KeyError` for other JSON."""
        new = {document["id"]: document for document in page["documents"]}
        has_news = not new.keys() <= self.documents.keys()
        self.documents |= new
        after, was_first = page.get("next", ""), self.path == self._first
        if after and not (self._again and new and not has_news):
            self.path = f"{self._first}&after={quote(after)}"
        elif not (after or self._again or was_first):
            # Documents that were used meanwhile have moved from later pages to the first ones.
            self.path, self._again = self._first, True
        else:
            self.path = ""


def with_scheme(address: str) -> str:
    """Return the URL of an address, which may be a URL, `host:port`, or the path of a unix socket."""
    if "://" in address:
        return address
    host = "127.0.0.1" if address.startswith(":") else ""  # A server that listens at `:port` has the same default.
    return f"{UNIX}{address}" if address.startswith("/") else f"http://{host}{address}"


def authorization(key: str, name: str = "key") -> dict[str, str]:
    """Return the authorization header with a key; empty without a key.

    Raises `InputError`, with the key's `name` but not the key, for characters not allowed in an HTTP header.
    """
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{name} contains characters not allowed in an HTTP header: use printable ASCII characters")
    return {"authorization": f"Bearer {key}"} if key else {}


def opener(path: str = "") -> OpenerDirector:
    """Return a URL opener that uses no proxy and follows no redirect.

    With the `path` of a unix socket, requests for all URLs go to the server that listens there.
    """
    return build_opener(ProxyHandler({}), _NoRedirects(), *([_UnixHandler(path)] if path else []))


class _NoRedirects(HTTPRedirectHandler):
    """Treats a redirect as an error, because urllib would send the first server's key to the second server."""

    def redirect_request(self, *_: Any) -> None:
        """Return None, so that urllib raises the redirect's status as `HTTPError`."""


class _UnixHandler(HTTPHandler):
    """Opens URLs through a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: Request) -> Any:
        """Send a request through the unix socket."""
        return self.do_open(self._connection, request)

    def _connection(self, host: str, timeout: float | None = None, **_: Any) -> HTTPConnection:
        connection = HTTPConnection(host, timeout=timeout)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(timeout)
        try:
            connection.sock.connect(self._path)
        except OSError:
            connection.close()
            raise
        return connection


def vllm_client(url: str, timeout: float = 30.0) -> "HttpClient":
    """Return a client of a vLLM server, whose address may end with `/v1`. It sends the key in `OPENAI_API_KEY`."""
    hint = "is it running? Use the address of a vLLM server, such as http://localhost:8000"
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    return HttpClient(url.rstrip("/").removesuffix("/v1"), key, "OPENAI_API_KEY", timeout, hint)


def admin_client(url: str, hint: str = "") -> "HttpClient":
    """Return a client of an engine's administration endpoint. It sends the setting `admin_token`.

    An error for a missing or unexpected response ends with the `hint`.
    """
    hint = hint or "start the engine with LMC_ADMIN=127.0.0.1:9180, or use the address that it was started with"
    return HttpClient(url, admin_token(), TOKEN, hint=hint)


def engine_client(url: str, key: str) -> "HttpClient":
    """Return a cache server's client of an engine's administration endpoint; it sends `key`, unless this is empty."""
    return HttpClient(url, key, hint="is this engine of the same version as the cache server?")


class HttpClient:
    """A client of one server. Several threads may use it."""

    def __init__(
        self, url: str, key: str = "", key_name: str = "", timeout: float = 30.0, hint: str = "is it running?"
    ) -> None:
        """Create a client that sends `key` with each request, unless it is empty. `url` may be `unix:///path`.

        `timeout` is in seconds. With a `key_name`, which users know, an error for a wrong key names it. An error for a
        missing or unexpected response ends with the `hint`. Raises `InputError` for a key that cannot be sent.
        """
        self.url = with_scheme(url).rstrip("/")
        self._key_name, self._timeout, self._hint = key_name, timeout, hint
        self._headers = {"content-type": "application/json", **authorization(key, key_name or "the key")}
        path = self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else ""
        self._opener, self._base = opener(path), "http://localhost" if path else self.url

    def is_refused(self, seconds: float) -> bool:
        """Return whether the server refuses connections, as one that is shutting down does. Waits `seconds` at most."""
        parts = urlsplit(self.url)
        if not parts.hostname:  # a unix socket
            return False
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname, port), seconds).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def model(self) -> str:
        """Return the name of a vLLM server's first model; raise `Unreachable` if the response has none."""
        return str(self.model_facts().get("id", ""))

    def model_facts(self) -> dict[str, Any]:
        """Return what a vLLM server lists of its first model; raise `Unreachable` if the response has none."""
        response = self.ask("/v1/models")
        models = response.get("data") if isinstance(response, dict) else None
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise Unreachable(f"{self.url} listed no models, unlike a vLLM server: {self._hint}")
        return models[0]

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Return the decoded response to a request; raise `Unreachable`, or `Refused` with the server's reason."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(self._base + path, data, self._headers, method=method)
            with self._opener.open(request, timeout=self._timeout) as response:
                return json.loads(response.read())
        except HTTPError as error:
            with error:
                reason = _reason(error.read().decode(errors="replace"))
            if error.code == HTTPStatus.NOT_FOUND and reason == HTTPStatus.NOT_FOUND.phrase:
                reason = ""  # The server has no such path.
            if error.code in (400, 404, 422) and reason:
                raise Refused(reason, error.code) from None
            denied = error.code in (401, 403) and self._key_name
            said = f" ({reason})" if reason else ""
            hint = f"{said}; set {self._key_name} to the server's key" if denied else f"{said}: {self._hint}"
            if location := error.headers.get("location") if error.code in REDIRECTS else None:
                hint = f": redirects are not followed; use the address {location} if you trust it"
            raise Unreachable(f"{self.url + path} answered {error.code} {error.reason}{hint}") from None
        except (OSError, HTTPException, ValueError) as error:
            cause: object = error.reason if isinstance(error, URLError) else error
            text = str(getattr(cause, "strerror", None) or cause)
            raise Unreachable(f"no server answers at {self.url} ({text}): {self._hint}") from None


def _reason(text: str) -> str:
    try:
        body = json.loads(text)
        error = body.get("error")
        return str(error.get("message") if isinstance(error, dict) else error or body.get("message") or "")
    except (ValueError, AttributeError):
        return ""
