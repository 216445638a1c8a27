"""An HTTP server in a thread, with its address, access tokens and limits of request size.

The administration endpoints of engines and of the cache server use it. It needs uvicorn.
"""

import asyncio
import errno
import hmac
import json
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lmc.errors import ConfigError
from lmc.http.address import TOKEN, UNIX, host_and_port, is_local, socket_path
from lmc.http.timeouts import TimedConnection
from lmc.shapes import KIB, MIB

log = logging.getLogger(__name__)

START_SECONDS = 60.0  # timeout for the start of a server; enough even while the process loads a model
STOP_SECONDS = 10.0  # timeout for the shutdown of a server
GRACE_SECONDS = 2.0  # At a shutdown, requests in flight are cancelled after this time.
MAX_BODY_BYTES = 16 * MIB  # default limit for a request body
MAX_CONNECTIONS = 256
BODY_SECONDS = 30.0  # timeout for the next piece of a request body
VISITOR = "lmc.visitor"  # key in the ASGI scope of a request

Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]


class Visitor(NamedTuple):
    """The caller of a request."""

    tenant: str | None = None  # None for a caller who may see and do everything


class Certificate(NamedTuple):
    """The TLS certificate chain and private key, as files."""

    chain: Path
    key: Path

    def check(self) -> None:
        """Raise `ConfigError` if the files cannot be used."""
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.chain, self.key)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"invalid certificate {self.chain} or key {self.key}: {reason}; use PEM files") from None


def serve(
    application: Application,
    address: str,
    token: str,
    *,
    setting: str,
    number: int = 0,
    certificate: Certificate | None = None,
) -> Callable[[], None]:
    """Serve an application at an address from a thread, and return the function that stops the server.

    The address is `host:port` or `unix:///path`. `number` is added to the port, or to the end of the path unless it
    is 0. Errors name the `setting` that contains the address. Raises `ConfigError` if the address cannot be opened,
    if other hosts can reach it without a token, or if the server does not start.
    """
    try:
        import uvicorn
        from uvicorn.protocols.http.auto import AutoHTTPProtocol
    except ImportError as error:
        raise ConfigError(f"{setting} needs {error.name}: pip install starlette uvicorn") from error
    if certificate:
        certificate.check()
    tls = {"ssl_certfile": certificate.chain, "ssl_keyfile": certificate.key} if certificate else {}
    config = uvicorn.Config(
        application,
        http=type("TimedProtocol", (TimedConnection, AutoHTTPProtocol), {}),
        log_level="warning",
        access_log=False,
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        **tls,
    )
    config.load()
    listening = _listening(address, token, setting, number)
    server = uvicorn.Server(config)
    listening_at = listening.getsockname()
    scheme = "https" if certificate else "http"
    url = f"unix://{listening_at}" if isinstance(listening_at, str) else "{}://{}:{}".format(scheme, *listening_at[:2])
    errors: list[BaseException] = []  # errors that have ended the thread

    def run() -> None:
        try:
            server.run([listening])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the error is raised below, or logged
            errors.append(error)
            if server.started:
                log.error("lmc: administration at %s stopped: %s", url, _message(error))

    def stop() -> None:
        server.should_exit = True
        thread.join(GRACE_SECONDS)
        server.force_exit = True
        thread.join(STOP_SECONDS)
        listening.close()
        if listening.family is socket.AF_UNIX:
            with suppress(FileNotFoundError):
                os.unlink(listening_at)

    thread = threading.Thread(target=run, name="lmc-admin", daemon=True)
    thread.start()
    until = time.monotonic() + START_SECONDS
    while not server.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    if not server.started:
        stop()
        reason = _message(errors[0]) if errors else f"it did not start within {START_SECONDS:g} s"
        raise ConfigError(f"{setting} = {address}: the administration endpoint did not start: {reason}")
    log.info("lmc: administration at %s", url)
    return stop


def _message(error: BaseException) -> str:
    """Return an error's text, or its type if the text is empty."""
    return str(error) or type(error).__name__


def _listening(address: str, token: str, setting: str, number: int) -> socket.socket:
    """Return a socket that listens at an address; arguments and errors are those of `serve`."""
    try:
        if address.startswith(UNIX):
            return _unix_socket(socket_path(address, number, setting))
        host, port = host_and_port(address, token, setting)
        return tcp_socket(host, port + number)
    except OSError as error:
        hint = "; is another engine or server using it?" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen at {setting} = {address}: {error.strerror or error}{hint}") from None


def tcp_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a port of an IPv4 or IPv6 host; raise `OSError` if this fails."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _unix_socket(path: str) -> socket.socket:
    """Return a unix socket that listens at a path which only this user may open; a stale socket is replaced."""
    remove_stale_socket(path)
    listening, before = socket.socket(socket.AF_UNIX), os.umask(0o177)
    try:
        listening.bind(path)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(before)
    listening.listen()
    return listening


def remove_stale_socket(path: str | Path) -> None:
    """Remove a unix socket at which no process listens. Raises `OSError` if this fails."""
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # A process may listen that accepts no connections now.
        if stat.S_ISSOCK(os.stat(path).st_mode) and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
            os.unlink(path)


class Guard:
    """ASGI middleware that rejects callers without a valid token and request bodies that are too large."""

    def __init__(
        self,
        application: Application,
        token: str,
        tenants: Mapping[str, str] | None = None,
        unguarded: Collection[str] = (),
        largest: int = MAX_BODY_BYTES,
        larger: Mapping[str, int] | None = None,
        path_tokens: Mapping[str, str] | None = None,
        error: Callable[[int, str], Any] | None = None,
    ) -> None:
        """`tenants` maps tokens to tenants; with such a token, a caller sees only what belongs to the tenant.

        Paths in `unguarded` need no token. `path_tokens` has a second token for some paths, which is valid only there.
        A request body may have `largest` bytes, or the limit of its path in `larger`. `error` returns the error in a
        response, from its status and the reason; by default the reason alone.
        """
        self._application, self._token, self._tenants, self._open = application, token, tenants or {}, unguarded
        self._largest, self._larger, self._path_tokens = largest, larger or {}, path_tokens or {}
        self._error = error or (lambda _, reason: reason)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or refuse it."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        code, refused = self._refusal(scope, headers)
        if code:
            await refuse(send, code, self._error(code, refused))
            return
        received, complete, max_bytes = 0, False, self._may_have(scope)

        async def receive_bounded() -> Message:
            nonlocal received, complete, code, refused
            if not complete:
                try:
                    message = await asyncio.wait_for(receive(), BODY_SECONDS)
                except TimeoutError:
                    code, refused = 408, f"request body did not arrive within {BODY_SECONDS:g} s"
                    raise _BadBody from None
            else:  # The next message says that the caller has disconnected.
                message = await receive()
            complete = complete or not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > max_bytes:
                code, refused = 413, _too_large(max_bytes)
                raise _BadBody
            return message

        async def send_if_bounded(message: Message) -> None:
            if not code:  # Otherwise the message is the application's response to `_BadBody`.
                await send(message)

        with suppress(_BadBody):
            await self._application(scope, receive_bounded, send_if_bounded)
        if code:
            await refuse(send, code, self._error(code, refused))

    def _refusal(self, scope: Any, headers: Mapping[str, str]) -> tuple[int, str]:
        visitor = self._visitor(bearer_token(headers.get("authorization", "")), scope["path"])
        if visitor is None and scope["path"] not in self._open:
            return 401, f"missing or wrong bearer token: send {TOKEN} in the header `Authorization: Bearer …`"
        host = headers.get("host", "").rpartition("@")[2]
        name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        if not self._token and not is_local(name):  # The request may come from a web page in a browser.
            return 403, f"host {name!r} is not accepted: use localhost, or set {TOKEN}"
        length, max_bytes = headers.get("content-length", "0"), self._may_have(scope)
        if length.isdecimal() and int(length) > max_bytes:
            return 413, _too_large(max_bytes)
        kind = headers.get("content-type", "").partition(";")[0].strip()
        if scope["method"] in ("POST", "PATCH", "PUT") and kind != "application/json":
            return 400, "set the header content-type: application/json"  # Web pages need a CORS preflight to send it.
        scope[VISITOR] = visitor or Visitor("")
        return 0, ""

    def _may_have(self, scope: Any) -> int:
        """Return the body limit in bytes."""
        return self._larger.get(scope["path"], self._largest)

    def _visitor(self, presented: str, path: str) -> Visitor | None:
        accepted = filter(None, (self._token, self._path_tokens.get(path)))
        if not self._token or any(hmac.compare_digest(presented.encode(), secret.encode()) for secret in accepted):
            return Visitor()
        visitor = None
        for token, tenant in self._tenants.items():
            if hmac.compare_digest(presented.encode(), token.encode()):
                visitor = Visitor(tenant)
        return visitor


def bearer_token(authorization: str) -> str:
    """Return the token of the header `authorization`, or "" if its scheme is not Bearer in upper or lower case."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _too_large(max_bytes: int) -> str:
    return f"request body exceeds {max_bytes // KIB} KiB"


class _BadBody(Exception):
    """A request body is too large, or does not arrive in time."""


async def refuse(send: Send, code: int, error: Any) -> None:
    """Respond with an error.

    `TimedConnection` closes the connection later: if a body is still arriving, closing it now discards the response.
    """
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
