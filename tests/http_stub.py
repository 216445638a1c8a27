"""An HTTP server for tests, which answers what the test says and keeps what it is asked."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any


@contextmanager
def http_stub(otherwise: tuple[int, Any] = (404, {}), **headers: str) -> Iterator[Any]:
    """Serve `answers`: by path, a status and a body. All other paths have the answer `otherwise`.

    `asked` has the path and the headers of each request.
    """
    stub = SimpleNamespace(answers={}, asked=list[tuple[str, Mapping[str, str]]]())

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"] or 0))
            stub.asked.append((self.path, dict(self.headers)))
            status, body = stub.answers.get(self.path, otherwise)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        stub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield stub
        finally:
            server.shutdown()
