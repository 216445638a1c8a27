"""The learners, which compute documents: a vLLM server with lmc, or a model in this process."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lmc.blend.segments import Span, document_tokens, without_separators
from lmc.commands.administration import ADMIN_URL
from lmc.commands.top import fetch
from lmc.config.settings import Settings
from lmc.documents.sources import Document
from lmc.errors import InputError
from lmc.http.address import host_in_url
from lmc.http.client import DocumentList, Refused, Unreachable, admin_client, vllm_client, with_scheme
from lmc.http.prompts import plain_chat
from lmc.metrics import parted
from lmc.storage.places import fastest_first

DOCUMENT_SECONDS = 600.0  # seconds for a document, including the wait for other documents
CONNECT_SECONDS = 5.0  # seconds in which a server that listens accepts a connection, however busy it is
RESERVED_TOKENS = 64  # positions for separators, a chat template, and the token that a server generates


@dataclass(frozen=True, slots=True)
class Stored:
    """The result for a text: the ids of its documents. A text with separators has several documents."""

    ids: tuple[str, ...] = ()
    failed: str = ""  # why it is not stored
    computed: int = 0  # number of its documents that were not stored before


@dataclass(frozen=True, slots=True)
class Retention:
    """The pin and the time limit of documents."""

    pinned: bool = False
    ttl: float | None = None  # seconds until they expire

    def __bool__(self) -> bool:
        """Whether there is a pin or a time limit."""
        return self.pinned or self.ttl is not None


class ServerLearner:
    """A vLLM server with lmc, through its completions. Documents may be learned by several threads."""

    def __init__(
        self,
        url: str,
        separator: str,
        salt: str = "",
        admin: str = ADMIN_URL,
        *,
        chat: bool = False,
        retains: bool = False,
    ) -> None:
        """Connect to the server. `admin` is its administration endpoint, which must answer if `retains`.

        `retains` means that documents will be pinned or get a time limit. With `chat`, documents are sent as messages,
        for a server whose chat template changes their contents. Raises `Unreachable` if the server or a required
        endpoint does not answer.
        """
        self._client, self._evictions = vllm_client(url, DOCUMENT_SECONDS), 0.0
        self._separator, self._salt, self._chat = separator, salt, chat
        facts = self._client.model_facts()
        self.model = str(facts.get("id", ""))
        self.served = f"{self.model} {facts.get('root', '')}"  # Different models may have the same name.
        self._admin = admin_client(
            _address_of(admin, self._client.url),
            "--pin and --ttl need the engine's administration endpoint: start the server with "
            "LMC_ADMIN=127.0.0.1:9180, and set --admin to this address",
        )
        if retains:
            self._admin.ask("/health")
        self._evictions = self.dropped()

    def learn(self, document: Document) -> Stored:
        """Learn a document. Raises `Unreachable` if no other document can be learned either."""
        text = self._separator.join(("", without_separators(document.text, self._separator), ""))
        request = {
            "model": self.model,
            "max_tokens": 1,
            "kv_transfer_params": {"lmc": {"learn": True, "name": document.name}},
            **({"messages": [{"role": "user", "content": text}]} if self._chat else {"prompt": text}),
            **({"cache_salt": self._salt} if self._salt else {}),
        }
        try:
            response = self._client.ask("/v1/chat/completions" if self._chat else "/v1/completions", request)
        except Refused as error:
            return Stored(failed=str(error))
        facts = (response.get("kv_transfer_params") or {}).get("lmc")
        if not facts:
            raise Unreachable(
                f"{self._client.url} responded without lmc: start it with LMCConnector and LMC_ENABLE_BLENDING=true"
            )
        if not facts.get("learned"):
            return Stored(failed=str(facts.get("note") or "the server gave no reason"))
        return Stored(ids=tuple(facts.get("documents", ())), computed=int(facts.get("computed_documents", 0)))

    def has_stopped(self) -> bool:
        """Return whether the server accepts no connections any more, though it may wait for those that are open."""
        return self._client.is_refused(CONNECT_SECONDS)

    def stored(self) -> set[str]:
        """Return the ids of all stored documents. Raises `Unreachable` or `Refused` if they cannot be queried."""
        listing = DocumentList()
        while listing.path:
            listing.take(self._admin.ask(listing.path))
        return {name for name, document in listing.documents.items() if document["places"]}

    def retain(self, document: Document, ids: Sequence[str], retention: Retention) -> None:
        """Pin the stored documents of a text, or set their time limit. Raises `InputError` if that is impossible."""
        changes: dict[str, object] = {"add_names": document.name}
        changes |= ({"pinned": True} if retention.pinned else {}) | ({"ttl": retention.ttl} if retention.ttl else {})
        for name in ids:
            self._admin.ask(f"/v1/documents/{name}", changes, "PATCH")

    def tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""
        request = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return int(self._client.ask("/tokenize", request)["count"])

    def prompt_of(self, chat: Sequence[dict[str, Any]]) -> str:
        """Return the prompt that the server makes of a chat. Raises `InputError` if it makes none.

        The server answers the chat with one token, because `/tokenize` renders some models' chats differently.
        """
        request = {"model": self.model, "messages": list(chat), "max_tokens": 1, "return_token_ids": True}
        tokens = self._client.ask("/v1/chat/completions", request).get("prompt_token_ids")
        if not tokens:
            raise InputError(f"{self._client.url} responded without prompt_token_ids")
        return str(self._client.ask("/detokenize", {"model": self.model, "tokens": tokens})["prompt"])

    def longest(self) -> int:
        """Return the number of tokens that a document may have; 0 if it is unknown."""
        length = self._client.model_facts().get("max_model_len")
        return max(length - RESERVED_TOKENS, 1) if isinstance(length, int) else 0

    def capacity(self) -> dict[str, float]:
        """Return how many document tokens fit into each tier that this process or server does not share.

        It is empty if the server does not report it, or has other tiers, such as those of a cache server.
        """
        return _if_complete(self._numbers("capacity_tokens"), self._numbers("tier_usable"))

    def held(self) -> dict[str, float]:
        """Return how many tokens are in each of these tiers now; empty if the server does not report it.

        Its metrics may be stale while it is idle.
        """
        with suppress(InputError):
            numbers = {parted(key): count for key, count in self._admin.ask("/v1/stat").items()}
            return {labels[0]: count for (name, labels), count in numbers.items() if name == "chunk_tokens"}
        return self._numbers("chunk_tokens")

    def dropped(self) -> float:
        """Return how many chunks the slowest tier has evicted for lack of room since the learner was created.

        It is 0 if the server does not report it.
        """
        return _of_slowest(self._numbers("evictions")) - self._evictions

    def _numbers(self, metric: str) -> dict[str, float]:
        with suppress(InputError):
            numbers = fetch(f"{self._client.url}/metrics").since(None)
            return {labels[0]: count for (name, labels), count in numbers.items() if name == metric}
        return {}


class ModelLearner:
    """A model in this process, with the tiers of the settings. A server of the same model finds its documents there."""

    def __init__(self, model: str, settings: Settings, salt: str = "") -> None:
        """Load the model. Raises `ConfigError` or `InputError` if that fails."""
        from lmc.connectors.transformers import CachedModel

        self._separator, self._salt = settings.blend_special_str, salt
        self._cached, self._tokenizer = CachedModel.load(model, settings, cache_salt=salt)

    def learn(self, document: Document) -> Stored:
        """Learn a document. Raises `Unreachable` if no tier can be written, or if the cache server was lost."""
        engine, stored, computed = self._cached.engine, [], 0
        server = engine.server
        connection = server.connection if server else 0
        try:
            for tokens in document_tokens(self._tokenizer.encode, self._cached.markers, self._separator, document.text):
                computed += self._cached.learn(tokens, document.name) > 0
                views = engine.documents(tokens, [Span(0, len(tokens))], self._salt)
                stored += engine.note(tokens, views, self._salt, name=document.name)
            engine.store.flush()  # The manifest must not name a document that no tier has yet.
        except InputError as error:
            return Stored(failed=str(error))
        lost = server is not None and (not connection or connection != server.connection)
        if lost and not all(engine.lookup([key for known in stored for key in known.keys])):
            raise Unreachable(f"lost the cache server at {engine.settings.server}: start it again with lmc serve")
        usable = engine.stats().usable
        if usable and not any(usable.values()):  # Memory is lost when this process ends.
            raise Unreachable(f"cannot store documents: {' and '.join(usable)} cannot be written")
        reason = "" if stored else "it contains special tokens of the model, as a conversation does: remove them"
        return Stored(tuple(known.id for known in stored), reason, computed)

    def has_stopped(self) -> bool:
        """See `ServerLearner`."""
        return False

    def stored(self) -> set[str]:
        """See `ServerLearner`."""
        engine = self._cached.engine
        engine.recall.wait()
        return {document.id for document in engine.known.list() if all(engine.lookup(document.keys))}

    def retain(self, document: Document, ids: Sequence[str], retention: Retention) -> None:
        """See `ServerLearner`."""
        engine = self._cached.engine
        if engine.settings.local_disk is None and engine.settings.server is None:
            raise InputError("pins and time limits are recorded on a disk tier: set --local-disk")
        documents = [known for known in map(engine.known.get, ids) if known is not None]
        if retention.pinned:
            engine.keeper.pin(documents)
        if retention.ttl:
            engine.keeper.expire(documents, retention.ttl)

    def tokens(self, text: str) -> int:
        """See `ServerLearner`."""
        return len(self._tokenizer.encode(text))

    def prompt_of(self, chat: Sequence[dict[str, Any]]) -> str:
        """See `ServerLearner`."""
        try:
            return str(self._tokenizer.apply_chat_template(plain_chat(chat), tokenize=False))
        except Exception as error:  # A template may raise any error.
            raise InputError(f"the chat template cannot render a chat with tools: {error}") from error

    def longest(self) -> int:
        """See `ServerLearner`."""
        return max(self._cached.layers.positions - RESERVED_TOKENS, 1)

    def capacity(self) -> dict[str, float]:
        """See `ServerLearner`."""
        engine = self._cached.engine
        return _if_complete(engine.capacity(), engine.stats().usable)

    def held(self) -> dict[str, float]:
        """See `ServerLearner`."""
        return {place: tokens for place, (_, tokens) in self._cached.engine.stats().present.items()}

    def dropped(self) -> float:
        """See `ServerLearner`."""
        return _of_slowest(self._cached.engine.stats().evictions)

    def close(self) -> None:
        """Write everything to the tiers."""
        self._cached.close()


Learner = ServerLearner | ModelLearner


def _address_of(admin: str, url: str) -> str:
    """Return the address of an administration endpoint; one of all interfaces is on the host of the server at `url`."""
    try:
        listening, _, port = urlsplit(with_scheme(admin)).netloc.rpartition(":")
    except ValueError:  # An invalid address is named when it is used.
        return admin
    if listening not in ("0.0.0.0", "[::]"):
        return admin
    return f"http://{host_in_url(str(urlsplit(url).hostname))}:{port}"


def _if_complete(capacity: dict[str, float], tiers: Collection[str]) -> dict[str, float]:
    """Return the capacity if it has all `tiers`, otherwise an empty dict: others may store what these have evicted."""
    return capacity if capacity.keys() >= set(tiers) else {}


def _of_slowest(evictions: Mapping[str, float]) -> float:
    """Return the evictions of the slowest tier. Chunks evicted from a faster tier remain in a slower one."""
    return evictions[fastest_first(set(evictions))[-1]] if evictions else 0.0
