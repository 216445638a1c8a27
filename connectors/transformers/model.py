"""lmc for transformers: a causal language model whose prompts are prefilled with stored KV.

    cached, tokenizer = CachedModel.load("path/or/id", settings)
    cached.learn(document_ids)
    done = cached.prefill(prompt_ids, how="blend")       # logits, a transformers cache, a report
    model.generate(ids, cache=done.cache)                # continues from there; `ids` is the prompt

A `CachedModel` serves one prompt at a time. It is not thread-safe, because the model is not thread-safe.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from lmc.blend.blender import Blender, BlendInput
from lmc.blend.canvas import KV
from lmc.blend.kernels.choice import kernels_of
from lmc.blend.kernels.operations import Kernels
from lmc.blend.learn_prefix import learn_prefix
from lmc.blend.markers import Markers
from lmc.blend.segments import Segments, split
from lmc.blend.strategies import BLIND_REUSE, RecomputePolicy
from lmc.config.settings import Settings
from lmc.connectors.transformers.arguments import CONTINUES, check_options, checked_markers, checked_tokens
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.connectors.transformers.hf import cache_argument, cache_of, forward, identity, load, prefilled, rows_of
from lmc.connectors.transformers.layers import DecoderLayers
from lmc.connectors.transformers.report import How, Prefilled, Report
from lmc.connectors.transformers.selftest import prove_model
from lmc.copies import settle
from lmc.engine import CacheEngine, DocumentMatch, Match, NewChunk, Plan
from lmc.errors import ChunkLost, ConfigError, InputError, UnsupportedModel
from lmc.keys import ChunkKey, Namespace, RecordKind, chunk_bounds
from lmc.open_store import check_server, open_store
from lmc.shapes import KVShape
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.contract import Reservation
from lmc.storage.places import MEMORY

log = logging.getLogger(__name__)
Computed = tuple[torch.Tensor, DynamicCache, dict[str, Any]]  # logits, the KV of all tokens, and fields of the report


class CachedModel(AbstractContextManager["CachedModel"]):
    """A transformers model with a cache engine. Use it in a `with` statement, or close it, to write all chunks."""

    def __init__(
        self,
        model: Any,
        settings: Settings,
        separators: Markers | Sequence[int],
        *,
        cache_salt: str = "",
        checkpoint: str | Path | None = None,
        learn_prefix: Sequence[int] = (),
    ) -> None:
        """Open a cache engine for a model, and test the model.

        Args:
            model: a causal language model of transformers.
            settings: the settings of lmc.
            separators: `Markers.of(tokenizer, special_string)`, or the tokens of one separator.
            cache_salt: the salt of the tenant.
            checkpoint: path or id from which the model was loaded. Give it only if the weights have not changed since.
                Other engines that load the same checkpoint, such as vLLM, then find its documents. Without it, the
                model is identified by its bytes in memory.
            learn_prefix: the tokens after which documents are learned (`lmc.blend.learn_prefix`). Without them,
                documents are learned alone.

        Raises `UnsupportedModel`, `ConfigError`, `NoMemory` or `TierUnusable`.
        """
        self.model, self.settings = model.eval(), settings
        self.layers = DecoderLayers(model)
        self._kernels = kernels_of(self.layers.device)
        self.markers = checked_markers(separators, self.layers.vocabulary)
        self.policy = RecomputePolicy.of(settings)
        self._salt, name = cache_salt, identity(model, checkpoint)
        self._refused = self._why_not()
        self.blends = not self._refused
        shape, rope = self.layers.shape, self.layers.rope
        namespace = Namespace.of(shape, model=name, rope=rope, chunk_size=settings.chunk_size)
        layout, called = ChunkLayout.of(shape, settings.chunk_size), str(checkpoint or model.config.name_or_path)
        prefix = self._checked(learn_prefix, "learn_prefix") if learn_prefix else ()
        device = self.layers.device
        store = open_store(settings, layout, device=device, model=called, tokenizer=called)
        self.engine = CacheEngine(settings, store, layout, shape, namespace, device=device, prefix=prefix, model=called)
        self.engine.share_learning(lambda: False)  # This engine computes only when it is called.

    @classmethod
    def load(cls, name: str | Path, settings: Settings, *, cache_salt: str = "") -> tuple["CachedModel", Any]:
        """Load a model from a directory or a hub id; return it with a cache engine, and its tokenizer.

        Raises `TierUnusable` before it loads the model if the cache server of the settings does not start.
        """
        check_server(settings)
        model, tokenizer = load(name)
        markers = Markers.of(tokenizer, settings.blend_special_str)
        prefix = learn_prefix(tokenizer, settings, markers)
        return cls(model, settings, markers, cache_salt=cache_salt, checkpoint=name, learn_prefix=prefix), tokenizer

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.engine.learning.clear()  # After an error, nothing more is learned.
        self.close()

    def close(self) -> None:
        """Learn the queued documents, and write everything to the tiers."""
        try:
            self.learn_pending()
        finally:
            self.engine.close()

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self, document_ids: Sequence[int], name: str = "") -> int:
        """Prefill a document alone and store its KV; return the number of new chunks, 0 if it was already stored.

        `name` is for operators (`lmc documents`). Raises `InputError` if the document is empty, is too long for the
        model or for memory, or has special tokens or tokens outside of the vocabulary.
        """
        document = self._checked(document_ids, "document", behind=len(self.engine.prefix))
        if special := self.markers.special.intersection(document):
            wrong = f"the document has the special tokens {sorted(special)}, and would never match in a prompt"
            raise InputError(f"{wrong}: encode it with add_special_tokens=False")
        if not self.engine.fits(len(document)):
            raise InputError(f"a document of {len(document)} tokens does not fit into memory: raise max_local_cpu_size")
        if self.knows(document):
            return 0
        started = time.perf_counter()
        behind, cache = len(self.engine.prefix), self._cache_of(self._prefix_kv)
        rows = self._rows_of(prefilled(self.model, document, cache))
        kv = [(keys[behind:], values[behind:]) for keys, values in rows]
        self._note_speed(len(document), 0, started)
        self.engine.store.flush()  # A full write queue would drop chunks.
        namespace = self.engine.namespace(RecordKind.DOCUMENT, self._salt)
        return self._fill(self.engine.begin_document(namespace, document, name) or (), kv)

    def learn_documents(self, prompt_ids: Sequence[int]) -> int:
        """Learn the documents between the separators of a prompt; return the number of new chunks."""
        # The prompt may be longer than the model allows, because each document is computed separately.
        prompt = checked_tokens(prompt_ids, "prompt", sys.maxsize, self.layers.vocabulary)
        return sum(self.learn(prompt[span.start : span.stop]) for span in split(prompt, self.markers).documents)

    def learn_pending(self) -> int:
        """Learn the queued documents, such as unknown documents of earlier prompts; return how many were queued."""
        namespace, count = self.engine.namespace(RecordKind.DOCUMENT, self._salt), len(self.engine.learning)
        for _ in range(count):
            document = self.engine.learning.take()
            if document is not None and document.namespace == namespace:
                try:
                    self.learn(document.tokens, document.name)
                except InputError as error:  # The document came with an earlier prompt, so the current call goes on.
                    log.warning("a document of an earlier prompt was not learned: %s", error)
        return count

    def knows(self, document_ids: Sequence[int]) -> bool:
        """Return whether a document is stored, in memory or on a tier."""
        document = self._checked(document_ids, "document")
        namespace = self.engine.namespace(RecordKind.DOCUMENT, self._salt)
        return all(self.engine.lookup(self.engine.document_keys(document, namespace)))

    def keep(self, token_ids: Sequence[int], cache: DynamicCache) -> int:
        """Store an exact cache for later prompts that start with its tokens; return the number of new chunks.

        The tokens may be those of a prompt and generated tokens. Raises `InputError` for a cache of `how="blend"` or
        `"reuse"`, which is approximate, and for a cache of other tokens.
        """
        if getattr(cache, "lmc_approximate", False):
            raise InputError("a cache of how='blend' or 'reuse' is approximate: store one of how='exact' or 'full'")
        tokens, length = self._checked(token_ids, "prompt"), cache.get_seq_length()
        if not length or cache.layers[0].keys.shape[0] != 1 or length not in (len(tokens) - 1, len(tokens)):
            contents = f"{length} tokens of {len(cache.layers[0].keys)} sequences" if length else "no tokens"
            raise InputError(
                f"the cache has {contents}, but {len(tokens)} tokens were given: pass the tokens of this cache"
            )
        if any(layer.keys.shape[-2] < length for layer in cache.layers):
            raise InputError("a layer of the cache has only the last tokens of its window: pass a cache of `prefill`")
        return self._store_exact(tokens[:length], self._rows_of(cache))

    # -- prefilling --------------------------------------------------------------------------------------------------

    def prefill(
        self, prompt_ids: Sequence[int], how: How = "blend", *, policy: RecomputePolicy | None = None
    ) -> Prefilled:
        """Prefill a prompt.

        how: "full"   Nothing is reused.
             "exact"  The longest stored prefix is reused, and the prompt's chunks are stored for later prompts.
             "blend"  Stored documents are reused at any position, and `policy` says which of their tokens are
                      recomputed. The default is the policy of the settings. Unknown documents are computed. They are
                      learned after the answer of `generate`, or otherwise before the next prefill.
             "reuse"  Stored documents are reused without recomputing tokens, as a control.
        Raises `InputError` for an empty prompt, a prompt that is too long for the model, or tokens outside of the
        vocabulary. Raises `ConfigError` for "blend" and "reuse" if the settings disable blending.
        """
        if how not in ("blend", "reuse", "exact", "full"):
            raise InputError(f"invalid how={how!r}: use 'blend', 'reuse', 'exact' or 'full'")
        if how in ("blend", "reuse") and not self.settings.enable_blending:
            raise ConfigError(f"how={how!r} needs enable_blending: true in the settings")
        prompt = self._checked(prompt_ids, "prompt")
        started = time.perf_counter()
        self.learn_pending()
        policy = BLIND_REUSE if how == "reuse" else policy or self.policy
        lost: set[ChunkKey] = set()
        while True:  # Each round loses at least one chunk, so this ends.
            try:
                return self._prefill(prompt, how, policy, started, lost)
            except ChunkLost as error:
                log.warning("%s; the prompt will be prefilled without them", error)
                lost.update(map(ChunkKey, error.keys))

    def generate(self, prompt_ids: Sequence[int], how: How = "blend", **options: Any) -> tuple[list[int], Report]:
        """Prefill a prompt and generate an answer; return the new tokens and the report of the prefill.

        `options` are passed to `model.generate`. One sequence is generated, even if the model's generation config asks
        for more. With `how="exact"` and `save_decode_cache`, the KV of the generated tokens is stored too, so that the
        next turn of a conversation reuses it. Raises `InputError` for options that cannot continue a prefilled prompt.
        """
        check_options(options)
        prefilled_prompt = self.prefill(prompt_ids, how)
        prompt = self._checked(prompt_ids, "prompt")
        ids = torch.tensor([prompt], device=self.layers.device)
        options = {
            "attention_mask": torch.ones_like(ids),
            cache_argument(self.model): prefilled_prompt.cache,
            **options,
            **CONTINUES,
        }
        out = self.model.generate(input_ids=ids, **options)[0].tolist()
        if how == "exact" and self.settings.save_decode_cache:
            length = min(prefilled_prompt.cache.get_seq_length(), self.layers.positions)
            self._store_exact(out[:length], self._rows_of(prefilled_prompt.cache))
        self.learn_pending()
        return out[len(prompt) :], prefilled_prompt.report

    def _prefill(
        self, prompt: list[int], how: How, policy: RecomputePolicy, started: float, lost: set[ChunkKey]
    ) -> Prefilled:
        segments = split(prompt, self.markers)
        plan = self._plan(prompt, segments, how, policy.ratio, lost)
        if self.blends and plan.pieces:
            # The blender is faster for exact prefixes, too: after a cached prefix, transformers' attention also reads
            # masked keys.
            question = max([segments.question.start, *(piece.stop for piece in plan.documents)])
            logits, cache, counts = self._blended(prompt, question, plan, policy)
        else:
            logits, cache, counts = self._by_model(prompt, plan)
        counts |= {"unknown": len(plan.unknown), "skipped": plan.skipped, "note": plan.note}
        report = Report(how=how, tokens=len(prompt), seconds=self._elapsed(started), **counts)
        if how == "exact":
            self._store_exact(prompt, self._rows_of(cache))
        elif how != "full" and self.settings.blend_learn:
            self.engine.learn_later(prompt, plan.unknown, self._salt)
        if how != "full":
            # The KV before the first approximate token is exact, and all KV after it is approximate. The exact KV of
            # the text before the first document is stored for later prompts.
            exact = min([segments.system.stop, *(piece.at for piece in plan.approximate)])
            self._store_exact(prompt[:exact], self._rows_of(cache))
        cache.crop(-1)
        return Prefilled(logits=logits, cache=cache, report=report)

    def _plan(self, prompt: list[int], segments: Segments, how: How, ratio: float, lost: set[ChunkKey]) -> Plan:
        """Plan which tokens of the prompt are loaded from the store."""
        # The last token is always computed, because its logits are needed.
        match = Match(
            prompt=len(prompt),
            exact_stop=len(prompt) - 1,
            min_tokens=self.settings.blend_min_tokens,
            ratio=ratio,
            refused=self._refused,
            lost=frozenset(lost),
        )
        if how == "full":
            return Plan(match=match)
        documents: tuple[DocumentMatch, ...] = ()
        if how != "exact":
            documents = self.engine.documents(prompt, segments.documents, self._salt, start=segments.opening)
            documents = self.engine.with_known(prompt, documents, self._salt)
        chain = self.engine.token_chain(prompt, self._salt, ends=[segments.system.stop])
        return self.engine.plan(self.engine.look(replace(match, documents=documents), chain))

    def _blended(self, prompt: list[int], question: int, plan: Plan, policy: RecomputePolicy) -> Computed:
        length, loaded, begun = len(prompt), Counter[str](), time.perf_counter()
        blend_input = BlendInput(
            length=length,
            stop=length,
            question=question,
            placements=plan.pieces,
            learned_after=len(self.engine.prefix),
        )
        with closing(self.engine.layers(plan.pieces, loaded)) as reader:
            canvas = DenseCanvas(self.layers, prompt, plan.pieces, reader)
            try:
                result = Blender(canvas, blend_input, policy).run()
                next(reader, None)  # The reader checks at its end that no slot was given to another chunk.
            finally:
                # All copies must have ended here, because other chunks may get the slots after this.
                settle(self.layers.device)
        exact = plan.tokens - result.reused
        if not result.reused and loaded.keys() <= MEMORY:
            self._note_speed(length - exact, exact, begun)
        cache = self._cache_of(canvas.kv)
        cache.lmc_approximate = result.reused > 0
        counts = {"computed": tuple(result.computed), "loaded": dict(loaded), "exact": exact, "reused": result.reused}
        recomputed = {"charged_budget": result.charged_budget, "recomputed": tuple(result.recomputed)}
        return canvas.logits, cache, counts | recomputed

    def _by_model(self, prompt: list[int], plan: Plan) -> Computed:
        """Prefill with the model itself: the tokens after an exact prefix, or the whole prompt."""
        loaded = Counter[str]()
        with closing(self.engine.layers(plan.exact, loaded)) as reader:
            shape, device = self.layers.shape, self.layers.device
            cache = self._cache_of([side_by_side(parts, shape, self._kernels, device) for _, parts in reader])
        begun, new = time.perf_counter(), len(prompt) - plan.reach
        logits = forward(self.model, prompt[plan.reach :], cache).logits[0, -1]
        self._note_speed(new, plan.reach, begun)
        computed = (new,) * self.layers.shape.layers
        return logits, cache, {"computed": computed, "loaded": dict(loaded), "exact": plan.reach}

    # -- storing -----------------------------------------------------------------------------------------------------

    def _store_exact(self, tokens: Sequence[int], kv: Sequence[KV]) -> int:
        """Store the KV of a prefix for later prompts that start with it; return the number of new chunks."""
        chain = self.engine.token_chain(tokens, self._salt)
        # More chunks than slots would evict the first chunks again.
        bounds = chunk_bounds(len(tokens), self.engine.chunk_size)[: self.engine.store.slots]
        chunks = [NewChunk(number, stop - start) for number, (start, stop) in enumerate(bounds)]
        return self._fill(self.engine.begin_exact(chain, chunks, self._salt), kv)

    def _fill(self, slots: Iterable[Reservation | None], kv: Sequence[KV]) -> int:
        """Copy the KV of chunks into their slots, and make them visible; return the number of chunks."""
        store, shape, filled = self.engine.store, self.layers.shape, False
        begun = [slot for slot in slots if slot is not None]
        firsts = [slot.meta.first for slot in begun]
        try:
            views = [store.view(slot) for slot in begun]
            for layer, (keys, values) in enumerate(kv if begun else ()):
                raw = [(view[layer], slot.meta.tokens) for view, slot in zip(views, begun, strict=True)]
                self._kernels.spread(keys, values, [shape.part(*part) for part in raw], firsts)
            settle(self.layers.device)
            store.commit(begun)
            filled = True
        finally:
            if not filled:
                try:
                    settle(self.layers.device)  # No copy into a slot may be in flight when another chunk gets the slot.
                finally:
                    for slot in begun:
                        store.abort(slot)
        return len(begun)

    # -- the model ---------------------------------------------------------------------------------------------------

    @cached_property
    def _prefix_kv(self) -> list[KV]:
        """The keys and values `[H, T, D]`, by layer, of the tokens after which documents are learned."""
        prefix = self.engine.prefix
        rows = self._rows_of(prefilled(self.model, prefix)) if prefix else ()
        return [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in rows]

    def _rows_of(self, cache: DynamicCache) -> list[KV]:
        return rows_of(cache, latent=self.layers.latent)

    def _cache_of(self, kv: Sequence[KV]) -> DynamicCache:
        return cache_of(kv, latent=self.layers.latent)

    def _why_not(self) -> str:
        """Test the model. Returns and logs why documents are not blended; an empty string if they are."""
        try:
            prove_model(self.model, self.layers)
        except UnsupportedModel as error:
            log.error("blending was switched off: %s", error)
            return "blending is off: the self-test failed for this model"
        return ""

    def _note_speed(self, tokens: int, behind: int, started: float) -> None:
        """Report the time of a prefill to the cost model.

        `tokens` is the number of computed tokens, and `behind` is the number of tokens before them.
        """
        seconds = self._elapsed(started)
        self.engine.store.cost.prefilled(tokens, seconds, behind)

    def _elapsed(self, started: float) -> float:
        settle(self.layers.device)
        return time.perf_counter() - started

    def _checked(self, token_ids: Sequence[int], name: str, behind: int = 0) -> list[int]:
        return checked_tokens(token_ids, name, self.layers.positions - behind, self.layers.vocabulary)


def side_by_side(parts: Sequence[KV], shape: KVShape, kernels: Kernels, device: torch.device) -> KV:
    """Join stored parts `[T, H, D]`, on the host or on the device, to keys and values `[H, T, D]` on the device."""
    together = shape.empty(sum(len(keys) for keys, _ in parts), device)
    kernels.stage(parts, together)
    keys, values = (half.transpose(0, 1) for half in together)
    return keys, values
