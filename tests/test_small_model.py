"""The shipped model needs its documents to see each other, and blending gives them that."""

from collections.abc import Iterator

import pytest

from lmc.blend.strategies import RecomputePolicy
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.demo import SHIPPED as SMALL
from lmc.demo.questions import Example, Prompts, read_collection
from lmc.demo.run import answers, learn_all

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[CachedModel, object, dict[str, list[Example]]]]:
    settings = Settings(enable_blending=True, max_local_cpu_size=0.2)
    collection = read_collection(SMALL / "documents", SMALL / "questions.json")
    cached, tokenizer = CachedModel.load(SMALL / "model", settings)
    with cached:
        prompts = Prompts(collection, tokenizer, settings.blend_special_str)
        learn_all(cached, list(prompts.tokens.values()))
        examples: dict[str, list[Example]] = {}
        for number, question in enumerate(collection.questions):
            examples.setdefault(question.kind, []).append(prompts.example(question, number))
        yield cached, tokenizer, examples


def score(scene, kind: str, how: str, policy: RecomputePolicy | None = None) -> float:  # type: ignore[no-untyped-def]
    cached, tokenizer, examples = scene
    right = [
        answers(cached, cached.prefill(e.prompt, how, policy=policy), e.prompt, e.answer, tokenizer)
        for e in examples[kind]
    ]
    return sum(right) / len(right)


def test_full_prefill_answers_what_refers_back_and_blind_reuse_does_not(scene) -> None:  # type: ignore[no-untyped-def]
    for kind in ("referring", "chained"):
        assert score(scene, kind, "full") >= 0.95
        assert score(scene, kind, "reuse") <= 0.5


def test_self_contained_facts_survive_any_reuse(scene) -> None:  # type: ignore[no-untyped-def]
    assert score(scene, "self", "full") >= 0.95
    assert score(scene, "self", "reuse") >= 0.95
    assert score(scene, "self", "blend") >= 0.95


@pytest.mark.parametrize("kind", ["referring", "chained"])
def test_the_default_closes_nine_tenths_of_the_gap(scene, kind: str) -> None:  # type: ignore[no-untyped-def]
    full, blind, blend = (score(scene, kind, how) for how in ("full", "reuse", "blend"))
    assert blend - blind >= 0.9 * (full - blind)


def test_random_tokens_at_the_same_budget_do_not(scene) -> None:  # type: ignore[no-untyped-def]
    """The control: it is the choice that repairs, not the amount."""
    full, blind = score(scene, "referring", "full"), score(scene, "referring", "reuse")
    chance = score(scene, "referring", "blend", RecomputePolicy(strategy="random"))
    assert chance - blind < 0.5 * (full - blind)
