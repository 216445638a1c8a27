"""lmc for transformers: a causal language model whose prompts are prefilled from stored KV.

    cached, tokenizer = CachedModel.load("path/or/id", settings)
    cached.learn(document_ids)
    done = cached.prefill(prompt_ids, how="blend")       # logits, a transformers cache, a report
    model.generate(ids, past_key_values=done.cache)      # continues from there

One prompt at a time; not thread-safe, as the model is not.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
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
from lmc.connectors.hf import cache_of, fingerprint, load, rows_of
from lmc.connectors.report import How, Prefilled, Report
from lmc.engine import CacheEngine, Kind, Piece, trim
from lmc.errors import ChunkLost, ConfigError, InputError
from lmc.keys import ChunkKey, Namespace

log = logging.getLogger(__name__)

SELF_TEST_TOKENS = 64
TOLERANCE = {
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 2e-1,
}  # of the self-test, relative to the largest logit


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
        if not separator_ids:
            raise ConfigError("separator_ids is empty: give the token ids of blend_special_str")
        self.separators: Variants = _variants(separator_ids)
        self.model, self.settings = model.eval(), settings
        self.layers = DecoderLayers(model)
        deepest = max(settings.blend_check_layers)
        if deepest >= self.layers.shape.layers:
            raise ConfigError(
                f"blend_check_layers: {deepest}, but the model has layers 0 to {self.layers.shape.layers - 1}"
            )
        self.policy = Policy(
            strategy=settings.blend_strategy,
            ratios=settings.blend_recompute_ratios,
            check_layers=settings.blend_check_layers,
            thresholds=settings.blend_thresholds,
        )
        self.blends = self._self_test()
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Learn what is still to be learned, write everything down."""
        self.learn_pending()
        self.engine.close()

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self, document_ids: Sequence[int]) -> int:
        """Prefill a document alone and store its KV; return how many chunks are new (0 if it was known).

        Raises `InputError` if it is empty, too long for the model, or has tokens out of the vocabulary.
        """
        document = self._checked(document_ids, "document")
        if self.engine.find_document(document, 0) is not None:
            return 0
        return self.engine.store(
            Kind.DOCUMENT, document, rows_of(self._forward(document, DynamicCache()).past_key_values)
        )

    def learn_pending(self) -> int:
        """Learn the unknown documents of earlier prompts; return how many there were."""
        pending, self._to_learn = self._to_learn, []
        for document in pending:
            self.learn(document)
        return len(pending)

    def keep(self, token_ids: Sequence[int], cache: DynamicCache) -> int:
        """Store an exact cache, prompt and generated tokens alike, for later prompts that start with it; return new chunks.

        Only for caches of `how="exact"` or `"full"`: a blended cache is approximate, and keeping it as exact would poison others.
        """
        if getattr(cache, "lmc_approximate", False):
            raise InputError("this cache was blended or blindly reused: it must not be stored as exact")
        tokens = self._checked(token_ids, "prompt")[: cache.get_seq_length()]
        return self.engine.store(Kind.EXACT, tokens, rows_of(cache))

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
        self.learn_pending()
        prompt = self._checked(prompt_ids, "prompt")
        started = time.perf_counter()
        lost: set[ChunkKey] = set()
        while True:  # every round loses at least one chunk more, so the last one has nothing to lose
            try:
                return self._prefill(prompt, how, policy or self.policy, started, lost)
            except ChunkLost as error:
                log.warning("%s; prefilling without", error)
                lost.update(map(ChunkKey, error.keys))

    def generate(self, prompt_ids: Sequence[int], how: How = "blend", **options: Any) -> tuple[list[int], Report]:
        """Prefill, then let the model generate (`options` as for `model.generate`); return the new tokens and the report.

        Exact turns are kept with what was generated (if `save_decode_cache`), so that the next turn of a conversation starts behind them.
        """
        done = self.prefill(prompt_ids, how)
        prompt = list(prompt_ids)
        ids = torch.tensor([prompt], device=self.layers.device)
        done.cache.crop(-1)  # generate computes the last prompt token again, for its logits
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=done.cache, **options
        )[0].tolist()
        if how == "exact":
            self.keep(out[:-1] if self.settings.save_decode_cache else prompt, done.cache)
        self.learn_pending()
        return out[len(prompt) :], done.report

    def _prefill(self, prompt: list[int], how: How, policy: Policy, started: float, lost: set[ChunkKey]) -> Prefilled:
        if how == "full":
            return self._whole(prompt, started, how)
        if how == "exact":
            return self._exact(prompt, started, lost)
        segments = split(prompt, self.separators)
        plan, unknown = self._plan(prompt, segments, lost)
        known = sum(piece.tokens for piece in plan)
        note = self._why_not(known)
        if note:
            done = self._whole(prompt, started, how, note, len(unknown))
        else:
            done = self._blended(prompt, segments, plan, how, policy, started, len(unknown))
        if self.settings.blend_learn:
            self._to_learn = [prompt[span.start : span.stop] for span in unknown]
        self._keep_system(prompt, segments.system, done)
        return done

    def _why_not(self, known: int) -> str:
        """Why a prompt is better, or has to be, computed in full."""
        if not self.blends:
            return "blending is off: the self-test failed for this model"
        if known == 0:
            return "nothing of this prompt is stored"
        if known < self.settings.blend_min_tokens:
            return f"{known} stored tokens are fewer than blend_min_tokens={self.settings.blend_min_tokens}"
        return ""

    def _plan(self, prompt: list[int], segments: Segments, lost: set[ChunkKey]) -> tuple[list[Piece], list[Span]]:
        """Pieces for the exact prefix and every known document behind it, and the documents that are not known."""
        limit = len(prompt) - 1  # the last token is always computed, for its logits
        prefixes = [self._prefix(prompt, lost), self._prefix(prompt[: segments.system.stop], lost)]
        plan = trim(max(prefixes, key=lambda pieces: sum(p.tokens for p in pieces)), 0, limit)
        reach = sum(piece.tokens for piece in plan)
        unknown = []
        for span in segments.documents:
            if span.stop <= reach:
                continue
            pieces = self.engine.find_document(prompt[span.start : span.stop], span.start)
            if pieces is None or any(piece.key in lost for piece in pieces):
                unknown.append(span)
            else:
                plan += trim(pieces, max(reach, span.start), limit)
        return plan, unknown

    def _blended(
        self,
        prompt: list[int],
        segments: Segments,
        plan: list[Piece],
        how: How,
        policy: Policy,
        started: float,
        unknown: int,
    ) -> Prefilled:
        if how == "reuse":
            policy = Policy(strategy="none")
        placed = [Placed(at=p.at, tokens=p.tokens, first=p.first) for p in plan]
        loaded: Counter[str] = Counter()
        with torch.inference_mode(), closing(self.engine.layers(plan, loaded)) as reader:
            blend = Blend(self.layers, prompt, placed, segments.question, policy)
            for _ in blend.steps(reader):
                pass
        result = blend.result
        assert result.logits is not None
        seconds = self._elapsed(started)
        cache = cache_of(list(zip(result.keys, result.values, strict=True)))
        known = sum(piece.tokens for piece in plan)
        cache.lmc_approximate = result.reused > 0
        report = Report(
            how=how,
            tokens=len(prompt),
            computed=tuple(result.computed),
            exact=known - result.reused,
            reused=result.reused,
            charged_budget=result.charged_budget,
            loaded=dict(loaded),
            unknown=unknown,
            seconds=seconds,
            repaired=tuple(result.repaired),
        )
        return Prefilled(logits=result.logits, cache=cache, report=report)

    def _prefix(self, tokens: list[int], lost: set[ChunkKey]) -> list[Piece]:
        return list(takewhile(lambda piece: piece.key not in lost, self.engine.find_prefix(tokens)))

    def _exact(self, prompt: list[int], started: float, lost: set[ChunkKey]) -> Prefilled:
        plan = trim(self._prefix(prompt, lost), 0, len(prompt) - 1)
        reach = sum(piece.tokens for piece in plan)
        loaded: Counter[str] = Counter()
        kv = []
        with closing(self.engine.layers(plan, loaded)) as reader:
            for _, parts in reader:
                both = torch.cat(parts, dim=1).to(self.layers.device)  # [K, T, H, D]
                kv.append((both[0].transpose(0, 1), both[1].transpose(0, 1)))
        cache = cache_of(kv)
        out = self._forward(prompt[reach:], cache)
        logits = out.logits[0, -1]
        seconds = self._elapsed(started)
        self.engine.store(Kind.EXACT, prompt, rows_of(cache))
        return Prefilled(logits=logits, cache=cache, report=self._plain_report("exact", prompt, reach, seconds, loaded))

    def _whole(self, prompt: list[int], started: float, how: How, note: str = "", unknown: int = 0) -> Prefilled:
        cache = DynamicCache()
        logits = self._forward(prompt, cache).logits[0, -1]
        seconds = self._elapsed(started)
        report = self._plain_report(how, prompt, 0, seconds, Counter(), note, unknown)
        return Prefilled(logits=logits, cache=cache, report=report)

    def _keep_system(self, prompt: list[int], system: Span, done: Prefilled) -> None:
        """The text before the first document is exact whatever follows: stored for the next prompt."""
        if len(system):
            rows = [(keys[: system.stop], values[: system.stop]) for keys, values in rows_of(done.cache)]
            self.engine.store(Kind.EXACT, prompt[: system.stop], rows)

    def _plain_report(
        self,
        how: How,
        prompt: list[int],
        exact: int,
        seconds: float,
        loaded: "Counter[str]",
        note: str = "",
        unknown: int = 0,
    ) -> Report:
        computed = (len(prompt) - exact,) * self.layers.shape.layers
        return Report(
            how=how,
            tokens=len(prompt),
            computed=computed,
            exact=exact,
            reused=0,
            charged_budget=0.0,
            loaded=dict(loaded),
            unknown=unknown,
            seconds=seconds,
            note=note,
        )

    # -- the model ---------------------------------------------------------------------------------------------------

    def _forward(self, tokens: Sequence[int], cache: DynamicCache) -> Any:
        """The model's own forward behind what `cache` holds."""
        ids = torch.tensor([list(tokens)], device=self.layers.device)
        with torch.inference_mode():
            return self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def _elapsed(self, started: float) -> float:
        if self.layers.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _checked(self, token_ids: Sequence[int], what: str) -> list[int]:
        tokens = [int(token) for token in token_ids]
        if not tokens:
            raise InputError(f"the {what} is empty")
        if len(tokens) > self.layers.positions:
            raise InputError(f"the {what} has {len(tokens)} tokens, the model takes {self.layers.positions}")
        if min(tokens) < 0 or max(tokens) >= self.layers.vocabulary:
            raise InputError(f"the {what} has tokens outside of the vocabulary of {self.layers.vocabulary}")
        return tokens

    def _self_test(self) -> bool:
        """Whether our layer loop computes what the model computes; if not, blending is off and everything else goes on."""
        generator = torch.Generator().manual_seed(0)
        count = min(SELF_TEST_TOKENS, self.layers.positions)
        tokens = torch.randint(self.layers.vocabulary, (count,), generator=generator).tolist()
        expected = self._forward(tokens, DynamicCache()).logits[0, -1].float()
        with torch.inference_mode():
            blend = Blend(self.layers, tokens, [], Span(0, count), Policy(strategy="none"))
            for _ in blend.steps(iter(())):
                pass
        assert blend.result.logits is not None
        worst = float((blend.result.logits.float() - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
        good = worst <= TOLERANCE[self.layers.shape.dtype]
        if not good:
            log.error(
                "blending is off: on %d random tokens lmc's layers differ from the model's by %.2g (relative)",
                count,
                worst,
            )
        return good

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


def _variants(separator_ids: Variants | Sequence[int]) -> Variants:
    one = tuple(i for i in separator_ids if isinstance(i, int))
    several = tuple(tuple(v) for v in separator_ids if not isinstance(v, int))
    return (one,) if one else several
