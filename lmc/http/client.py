"""Sends JSON requests over HTTP to servers on this host or in its network."""

import json
import os
import socket
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPHandler, HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from lmc.errors import InputError
from lmc.http.address import TOKEN, admin_token

REDIRECTS = (301, 302, 303, 307, 308)  # HTTP status codes of redirects
UNIX = "unix://"  # scheme of a unix socket's URL


class Unreachable(InputError):
    """A server does not respond, or denies access."""


class Refused(InputError):
    """A server has responded that a request is invalid."""


def with_scheme(address: str) -> str:
    """Return the URL of an address, which may be a URL, `host:port`, or the path of a unix socket."""
    if "://" in address:
        return address
    host = "127.0.0.1" if address.startswith(":") else ""  # A server that listens at `:port` has the same default.
    return f"{UNIX}{address}" if address.startswith("/") else f"http://{host}{address}"


def bearer(variable: str) -> dict[str, str]:
    """Return the authorization header with the key of an environment variable; empty without a key.

    The administration token may come from the settings file instead.
    Raises `InputError` if the key contains characters not allowed in an HTTP header.
    """
    key = admin_token() if variable == TOKEN else os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{variable} has letters that a key cannot have")
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
    """Return a client of a vLLM server, whose address may end with `/v1`."""
    hint = "is it running? It has to be the address of a vLLM server, as http://localhost:8000"
    return HttpClient(url.rstrip("/").removesuffix("/v1"), "OPENAI_API_KEY", timeout, hint)


def admin_client(url: str, hint: str = "") -> "HttpClient":
    """Return a client of an engine's administration endpoint; `hint` as for `HttpClient`."""
    hint = hint or "the address is that of LMC_ADMIN, with which the engine has to be started"
    return HttpClient(url, TOKEN, hint=hint)


def engine_client(url: str, key: str) -> "HttpClient":
    """Return a cache server's client of an engine's administration endpoint; it sends `key`, unless this is empty."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return HttpClient(url, hint="is this engine of the same version as the cache server?", headers=headers)


class HttpClient:
    """A client of one server. Several threads may use it."""

    def __init__(
        self,
        url: str,
        key_variable: str = "",
        timeout: float = 30.0,
        hint: str = "is it running?",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`url` may be `unix:///path`; `key_variable` names the environment variable with the key, if any.

        With `headers`, the client sends these headers and no key from the environment. An error for a missing or
        unexpected response ends with the `hint`.
        """
        self.url = with_scheme(url).rstrip("/")
        self._key_variable, self._timeout, self._hint, self._headers = key_variable, timeout, hint, headers
        path = self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else ""
        self._opener, self._base = opener(path), "http://localhost" if path else self.url

    def model(self) -> str:
        """Return the name of a vLLM server's first model; raise `Unreachable` if the response has none."""
        answer = self.ask("/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise Unreachable(f"{self.url} names no model, as a vLLM server does: {self._hint}")
        return str(models[0].get("id", ""))

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Return the decoded response to a request; raise `Unreachable`, or `Refused` with the server's reason."""
        own = bearer(self._key_variable) if self._headers is None else self._headers
        headers = {"content-type": "application/json", **own}
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._opener.open(
                Request(self._base + path, data, headers, method=method), timeout=self._timeout
            ) as done:
                return json.loads(done.read())
        except HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")
            if error.code in (400, 404, 422) and (reason := _reason(said)):
                raise Refused(reason) from None
            locked = error.code in (401, 403) and self._key_variable
            hint = f"; set {self._key_variable} to the key that it wants" if locked else f": {self._hint}"
            if location := error.headers.get("location") if error.code in REDIRECTS else None:
                hint = f": redirects are not followed; use the address {location} if you trust it"
            raise Unreachable(f"{self.url + path} answers {error.code} {error.reason}{hint}") from None
        except (OSError, HTTPException, ValueError) as error:
            cause: object = error.reason if isinstance(error, URLError) else error
            why = getattr(cause, "strerror", None) or cause
            raise Unreachable(f"no server answers at {self.url} ({why}): {self._hint}") from None


def _reason(said: str) -> str:
    try:
        body = json.loads(said)
        error = body.get("error")
        return str(error.get("message") if isinstance(error, dict) else error or body.get("message") or "")
    except (ValueError, AttributeError):
        return ""
