"""An engine that computes nothing: it speaks enough of OpenAI's API for the router, and echoes what it was sent.

What it does wrong can be said in a request, in the field `echo`:
`status` (answer with it), `break_after` (parts, then the connection is cut), `delay` (seconds before the first part),
`parts`, `pause` (seconds between them), `id` (of the answer), `die` (end the process), `usage` (fields of `usage`).
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import uvicorn

PARTS = 3


class EchoEngine:
    """One engine, as an ASGI application."""

    def __init__(self, models: tuple[str, ...] = ("echo",)) -> None:
        self.models, self.healthy, self.hurried = models, True, False  # hurried: no delay is heeded
        self.card: dict[str, Any] = {}  # more fields of each model in /v1/models
        self.seen: list[dict[str, Any]] = []  # requests
        self.aborted, self.refusing = 0, 0  # requests whose client has left; the status of all answers, if it is set

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        path = scope["path"]
        if path == "/health":
            await respond(send, 200 if self.healthy else 503, b"")
        elif path == "/v1/models":
            cards = [{"id": name, **self.card} for name in self.models]
            await respond(send, 200, json.dumps({"data": cards}).encode())
        elif path == "/version":
            await respond(send, 200, b'{"version": "0.32.0"}')
        else:
            await self._answer(scope, body, receive, send)

    async def _answer(self, scope: Mapping[str, Any], body: bytes, receive: Any, send: Any) -> None:
        asked = json.loads(body) if body.startswith(b"{") else {}
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.seen.append(
            {
                "method": scope["method"],
                "path": scope["path"],
                "query": scope["query_string"],
                "headers": headers,
                "body": body,
            }
        )
        wish = asked.get("echo", {})
        if scope["path"] == "/tokenize":
            if headers.get("content-type") != "application/json":  # as vLLM
                await respond(send, 400, b'{"error": {"message": "Unsupported Media Type"}}')
                return
            await respond(send, 200, json.dumps({"tokens": [*map(ord, asked["prompt"])]}).encode())
            return
        if wish.get("die"):
            os._exit(1)
        if status := self.refusing or wish.get("status"):
            await respond(send, status, b'{"error": {"message": "as asked"}}')
            return
        leaving = asyncio.create_task(receive())
        try:
            if await self._sleeps(0 if self.hurried else wish.get("delay", 0), leaving):
                return
            usage = wish.get("usage", {"prompt_tokens": len(body) // 4})
            if asked.get("stream"):
                await self.stream(wish, usage, send, leaving)
            else:
                found = {"id": wish.get("id", "cmpl-1"), "echo": body.decode("latin-1"), "usage": usage}
                await respond(send, 200, json.dumps(found).encode())
        finally:
            leaving.cancel()

    async def stream(self, wish: Mapping[str, Any], usage: object, send: Any, leaving: "asyncio.Task[Any]") -> None:
        """Answer in parts."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(wish.get("parts", PARTS)):
            if number == wish.get("break_after"):
                return
            made = {"id": wish["id"]} if "id" in wish else {}
            part = f"data: {json.dumps({'number': number, **made})}\n\n".encode()
            await send({"type": "http.response.body", "body": part, "more_body": True})
            if await self._sleeps(wish.get("pause", 0), leaving):
                return
        end = f"data: {json.dumps({'usage': usage})}\n\ndata: [DONE]\n\n".encode()
        await send({"type": "http.response.body", "body": end})

    async def _sleeps(self, seconds: float, leaving: "asyncio.Task[Any]") -> bool:
        """Wait, and return whether the client has left before.

        The event loop gets a turn in any case. Without one, it never hears that the client has left.
        """
        await asyncio.wait((leaving,), timeout=seconds)
        if leaving.done():
            self.aborted += 1
        return leaving.done()


async def respond(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    uvicorn.run(EchoEngine(), port=int(sys.argv[1]), log_level="critical", lifespan="off")
