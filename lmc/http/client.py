"""Asks servers on this host or near it, by JSON over HTTP."""

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

REDIRECTS = (301, 302, 303, 307, 308)  # status codes
UNIX = "unix://"  # before the path of a unix socket


class Unreachable(InputError):
    """A server does not answer, or does not let us in."""


class Refused(InputError):
    """A server has answered that something is wrong with what it was asked."""


def with_scheme(address: str) -> str:
    """Return the URL of an address that may be given as `host:port`, or as the path of a unix socket."""
    if "://" in address:
        return address
    host = "127.0.0.1" if address.startswith(":") else ""  # as for who listens there
    return f"{UNIX}{address}" if address.startswith("/") else f"http://{host}{address}"


def bearer(variable: str) -> dict[str, str]:
    """Return the header with the key that a variable of the environment holds, if it does; that of administration may
    stand in the file of settings instead. Raises `InputError` if the key contains characters not allowed in a header.
    """
    key = admin_token() if variable == TOKEN else os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{variable} has letters that a key cannot have")
    return {"authorization": f"Bearer {key}"} if key else {}


def opener(path: str = "") -> OpenerDirector:
    """Return an opener for URLs of servers on this host or near it, which uses no proxy and follows no redirect.

    With the `path` of a unix socket, all URLs are asked of the server that listens there.
    """
    return build_opener(ProxyHandler({}), _NoRedirects(), *([_UnixHandler(path)] if path else []))


class _NoRedirects(HTTPRedirectHandler):
    """Treats a redirect as an error, because urllib sends the key of the first server to the second one too."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request, so that the redirect's status is raised as `HTTPError`."""


class _UnixHandler(HTTPHandler):
    """Opens URLs through a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: Request) -> Any:
        """Open a URL."""
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
    """Return a client of a vLLM server, whose address may end with `/v1` or not."""
    hint = "is it running? It has to be the address of a vLLM server, as http://localhost:8000"
    return HttpClient(url.rstrip("/").removesuffix("/v1"), "OPENAI_API_KEY", timeout, hint)


def admin_client(url: str, hint: str = "") -> "HttpClient":
    """Return a client of an engine's administration endpoint; `hint` as for `HttpClient`."""
    hint = hint or "the address is that of LMC_ADMIN, with which the engine has to be started"
    return HttpClient(url, TOKEN, hint=hint)


def engine_client(url: str, key: str) -> "HttpClient":
    """Return a client of an engine's administration endpoint for a cache server, which sends this key or none."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return HttpClient(url, hint="is this engine of the same version as the cache server?", headers=headers)


class HttpClient:
    """One server. May be used by several threads."""

    def __init__(
        self,
        url: str,
        key_variable: str = "",
        timeout: float = 30.0,
        hint: str = "is it running?",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`url` may be `unix:///path`; `key_variable` is the variable of the environment with the key, if any.

        With `headers`, these are sent and no key from the environment. If the server does not answer as it should, the
        error ends with the `hint`.
        """
        self.url = with_scheme(url).rstrip("/")
        self._key_variable, self._timeout, self._hint, self._headers = key_variable, timeout, hint, headers
        path = self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else ""
        self._opener, self._base = opener(path), "http://localhost" if path else self.url

    def model(self) -> str:
        """Return the name of the first model that a vLLM server has; raise `Unreachable` if it names none."""
        answer = self.ask("/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise Unreachable(f"{self.url} names no model, as a vLLM server does: {self._hint}")
        return str(models[0].get("id", ""))

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Return the answer; raise `Unreachable`, or `Refused` with what the server says about the question."""
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
