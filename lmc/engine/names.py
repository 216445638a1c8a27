"""The namespaces under which an engine's chunks are stored: one per kind of record and tenant."""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from lmc.keys import Namespace, RecordKind, model_label, tenant_of

SALTS = 4096  # maximum number of cache salts (tenants) whose namespaces are remembered
UNKNOWN = "unknown"  # shown as the tenant of a document whose cache salt this process does not know


class Names:
    """The namespaces of one model. Any thread may call any method."""

    def __init__(self, namespace: Namespace, prefix: Sequence[int], model: str) -> None:
        """Create the namespaces from `namespace`, which has the fields that all namespaces of the model share.

        Documents are learned after the tokens of `prefix`. `model` is the model's name for people, or its directory.
        """
        self._namespace, self._prefix = namespace, tuple(prefix)
        self.model = model_label(model)
        # Least recently used first.
        self._digests: OrderedDict[tuple[RecordKind, str], bytes] = OrderedDict()
        self._salts: dict[bytes, str] = {}  # by the namespace of the tenant's documents
        self._mutex = threading.Lock()
        self.of(RecordKind.DOCUMENT, "")

    def namespaces_of_documents(self) -> list[bytes]:
        """Return the document namespaces of the tenants that have sent a request."""
        return list(self._salts)

    def of(self, kind: RecordKind, salt: str) -> bytes:
        """Return the digest from which the keys of a tenant's chunks start."""
        with self._mutex:
            if (kind, salt) not in self._digests:
                digest = self._digests[kind, salt] = self._digest(kind, salt)
                if kind is RecordKind.DOCUMENT:
                    self._salts[digest] = salt
            self._digests.move_to_end((kind, salt))
            while len(self._digests) > len(RecordKind) * SALTS:
                named, digest = self._digests.popitem(last=False)
                if named[1]:
                    self._salts.pop(digest, None)
                else:  # Namespaces without a salt are never forgotten.
                    self._digests[named] = digest
            return self._digests[kind, salt]

    def salt_of(self, namespace: bytes) -> str | None:
        """Return the salt of the tenant whose documents have this namespace; None if the tenant has sent no request."""
        return self._salts.get(namespace)

    def tenant_of(self, namespace: bytes) -> str:
        """Return the tenant whose documents have this namespace."""
        salt = self.salt_of(namespace)
        return UNKNOWN if salt is None else tenant_of(salt)

    def begin_anew(self) -> None:
        """Replace all namespaces by random ones, which no later process finds."""
        salts = list(self._salts.values())
        self._namespace = replace(self._namespace, model=self._namespace.model + os.urandom(16).hex())
        with self._mutex:
            self._digests, self._salts = OrderedDict(), {}
        for salt in salts:
            self.of(RecordKind.DOCUMENT, salt)

    def _digest(self, kind: RecordKind, salt: str) -> bytes:
        layout = self._namespace.layout if kind is RecordKind.PAGES else ""
        behind = kind is RecordKind.DOCUMENT and self._prefix
        name = f"{kind.value} behind {self._prefix}" if behind else kind.value
        return replace(self._namespace, kind=name, cache_salt=salt, layout=layout).digest()
