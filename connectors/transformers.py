"""lmc for transformers: a causal language model whose prompts are prefilled from stored KV.

    cached, tokenizer = CachedModel.load("path/or/id", settings)
    cached.learn(document_ids)
    done = cached.prefill(prompt_ids, how="blend")       # logits, a transformers cache, a report
    model.generate(ids, past_key_values=done.cache)      # continues from there: `ids` is the prompt

One prompt at a time; not thread-safe, as the model is not.
"""

import json
import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from lmc.blend.blender import Blend, Placed
from lmc.blend.layers import DecoderLayers
from lmc.blend.segments import Segments, Span, Variants, separator_variants, split
from lmc.blend.select import Policy
from lmc.config import Settings
from lmc.connectors.hf import cache_of, fingerprint, forward, load, rows_of
from lmc.connectors.report import How, Planned, Prefilled, Report
from lmc.connectors.selftest import proves_itself
from lmc.engine import MEMORY, CacheEngine, Kind, Piece, offer, trim
from lmc.errors import ChunkLost, ConfigError, InputError
from lmc.keys import ChunkKey, Namespace
from lmc.storage.speed import LoadPolicy

log = logging.getLogger(__name__)

# Options of model.generate that make several sequences, or another result, of the one cache.
ONE_SEQUENCE = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "use_cache": True,
    "past_key_values": None,
}


class CachedModel:
    """A transformers model with a cache engine. Close it, or use it under `with`, so that everything reaches the disk."""

    def __init__(
        self,
        model: Any,
        settings: Settings,
        separator_ids: Variants | Sequence[int],
        *,
        cache_salt: str = "",
    ) -> None:
        """Raise `UnsupportedModel`, `ConfigError`, `NoMemory` or `TierUnusable`.

        `separator_ids` is one token sequence, or all that the special string can come out as (`segments.separator_variants`).
        """
        self.model, self.settings = model.eval(), settings
        self.layers = DecoderLayers(model)
        self.separators: Variants = _variants(separator_ids, self.layers.vocabulary)
        self.policy = Policy(
            strategy=settings.blend_strategy,
            ratios=settings.blend_recompute_ratios,
            check_layers=settings.blend_check_layers,
            thresholds=settings.blend_thresholds,
        )
        self.policy.check_depth(self.layers.shape.layers)
        self.blends = proves_itself(model, self.layers)
        self.engine = CacheEngine(settings, self.layers.shape, self._namespace(cache_salt), device=self.layers.device)
        self._to_learn: list[list[int]] = []

    @classmethod
    def load(cls, name: str | Path, settings: Settings, *, cache_salt: str = "") -> tuple["CachedModel", Any]:
        """The model in a directory or under a hub's id, cached, and its tokenizer."""
        model, tokenizer = load(name)
        variants = separator_variants(tokenizer.encode, settings.blend_special_str)
        return cls(model, settings, variants, cache_salt=cache_salt), tokenizer

    def __enter__(self) -> "CachedModel":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._to_learn = []  # something is wrong already: no more work than writing down
        self.close()

    def close(self) -> None:
        """Learn what is still to be learned, write everything down."""
        try:
            self.learn_pending()
        finally:
            self.engine.close()

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self, document_ids: Sequence[int]) -> int:
        """Prefill a document alone and store its KV; return how many chunks are new (0 if it was known).

        Raises `InputError` if it is empty, too long for the model or for memory, or has tokens out of the vocabulary.
        """
        document = self._checked(document_ids, "document")
        if not self.engine.fits(document):
            raise InputError(
                f"a document of {len(document)} tokens does not fit into the slab: raise max_local_cpu_size"
            )
        if self.engine.find_document(document, 0) is not None:
            return 0
        started = time.perf_counter()
        kv = rows_of(forward(self.model, document, DynamicCache()).past_key_values)
        self._computed(len(document), 0, started)
        return self.engine.store(Kind.DOCUMENT, document, kv, patient=True)

    def learn_pending(self) -> int:
        """Learn the unknown documents of earlier prompts; return how many there were."""
        pending, self._to_learn = self._to_learn, []
        learned = [self.learn(document) for document in pending if self.engine.fits(document)]
        return len(learned)

    def knows(self, document_ids: Sequence[int]) -> bool:
        """Whether a document is stored, in memory or on a tier."""
        return self.engine.find_document(self._checked(document_ids, "document"), 0) is not None

    def keep(self, token_ids: Sequence[int], cache: DynamicCache) -> int:
        """Store an exact cache, prompt and generated tokens alike, for later prompts that start with it; return new chunks.

        Only for caches of `how="exact"` or `"full"`: a blended cache is approximate, and keeping it as exact would poison others.
        """
        if getattr(cache, "lmc_approximate", False):
            raise InputError("this cache was blended or blindly reused: it must not be stored as exact")
        tokens, held = self._checked(token_ids, "prompt"), cache.get_seq_length()
        if cache.layers[0].keys.shape[0] != 1 or held not in (len(tokens) - 1, len(tokens)):
            raise InputError(
                f"the cache holds {held} tokens of {len(cache.layers[0].keys)} sequences, which are not these {len(tokens)}"
            )
        return self.engine.store(Kind.EXACT, tokens[:held], rows_of(cache))

    # -- prefilling --------------------------------------------------------------------------------------------------

    def prefill(self, prompt_ids: Sequence[int], how: How = "blend", *, policy: Policy | None = None) -> Prefilled:
        """Prefill a prompt.

        how: "full"   nothing is reused
             "exact"  the longest stored prefix is reused; the prompt's chunks are stored for the next one
             "blend"  known documents are reused anywhere and repaired as `policy` says (default: the settings'); unknown ones are computed,
                      and learned when `generate` has answered, or else before the next prefill
             "reuse"  known documents are reused blindly: the control that shows what repairing is for
        Raises `InputError` for an empty prompt, one longer than the model's positions, or tokens out of the vocabulary.
        """
        if how not in ("blend", "reuse", "exact", "full"):
            raise InputError(f"how={how!r}: use 'blend', 'reuse', 'exact' or 'full'")
        if how in ("blend", "reuse") and not self.settings.enable_blending:
            raise ConfigError(f"how={how!r} needs enable_blending: true in the settings")
        prompt = self._checked(prompt_ids, "prompt")
        started = time.perf_counter()
        self.learn_pending()
        lost: set[ChunkKey] = set()
        while True:  # every round loses at least one chunk more, so the last one has nothing to lose
            try:
                done = self._prefill(prompt, how, policy or self.policy, started, lost)
            except ChunkLost as error:
                log.warning("%s; prefilling without", error)
                lost.update(map(ChunkKey, error.keys))
            else:
                done.cache.crop(-1)
                return done

    def generate(self, prompt_ids: Sequence[int], how: How = "blend", **options: Any) -> tuple[list[int], Report]:
        """Prefill, then let the model generate (`options` as for `model.generate`); return the new tokens and the report.

        Exact turns are kept with what was generated (if `save_decode_cache`), so that the next turn of a conversation starts behind them.
        """
        refused = [name for name, fine in ONE_SEQUENCE.items() if options.get(name, fine) != fine]
        if refused:
            raise InputError(
                f"generate: {', '.join(refused)} cannot be used here; call model.generate on a prefilled cache yourself"
            )
        done = self.prefill(prompt_ids, how)
        prompt = list(prompt_ids)
        ids = torch.tensor([prompt], device=self.layers.device)
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=done.cache, **options
        )[0].tolist()
        if how == "exact" and self.settings.save_decode_cache:
            held = min(done.cache.get_seq_length(), self.layers.positions)
            self.engine.store(Kind.EXACT, out[:held], rows_of(done.cache))
        self.learn_pending()
        return out[len(prompt) :], done.report

    def _prefill(self, prompt: list[int], how: How, policy: Policy, started: float, lost: set[ChunkKey]) -> Prefilled:
        if how == "full":
            return self._by_model(prompt, Planned(), how, started)
        policy = Policy(strategy="none", ratios=(0.0,)) if how == "reuse" else policy
        segments = split(prompt, self.separators)
        planned = self._worthwhile(prompt, segments, how, policy.ratios[-1], lost)
        if self.blends and planned.tokens:
            # For exact prefixes too: transformers' attention behind a cache reads a whole mask, ours no key that is hidden.
            done = self._blended(prompt, segments, planned, how, policy, started)
        else:
            done = self._by_model(prompt, planned, how, started)
        if how == "exact":
            self.engine.store(Kind.EXACT, prompt, rows_of(done.cache))
        elif self.settings.blend_learn:
            self._to_learn = [prompt[span.start : span.stop] for span in planned.unknown]
        self._keep_system(prompt, segments.system, done.cache)
        return done

    def _why_not(self, documents: int) -> str:
        """Why a prompt is better, or has to be, computed behind its exact prefix, if `documents` tokens could be reused."""
        if not self.blends:
            return "blending is off: the self-test failed for this model"
        if documents and documents < self.settings.blend_min_tokens:
            return f"{documents} tokens of stored documents are fewer than blend_min_tokens={self.settings.blend_min_tokens}"
        return ""

    def _worthwhile(
        self, prompt: list[int], segments: Segments, how: How, ratio: float, lost: set[ChunkKey]
    ) -> Planned:
        """The plan with all that is stored, or, if loading would take longer than computing, with what is in memory."""
        planned = self._plan(prompt, segments, how, lambda piece: piece.key not in lost, lost)
        wanted = offer(self.layers.shape, planned.exact, planned.documents, ratio=ratio, prompt=len(prompt))
        choice = self.engine.speeds.choose(wanted, LoadPolicy(self.settings.load_policy))
        if choice.load or not wanted.records:
            return planned
        near = self._plan(prompt, segments, how, lambda piece: piece.key not in lost and piece.place in MEMORY, lost)
        note = "; ".join(filter(None, (near.note, choice.why)))
        return replace(near, skipped=planned.tokens - near.tokens, note=note)

    def _plan(
        self, prompt: list[int], segments: Segments, how: How, usable: Callable[[Piece], bool], lost: set[ChunkKey]
    ) -> Planned:
        """Usable pieces for the exact prefix and for every known document behind it, and the documents that are not known."""
        limit = len(prompt) - 1  # the last token is always computed, for its logits
        whole = list(takewhile(usable, self.engine.find_prefix(prompt)))
        if how == "exact":
            return Planned(exact=trim(whole, 0, limit))
        before = prompt[: segments.system.stop]
        # A document at position 0 is as exact there as it is alone.
        first = list(takewhile(usable, self.engine.find_document(before, 0) or []))
        prefixes = [whole, list(takewhile(usable, self.engine.find_prefix(before))), first]
        prefix = trim(max(prefixes, key=lambda pieces: sum(p.tokens for p in pieces)), 0, limit)
        reach = sum(piece.tokens for piece in prefix)
        known: list[Piece] = []
        unknown = []
        for span in segments.documents:
            if span.stop <= reach:
                continue
            pieces = self.engine.find_document(prompt[span.start : span.stop], span.start)
            if pieces is None or any(piece.key in lost for piece in pieces):
                unknown.append(span)
            else:
                known += trim([piece for piece in pieces if usable(piece)], max(reach, span.start), limit)
        note = self._why_not(sum(piece.tokens for piece in known))
        return Planned(exact=prefix, documents=[] if note else known, unknown=unknown, note=note)

    def _blended(
        self, prompt: list[int], segments: Segments, planned: Planned, how: How, policy: Policy, started: float
    ) -> Prefilled:
        placed = [Placed(at=p.at, tokens=p.tokens, first=p.first) for p in planned.pieces]
        loaded: Counter[str] = Counter()
        begun = time.perf_counter()
        with closing(self.engine.layers(planned.pieces, loaded)) as reader:
            result = Blend(self.layers, prompt, placed, segments.question, policy).run(reader)
        assert result.logits is not None
        exact = planned.tokens - result.reused
        if not result.reused and loaded.keys() <= MEMORY:
            self._computed(len(prompt) - exact, exact, begun)
        cache = cache_of(list(zip(result.keys, result.values, strict=True)))
        cache.lmc_approximate = result.reused > 0
        report = Report(
            how=how,
            tokens=len(prompt),
            computed=tuple(result.computed),
            exact=exact,
            reused=result.reused,
            charged_budget=result.charged_budget,
            loaded=dict(loaded),
            unknown=len(planned.unknown),
            skipped=planned.skipped,
            seconds=self._elapsed(started),
            note=planned.note,
            repaired=tuple(result.repaired),
        )
        return Prefilled(logits=result.logits, cache=cache, report=report)

    def _by_model(self, prompt: list[int], planned: Planned, how: How, started: float) -> Prefilled:
        """The model's own prefill behind an exact prefix, or of the whole prompt."""
        loaded: Counter[str] = Counter()
        stored = [
            kv.to(self.layers.device).transpose(1, 2) for kv in self.engine.retrieve(planned.exact, loaded)
        ]  # [K, H, T, D]
        cache, reach = cache_of([(kv[0], kv[1]) for kv in stored]), planned.tokens
        begun = time.perf_counter()
        logits = forward(self.model, prompt[reach:], cache).logits[0, -1]
        self._computed(len(prompt) - reach, reach, begun)
        report = Report(
            how=how,
            tokens=len(prompt),
            computed=(len(prompt) - reach,) * self.layers.shape.layers,
            exact=reach,
            reused=0,
            charged_budget=0.0,
            loaded=dict(loaded),
            unknown=len(planned.unknown),
            skipped=planned.skipped,
            seconds=self._elapsed(started),
            note=planned.note,
        )
        return Prefilled(logits=logits, cache=cache, report=report)

    def _keep_system(self, prompt: list[int], system: Span, cache: DynamicCache) -> None:
        """The text before the first document is exact whatever follows: stored for the next prompt."""
        if len(system):
            rows = [(keys[: system.stop], values[: system.stop]) for keys, values in rows_of(cache)]
            self.engine.store(Kind.EXACT, prompt[: system.stop], rows)

    # -- the model ---------------------------------------------------------------------------------------------------

    def _computed(self, tokens: int, behind: int, started: float) -> None:
        """What computing costs, from prefills that were mostly computing."""
        seconds = self._elapsed(started)
        if behind <= tokens:
            self.engine.speeds.computed(tokens, seconds, length=2 * behind + tokens)

    def _elapsed(self, started: float) -> float:
        if self.layers.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _checked(self, token_ids: Sequence[int], what: str) -> list[int]:
        tokens = _integers(token_ids, what)
        if not tokens:
            raise InputError(f"the {what} is empty")
        if len(tokens) > self.layers.positions:
            raise InputError(f"the {what} has {len(tokens)} tokens, the model takes {self.layers.positions}")
        if min(tokens) < 0 or max(tokens) >= self.layers.vocabulary:
            raise InputError(f"the {what} has tokens outside of the vocabulary of {self.layers.vocabulary}")
        return tokens

    def _namespace(self, cache_salt: str) -> Namespace:
        shape, config = self.layers.shape, self.model.config
        return Namespace(
            kind="tokens",
            model=fingerprint(self.model),
            dtype=str(shape.dtype),
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rope=json.dumps(config.rope_parameters, sort_keys=True, default=str),
            chunk_size=self.settings.chunk_size,
            cache_salt=cache_salt,
        )


def _integers(token_ids: Any, what: str) -> list[int]:
    """Token ids as integers: of a list, an array or tensor `[T]`, or one of `[1, T]` as tokenizers return it."""
    listed = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if isinstance(listed, list | tuple) and len(listed) == 1 and isinstance(listed[0], list | tuple):
        listed = listed[0]
    try:
        return [operator.index(token) for token in listed]
    except TypeError as error:
        raise InputError(
            f"the {what} must be a sequence of integer token ids, one prompt at a time: {error}"
        ) from error


def _variants(separator_ids: Variants | Sequence[int], vocabulary: int) -> Variants:
    """One sequence or several, as a tuple of sequences."""
    try:
        listed: list[Any] = list(separator_ids)
        nested = listed if listed and isinstance(listed[0], list | tuple) else [listed]
        variants = tuple(tuple(operator.index(token) for token in variant) for variant in nested)
    except TypeError as error:
        raise ConfigError(
            f"separator_ids must be token ids of blend_special_str, or several sequences of them: {error}"
        ) from error
    if not all(variants) or any(not 0 <= token < vocabulary for variant in variants for token in variant):
        raise ConfigError(
            f"separator_ids {separator_ids}: a sequence is empty, or not in the vocabulary of {vocabulary}"
        )
    return variants
