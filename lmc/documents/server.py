"""A cache server as the documents of an engine see it: it keeps their pins and time limits, and shares learning."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lmc.documents.keeper import DocumentKeeper
from lmc.documents.known import KnownDocument, KnownDocuments
from lmc.documents.learn_queue import LearnQueue, Unlearned


@dataclass(frozen=True, slots=True)
class LearningEngine:
    """An engine that shares its queue of documents to learn with the other engines of a cache server."""

    queue: LearnQueue
    namespaces: Callable[[], Iterable[bytes]]  # returns the namespaces of the tenants that the engine knows
    has_time: Callable[[], bool]  # While this returns true, the engine gets documents of other engines.
    learn: Callable[[Unlearned], object]  # queues a document of another engine


@dataclass(frozen=True, slots=True)
class FollowingEngine:
    """An engine whose known documents follow those of a cache server."""

    known: KnownDocuments
    removed: Callable[[KnownDocument], object]  # is called with each document that was removed
    reads: Callable[[], bool]  # returns whether the engine is still reading which documents are stored
    read_again: Callable[[], object]  # begins to read this again


class DocumentServer(ABC):
    """What a store in a cache server does for documents. A store in an engine's own process does none of it."""

    @property
    @abstractmethod
    def connection(self) -> int:
        """The number of the connection to the server; 0 while the server is lost. Each new connection has another."""

    @abstractmethod
    def keeper(self, engine: FollowingEngine) -> DocumentKeeper:
        """Return a keeper that sends pins and time limits of an engine's known documents to the server.

        From now on, documents that other engines learn become known, and those that are removed are marked as removed.
        """

    @abstractmethod
    def share_learning(self, engine: LearningEngine) -> None:
        """Share an engine's queue of documents to learn with the other engines of the server."""

    @abstractmethod
    def administered_at(self, address: str, explain_token: str) -> None:
        """Send the server the address of this process's administration endpoint.

        With the token, the server can request explanations of prompts there.
        """
