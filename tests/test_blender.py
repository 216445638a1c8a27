"""Blended KV: right where it is computed, exact where it must be, and never from the future."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from amount import cases, mostly_long
from models import FAMILIES, OTHERS, ROPES, SEPARATOR, random_model, random_tokens
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    PhimoeConfig,
    Qwen2MoeConfig,
)

from lmc.blend.blender import Blender, BlendInput
from lmc.blend.canvas import KV
from lmc.blend.layer_attention import LayerAttention, score_weights
from lmc.blend.markers import Markers
from lmc.blend.segments import Placement, Segments, join, split
from lmc.blend.strategies import STRATEGIES, Evidence, RecomputePolicy
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.connectors.transformers.hf import forward, rows_of
from lmc.connectors.transformers.layers import DecoderLayers
from lmc.connectors.transformers.selftest import prove_model
from lmc.errors import UnsupportedModel

ALL = RecomputePolicy(strategy="all")


def prefill(model, tokens: list[int]) -> tuple[list[KV], torch.Tensor]:
    """Keys and values `[T, H, D]` per layer and the last logits, by the model itself."""
    cache = DynamicCache()
    logits = forward(model, tokens, cache).logits[0, -1]
    return rows_of(cache, latent=hasattr(model.config, "kv_lora_rank")), logits


class Scene:
    """A prompt with documents, some of which are stored, as the blender meets it."""

    def __init__(self, model, documents: list[list[int]], known: set[int], system: int = 13, prefix: int = 0) -> None:
        self.model, self.layers = model, DecoderLayers(model)
        self.prompt = join(random_tokens(system, 50), documents, random_tokens(11, 51), SEPARATOR)
        self.segments: Segments = split(self.prompt, Markers(separators=(SEPARATOR,)))
        self.pieces: list[Placement] = []
        self.kv: list[list[KV]] = []
        if prefix:
            self.pieces.append(Placement(at=0, tokens=prefix, first=0, exact=True))
            self.kv.append([(keys[:prefix], values[:prefix]) for keys, values in prefill(model, self.prompt)[0]])
        for index, span in enumerate(self.segments.documents):
            if index in known and span.start >= prefix:
                self.pieces.append(Placement(at=span.start, tokens=len(span), first=0, exact=span.start == 0))
                self.kv.append(prefill(model, self.prompt[span.start : span.stop])[0])

    def reader(self) -> Iterator[tuple[int, list[KV]]]:
        for layer in range(self.layers.shape.layers):
            yield layer, [kv[layer] for kv in self.kv]

    def blend(self, policy: RecomputePolicy) -> SimpleNamespace:
        """What the blender says of the blend, with the canvas's KV and logits."""
        canvas = DenseCanvas(self.layers, self.prompt, self.pieces, self.reader())
        length = len(self.prompt)
        given = BlendInput(length=length, stop=length, question=self.segments.question.start, placements=self.pieces)
        blender = Blender(canvas, given, policy)
        with torch.inference_mode():
            self.slices = list(blender.slices())
        said = {
            name: getattr(blender.result, name)
            for name in ("reused", "fresh", "computed", "recomputed", "charged", "charged_budget")
        }
        keys, values = zip(*canvas.kv, strict=True)
        return SimpleNamespace(keys=keys, values=values, logits=canvas.logits, **said)


def every_reused(scene: Scene) -> list[int]:
    return [position for piece in scene.pieces for position in range(piece.at, piece.at + piece.tokens)]


def documents_of(count: int, seed: int = 0) -> list[list[int]]:
    sizes = random.Random(seed)
    return [random_tokens(sizes.randrange(1, 40), 100 * seed + i) for i in range(count)]


@pytest.mark.parametrize("rope", ["plain", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("family", mostly_long(sorted(FAMILIES), "llama", "qwen3"))
@pytest.mark.parametrize("strategy", ["all", "query", "deviation"])
def test_at_ratio_one_the_result_is_full_prefill(family: str, rope: str, strategy: str) -> None:
    model = random_model(family, rope)
    scene = Scene(model, documents_of(5), known={0, 1, 3, 4})  # document 2 is a gap
    kv, logits = prefill(model, scene.prompt)

    result = scene.blend(RecomputePolicy(strategy=strategy, ratio=1.0))

    assert result.logits is not None
    assert (result.logits - logits).abs().max() <= 1e-4
    for layer, wanted in enumerate(kv):
        assert torch.allclose(result.keys[layer].transpose(0, 1), wanted[0], atol=1e-4)
        assert torch.allclose(result.values[layer].transpose(0, 1), wanted[1], atol=1e-4)


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("strategy", ["union", "deviation"])
def test_layers_of_several_kinds_give_full_prefill_at_ratio_one(family: str, strategy: str) -> None:
    model = random_model(family)
    scene = Scene(model, documents_of(5), known={0, 1, 3, 4})
    kv, logits = prefill(model, scene.prompt)
    result = scene.blend(RecomputePolicy(strategy=strategy, ratio=1.0))
    assert (result.logits - logits).abs().max() <= 1e-4
    for layer, wanted in enumerate(kv):
        assert torch.allclose(result.keys[layer].transpose(0, 1), wanted[0], atol=1e-4)
        assert torch.allclose(result.values[layer].transpose(0, 1), wanted[1], atol=1e-4)
    blind = scene.blend(RecomputePolicy(strategy="none"))
    assert (blind.logits - logits).abs().max() > 1e-3, "the control: stored KV is used"


def test_layers_with_a_window_score_as_much_as_those_without():
    windowed, whole = LayerAttention(scale=1.0, window=20), LayerAttention(scale=1.0)
    assert score_weights([windowed, whole, windowed, windowed]) == [
        pytest.approx(2 / 3),
        2.0,
        *[pytest.approx(2 / 3)] * 2,
    ]
    assert score_weights([whole] * 5) == score_weights([windowed] * 5) == [1.0] * 5


@pytest.mark.parametrize("count", range(1, 13))
def test_one_to_twelve_documents_in_any_order_with_gaps_and_an_exact_prefix(count: int) -> None:
    model = random_model("qwen3", "llama3")
    shuffle = random.Random(count)
    documents = documents_of(count, seed=count)
    shuffle.shuffle(documents)
    known = {i for i in range(count) if shuffle.random() < 0.7} or {0}
    scene = Scene(
        model, documents, known, system=shuffle.choice([0, 1, 20]), prefix=shuffle.choice([0, 5]) if count > 1 else 0
    )
    _, logits = prefill(model, scene.prompt)

    for strategy in ("query", "deviation", "head", "union", "random"):
        result = scene.blend(RecomputePolicy(strategy=strategy, ratio=1.0))
        assert result.logits is not None
        assert (result.logits - logits).abs().max() <= 1e-4, strategy


@pytest.fixture
def memory_full_of_nan() -> Iterator[None]:
    """New tensors hold NaN where nobody wrote, so that reading them shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


AROUND = list(product(("query", "union", "deviation", "head"), ({1}, {0, 2}, {0, 1}, {1, 2}, {2}), (0, 5)))


@pytest.mark.parametrize(("strategy", "known", "prefix"), cases(AROUND, *AROUND[::3]))
def test_long_unknown_documents_before_between_and_after_known_ones(
    strategy: str, known: set[int], prefix: int, memory_full_of_nan: None
) -> None:
    """Unknown documents too long for the question's first pass, with and without an exact prefix before them."""
    model = random_model()
    scene = Scene(model, [random_tokens(170, 1), random_tokens(150, 2), random_tokens(190, 3)], known, prefix=prefix)
    kv, logits = prefill(model, scene.prompt)

    whole = scene.blend(RecomputePolicy(strategy=strategy, ratio=1.0))
    assert whole.logits is not None
    assert (whole.logits - logits).abs().max() <= 1e-4

    some = scene.blend(RecomputePolicy(strategy=strategy, ratio=0.1))
    first = min(piece.at for piece in scene.pieces if piece.at >= prefix)
    for layer, wanted in enumerate(kv):
        assert not some.keys[layer].isnan().any()
        assert torch.allclose(some.keys[layer][:, :first].transpose(0, 1), wanted[0][:first], atol=1e-4)


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"none"}))
def test_a_later_token_changes_no_earlier_key(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary: with a mask that aligns the last query with the last key, tokens in the middle see the future."""
    model = random_model()
    scene = Scene(model, documents_of(4, seed=3), known={0, 1, 2, 3})
    policy = RecomputePolicy(strategy=strategy, ratio=0.4)
    if strategy in (
        "query",
        "union",
        "deviation",
    ):  # whose choice depends on content: the same tokens are forced on both
        chosen = torch.tensor([i for i, p in enumerate(every_reused(scene)) if p % 3 == 0])
        monkeypatch.setitem(STRATEGIES, strategy, lambda _evidence, _count: chosen)
    before = scene.blend(policy)
    last = scene.segments.documents[3]
    changed = [*scene.prompt]
    changed[last.start : last.stop] = random_tokens(len(last), 999)
    scene.prompt = changed
    scene.kv[3] = prefill(model, changed[last.start : last.stop])[0]

    after = scene.blend(policy)

    for layer in range(scene.layers.shape.layers):
        assert torch.equal(before.recomputed[layer], after.recomputed[layer])
        assert (before.recomputed[layer] < last.start).any()
        assert torch.equal(before.keys[layer][:, : last.start], after.keys[layer][:, : last.start])


def test_a_recomputed_key_equals_the_one_computed_with_no_future_at_all() -> None:
    """The same canary from the other side: cutting the prompt behind a document leaves its recomputed keys as they
    were.
    """
    model = random_model()
    documents = documents_of(3, seed=5)
    long, short = Scene(model, documents, {0, 1, 2}), Scene(model, documents[:2], {0, 1})
    policy = RecomputePolicy(strategy="head", ratio=0.5)
    a, b = long.blend(RecomputePolicy(strategy="all")), short.blend(RecomputePolicy(strategy="all"))
    stop = short.segments.documents[1].stop
    for layer in range(4):
        assert torch.allclose(a.keys[layer][:, :stop], b.keys[layer][:, :stop], atol=1e-5)
    assert long.blend(policy).charged_budget == pytest.approx(0.5, abs=0.02)


def test_layer_zero_does_not_deviate() -> None:
    """A stored key of layer 0 depends on its token alone: after re-rotation there is nothing to find, so checking there
    is refused.
    """
    model = random_model(rope="yarn")
    scene = Scene(model, documents_of(3), known={0, 1, 2})
    wanted = prefill(model, scene.prompt)[0]

    blind = scene.blend(RecomputePolicy(strategy="none"))

    first = blind.keys[0].transpose(0, 1)
    assert (first - wanted[0][0]).abs().max() <= 1e-5
    assert (blind.keys[2].transpose(0, 1) - wanted[2][0]).abs().max() > 0.1


def test_a_document_at_position_zero_and_an_exact_prefix_stay_exact() -> None:
    model = random_model()
    at_zero = Scene(model, documents_of(3), known={0, 1, 2}, system=0)
    # Without a system text the prompt starts with a separator; a document at position 0 has none before it.
    at_zero.prompt = at_zero.prompt[len(SEPARATOR) :]
    at_zero.segments = split(at_zero.prompt, Markers(separators=(SEPARATOR,)))
    first = at_zero.segments.system
    moved = [(p, p.at - len(SEPARATOR)) for p in at_zero.pieces]
    at_zero.pieces = [replace(p, at=at, exact=at == 0) for p, at in moved]
    wanted = prefill(model, at_zero.prompt)[0]

    result = at_zero.blend(RecomputePolicy(strategy="query", ratio=0.2))

    assert result.reused == sum(len(span) for span in at_zero.segments.documents)
    for layer in range(4):
        assert not torch.isin(torch.arange(first.stop), result.recomputed[layer]).any()
        assert torch.allclose(
            result.keys[layer].transpose(0, 1)[: first.stop], wanted[layer][0][: first.stop], atol=1e-5
        )

    prefixed = Scene(model, documents_of(3), known={1, 2}, prefix=20)
    wanted = prefill(model, prefixed.prompt)[0]
    result = prefixed.blend(RecomputePolicy(strategy="deviation", ratio=0.2))
    for layer in range(4):
        assert torch.equal(result.keys[layer].transpose(0, 1)[:20], wanted[layer][0][:20])


def test_deviation_computes_everything_up_to_its_check_layer_and_the_same_tokens_after_it() -> None:
    scene = Scene(random_model(layers=5), documents_of(6, seed=2), known=set(range(6)))

    result = scene.blend(RecomputePolicy(strategy="deviation", ratio=0.2))

    sets = [set(positions.tolist()) for positions in result.recomputed]
    assert len(sets[0]) == len(sets[1]) == result.reused
    assert len(sets[2]) == int(result.reused * 0.2)
    assert sets[2] == sets[3] == sets[4] <= sets[1]
    assert result.charged == sum(map(len, sets))


def test_the_charged_budget_counts_check_layers_in_full() -> None:
    scene = Scene(random_model(layers=4), documents_of(8), known=set(range(8)))
    n = scene.blend(RecomputePolicy(strategy="none")).reused
    k = int(n * 0.15)
    assert scene.blend(RecomputePolicy(strategy="deviation")).charged == 2 * n + 2 * k
    assert scene.blend(RecomputePolicy(strategy="query")).charged == 4 * k
    assert scene.blend(RecomputePolicy(strategy="none")).charged == 0
    assert scene.blend(ALL).charged_budget == 1.0


def test_a_slice_costs_as_much_as_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a layer call with few rows takes as long as one with many."""
    scene = Scene(random_model(), documents_of(3), known={0, 1, 2})
    scene.blend(RecomputePolicy(strategy="union", ratio=0.2))
    plain = [done.cost for done in scene.slices if done.cost]
    floor = max(plain) - 1
    monkeypatch.setattr(DenseCanvas, "call_cost", floor)
    scene.blend(RecomputePolicy(strategy="union", ratio=0.2))
    assert [done.cost for done in scene.slices if done.cost] == [max(cost, floor) for cost in plain]
    assert min(plain) < floor


def test_every_slice_is_a_layer_and_the_reader_is_pulled_once_for_each() -> None:
    scene = Scene(random_model(layers=4), documents_of(3), known={0, 2})
    scene.blend(RecomputePolicy(strategy="deviation"))
    # The check layer is run twice: for all rows up to the projections, and whole for those that go on.
    assert [done.layer for done in scene.slices] == [0, 1, 1, 2, 3]
    scene.blend(RecomputePolicy(strategy="query"))
    assert [done.layer for done in scene.slices] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_nothing_stored_is_an_ordinary_prefill() -> None:
    model = random_model()
    scene = Scene(model, documents_of(3), known=set())
    result = scene.blend(RecomputePolicy(strategy="query"))
    assert (result.logits - prefill(model, scene.prompt)[1]).abs().max() <= 1e-5
    assert result.reused == 0
    assert result.charged_budget == 0.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strategy", ["query", "union"])
def test_query_and_union_repair_what_the_question_attends_to(strategy: str, seed: int) -> None:
    """Against the definition: max over question tokens, mean (`query`) or max (`union`) over heads, sum over layers, in
    the first pass over KV that is not recomputed.
    """
    model = random_model(seed=seed)
    scene = Scene(model, documents_of(4, seed=seed), known={0, 1, 2, 3})
    question = scene.segments.question
    fresh = [*range(scene.pieces[0].at), *range(question.start, question.stop)]  # separators are not there yet
    blind = scene.blend(RecomputePolicy(strategy="none"))  # its KV is what the first pass sees

    scores = torch.zeros(len(scene.prompt))
    for layer in range(4):
        weights = questions_attention(model, scene, blind, layer, fresh)
        weights = weights[:, [fresh.index(i) for i in range(question.start, question.stop)]]
        scores += (weights.mean(0) if strategy == "query" else weights.amax(0)).amax(0)
    reused = torch.tensor(every_reused(scene))
    computed_at = torch.cat([torch.arange(piece.tokens) for piece in scene.pieces])
    evidence = Evidence(computed_at=computed_at, attention=scores[reused])
    wanted = reused[STRATEGIES[strategy](evidence, int(len(reused) * 0.2))]

    chosen = scene.blend(RecomputePolicy(strategy=strategy, ratio=0.2)).recomputed[0]
    assert chosen.tolist() == wanted.tolist()


def questions_attention(model, scene: Scene, blind, layer: int, fresh: list[int]) -> torch.Tensor:
    """Attention [Q, T, N] of the fresh rows of a layer, from the layers' own projections run up to there."""
    rows = torch.tensor(fresh)
    all_weights: list[torch.Tensor] = []
    with torch.inference_mode():
        angles = scene.layers.angles(len(scene.prompt))["full_attention"].at(rows)
        hidden = scene.layers.embed(torch.tensor(scene.prompt)[rows])

        def attend(query, key, value, named):
            depth = len(all_weights)
            keys, values = blind.keys[depth].clone(), blind.values[depth].clone()
            keys[:, rows], values[:, rows] = key.transpose(0, 1), value.transpose(0, 1)
            group = query.shape[1] // keys.shape[0]
            keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
            logits = torch.einsum("tqd,qnd->qtn", query, keys) * named["scaling"]
            there = torch.tensor([*fresh, *every_reused(scene)])
            hidden_keys = torch.arange(len(scene.prompt))[None] > rows[:, None]
            hidden_keys |= ~torch.isin(torch.arange(len(scene.prompt)), there)[None]
            weights = logits.masked_fill(hidden_keys, float("-inf")).softmax(-1)
            all_weights.append(weights)
            return torch.einsum("qtn,qnd->tqd", weights, values)

        for depth in range(layer + 1):
            hidden = scene.layers.run(depth, hidden, rows, angles, attend)
    return all_weights[-1]


def test_an_unsupported_family_and_a_dynamic_rope_are_refused() -> None:
    model = random_model()
    model.config.layer_types = ["linear_attention", *["full_attention"] * 3]
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        DecoderLayers(model)
    with pytest.raises(UnsupportedModel, match="dynamic"):
        DecoderLayers(random_model(rope="dynamic"))
    with pytest.raises(UnsupportedModel, match="gpt2"):
        DecoderLayers(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=97)))
    assert set(ROPES) == {"plain", "linear", "llama3", "yarn", "dynamic"}


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        (PhimoeConfig, {"sliding_window": 100, "num_local_experts": 2}, "in its masks alone"),
        (Qwen2MoeConfig, {"sliding_window": 100, "use_sliding_window": True, "num_experts": 2}, "in its masks alone"),
        (DogeConfig, {"keep_window_size": 100}, "masks of their own"),
    ],
)
def test_windows_that_only_a_mask_has_are_refused(kind: Any, more: dict[str, Any], why: str) -> None:
    """The layers do not say them to their attention function, so lmc would attend to everything."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = kind(vocab_size=97, num_key_value_heads=2, max_position_embeddings=512, **sizes, **more)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModel, match=why):
        prove_model(model, DecoderLayers(model))


def test_of_a_long_question_the_first_rows_run_in_the_second_pass_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise instructions after the last document would go through all layers twice."""
    monkeypatch.setattr("lmc.blend.blender.QUESTION_ROWS", 8)
    model = random_model()
    scene = Scene(model, documents_of(3), known={0, 1, 2})
    assert len(scene.prompt) - scene.segments.question.start > 8
    short = scene.blend(RecomputePolicy(strategy="union", ratio=0.0))
    assert short.computed[0] == short.fresh + 8
    exact = scene.blend(RecomputePolicy(strategy="union", ratio=1.0))
    assert (exact.logits - prefill(model, scene.prompt)[1]).abs().max() <= 1e-5
