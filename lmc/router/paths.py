"""Which requests are for engines, and which engine alone can answer some of them.

Only what computes is sent on. What administers an engine, such as loading an adapter, is not, unless it is allowed.
"""

import re
from collections import OrderedDict

# What vLLM computes. A client may ask for each of these.
COMPUTING = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/score", "/v1/rerank", "/v2/rerank",
    "/v1/pooling", "/v1/classify", "/tokenize", "/detokenize", "/score", "/rerank", "/pooling", "/classify",
})  # fmt: skip
RESPONSES = "/v1/responses"
OF_A_RESPONSE = re.compile(rf"{RESPONSES}/([\w.-]{{1,128}})(/cancel|/input_items)?", re.ASCII)
MADE = re.compile(rb'"id":\s*"(resp_[\w.-]{1,123})"')
REMEMBERED = 100_000  # responses


def response_of(path: str) -> str:
    """Return the id of the response that a path is about; empty if it is about none."""
    found = OF_A_RESPONSE.fullmatch(path)
    return found[1] if found else ""


class ResponseHomes:
    """Which engine has made which response. An engine keeps those in its memory, and no other one has them."""

    def __init__(self) -> None:
        self._engines: OrderedDict[str, str] = OrderedDict()

    def note(self, beginning: bytes, engine: str) -> None:
        """Note the id that the beginning of an engine's answer has."""
        if found := MADE.search(beginning):
            self._engines[found[1].decode()] = engine
            if len(self._engines) > REMEMBERED:
                self._engines.popitem(last=False)

    def engine_of(self, response: str) -> str:
        """Return the engine that has made a response; empty if nobody knows."""
        return self._engines.get(response, "")
