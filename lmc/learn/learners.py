"""Who computes documents: a vLLM server with lmc, or a model in this process."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from lmc.blend.segments import document_tokens
from lmc.config import Settings
from lmc.errors import InputError
from lmc.http_client import Refused, Unreachable, vllm_client
from lmc.storage.places import fastest_first
from lmc.top import fetch

TIMEOUT = 600.0  # seconds for a document, which may wait for others


class Learner(Protocol):
    """Computes documents, and stores their KV."""

    def learn(self, text: str) -> str:
        """Learn a document. Return why it was not stored; nothing if it is.

        Raises `Unreachable` if no other document can be learned either.
        """
        ...

    def dropped(self) -> float:
        """Return how many chunks the slowest tier has dropped for lack of room since the learner was made."""
        ...


class ServerLearner:
    """A vLLM server with lmc, through its completions. Documents may be learned by several threads."""

    def __init__(self, url: str, separator: str, salt: str = "") -> None:
        """Raise `Unreachable` if there is no server at `url`, which may end with `/v1` or not."""
        if not url.startswith(("http://", "https://")):
            raise InputError(f"{url} is no address of a server: give one like http://localhost:8000")
        self._client = vllm_client(url, TIMEOUT)
        self._separator, self._salt = separator, salt
        try:
            models = self._client.ask("/v1/models").get("data") or [{}]
        except Unreachable as error:
            raise Unreachable(f"{error} It has to be the address of a vLLM server, as http://localhost:8000") from None
        self.model = str(models[0].get("id", ""))
        self._evictions = self._evicted()

    def learn(self, text: str) -> str:
        """See `Learner`."""
        asked = {
            "model": self.model,
            "prompt": self._separator.join(("", text, "")),
            "max_tokens": 1,
            "kv_transfer_params": {"lmc": {"learn": True}},
        } | ({"cache_salt": self._salt} if self._salt else {})
        try:
            answer = self._client.ask("/v1/completions", asked)
        except Refused as error:
            return str(error)
        facts = (answer.get("kv_transfer_params") or {}).get("lmc")
        if not facts:
            raise Unreachable(
                f"{self._client.url} answers without lmc: start it with LMCConnector and LMC_ENABLE_BLENDING=true"
            )
        return "" if facts.get("learned") else str(facts.get("note") or "the server does not say why")

    def dropped(self) -> float:
        """See `Learner`; 0 if the server does not say."""
        return self._evicted() - self._evictions

    def _evicted(self) -> float:
        with suppress(InputError):
            numbers = fetch(f"{self._client.url}/metrics").since(None)
            return _of_slowest({labels[0]: count for (name, labels), count in numbers.items() if name == "evictions"})
        return 0.0


class ModelLearner:
    """A model in this process, with the tiers of the settings, where a server of the same model finds its documents."""

    def __init__(self, model: str, settings: Settings, salt: str = "") -> None:
        """Load the model; raise `ConfigError` or `InputError` if it cannot be."""
        from lmc.connectors.transformers import CachedModel

        self._separator = settings.blend_special_str
        self._cached, self._tokenizer = CachedModel.load(model, settings, cache_salt=salt)

    def learn(self, text: str) -> str:
        """See `Learner`."""
        encode: Callable[[str], list[int]] = self._tokenizer.encode
        try:
            found = document_tokens(encode, self._cached.markers, self._separator, text)
            for tokens in found:
                self._cached.learn(tokens)
            self._cached.engine.store.flush()  # The manifest must not name a document that is not on a tier yet.
        except InputError as error:
            return str(error)
        return "" if found else "it has special tokens of the model, and would be taken for a conversation"

    def dropped(self) -> float:
        """See `Learner`."""
        return _of_slowest(self._cached.engine.stats().evictions)

    def close(self) -> None:
        """Write everything to the tiers."""
        self._cached.close()


def _of_slowest(evictions: Mapping[str, float]) -> float:
    """Return what the slowest tier has evicted. What a faster one evicts is in a slower one."""
    return evictions[fastest_first(set(evictions))[-1]] if evictions else 0.0
