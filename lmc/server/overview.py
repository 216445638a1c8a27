"""The administration of a cache server: its state, quotas, documents and events."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmc import __version__
from lmc.background import Background
from lmc.documents.admin import DocumentAdmin
from lmc.errors import InputError
from lmc.http.client import engine_client
from lmc.metrics import StoreCollector, flat
from lmc.server.document_texts import DocumentTexts
from lmc.server.events import Events
from lmc.server.quotas import Owners
from lmc.server.server import CacheServer
from lmc.storage.stats import StoreStats, summed


class Overview:
    """Handles administration requests for one server. Any thread may call any method."""

    def __init__(self, server: CacheServer) -> None:
        self.server, self._arenas = server, server.arenas
        self._texts = DocumentTexts(server.tokenizers)
        self.documents = DocumentAdmin(self._arenas.all, self._texts.of, Background())
        self.events = Events(self._arenas.changes, os.urandom(6).hex())
        self._started = time.time()
        self.subscribers = 0  # number of subscribers to events

    def store_stats(self) -> StoreStats:
        """Return the sum of the counts of all arenas."""
        counts = self._arenas.changes.counts()
        present = {place: (amount.chunks, amount.tokens) for place, amount in counts.items()}
        return replace(summed([arena.store.stats() for arena in self._arenas.all()]), present=present)

    def memory(self) -> dict[str, int]:
        """Return the memory budget and the memory in use, in bytes."""
        budget = self._arenas.budget
        empty = sum(arena.store.empty_slots * arena.layout.slot_bytes for arena in self._arenas.all())
        return {"memory_bytes": budget.size, "used_bytes": budget.taken.total() - empty}

    def stat(self) -> dict[str, Any]:
        """Return the server's state: memory, arenas, owners, counts, documents and clients."""
        budget = self._arenas.budget
        arenas = [
            {
                "parts": arena.layout.parts,
                "part_bytes": arena.layout.part_bytes,
                "memory_bytes": budget.taken[arena.layout],
                "held": arena.store.held(),
            }
            for arena in self._arenas.all()
        ]
        return {
            "version": __version__,
            "started": self._started,
            **self.memory(),
            "arenas": arenas,
            "owners": self.owners(None),
            "totals": flat(self.store_stats()),
            "documents": self.documents.count(),
            "clients": len(self.server.attached()),
        }

    def owners(self, tenant: str | None) -> list[dict[str, Any]]:
        """Return what each model and tenant has in each tier; with `tenant`, only for this tenant."""
        places_of: dict[tuple[str, str], dict[str, Any]] = {}
        for (place, model, owner), amount in sorted(self._arenas.changes.held(tenant).items()):
            places_of.setdefault((model, owner), {})[place] = amount._asdict()
        return [{"model": model, "tenant": owner, "places": places} for (model, owner), places in places_of.items()]

    def explain(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return an engine's explanation of a prompt, from an engine of the `model` in the request.

        If all engines have the same model, any model name is accepted, because requests may use another name than the
        engine. Raises `InputError` if no engine explains prompts, or none has this model.
        """
        engines = self.server.explainers()
        if not engines:
            raise InputError("no attached engine explains prompts: start an engine with LMC_ADMIN=127.0.0.1:9181")
        models = {engine.model: engine for engine in reversed(engines)}  # Earlier clients win over later ones.
        model = request.get("model") if len(models) > 1 else engines[0].model
        if model not in models:
            raise InputError(f"unknown model {model!r}: set model to one of {', '.join(sorted(models))}")
        engine = models[model]
        return {**engine_client(engine.admin, engine.token).ask("/v1/explain", dict(request)), "engine": engine.admin}

    def clear(self, model: str | None, tenant: str | None) -> int:
        """Remove all chunks of a model, a tenant or both, or all chunks; return the number of removed chunks."""
        return len(set().union(*(arena.clear(Owners(model, tenant)) for arena in self._arenas.all())))

    def quotas(self) -> list[dict[str, Any]]:
        """Return all quotas, and how much of each is used."""
        return [
            {
                "model": quota.model,
                "tenant": quota.tenant,
                "max_bytes": quota.bytes,
                "weight": quota.weight,
                "used_bytes": used,
            }
            for quota, used in self._arenas.quotas.all()
        ]

    def bound(self, model: str | None, tenant: str | None, **values: Any) -> None:
        """Set some fields of a quota (see `Quotas.change`), and evict chunks that exceed it."""
        self._arenas.quotas.change(model, tenant, **values)
        for arena in self._arenas.all():
            arena.quotas_changed()


class ServerCollector(Collector):
    """The metrics of a server: those of its stores, its memory, its clients, and the bytes of each model."""

    def __init__(self, of: Overview) -> None:
        self._of, self._stores = of, StoreCollector(of.store_stats)

    def describe(self) -> Iterable[Metric]:
        """Return the metric names, without reading the server's state."""
        return self._stores.describe()

    def collect(self) -> Iterator[Metric]:
        """Return all metrics with their current values."""
        yield from self._stores.collect()
        memory = self._of.memory()
        for name, description in (
            ("memory_bytes", "memory budget for chunks"),
            ("used_bytes", "memory in use by chunks"),
        ):
            yield GaugeMetricFamily(f"lmc_server_{name}", f"lmc: {description}, in bytes", value=memory[name])
        clients = len(self._of.server.attached())
        yield GaugeMetricFamily("lmc_server_clients", "lmc: attached clients", value=clients)
        description, labels = "lmc: bytes of a model's chunks in a tier", ("model", "place")
        family = GaugeMetricFamily("lmc_model_bytes", description, labels=labels)
        sums: Counter[tuple[str, str]] = Counter()
        for owner in self._of.owners(None):
            sums.update({(owner["model"], place): amount["bytes"] for place, amount in owner["places"].items()})
        for of, size in sums.items():
            family.add_metric(of, size)
        yield family
