"""The shipped model answers through vLLM as it answers through transformers: full, blended, and blindly reused."""

import re
from collections import Counter

import pytest
from lab import engine, facts

from lmc.blend.strategies import RecomputePolicy
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.demo import SHIPPED as SMALL
from lmc.demo.questions import Prompts, read_collection
from lmc.demo.run import answers, begins, learn_all

pytestmark = pytest.mark.long

KINDS = ("self", "referring", "chained")
TOKENS = 2  # an answer is one word of the grammar, which is one token; the next shows that it ends there
# How it is asked through transformers (how, strategy, ratio), and through vLLM
WAYS = {
    "full": (("full", None, 0.0), {"blend": False}),
    "default": (("blend", None, 0.0), {}),
    "deviation": (("blend", "deviation", 0.15), {"strategy": "deviation", "ratio": 0.15}),
    "blind": (("reuse", None, 0.0), {"strategy": "none"}),
}
LARGE = {"max_local_cpu_size": 1.0, "chunk_size": 256, "blend_min_tokens": 256}  # chunks of every prompt fit in


class Shared:
    """Retrieval by words in common: bm25s imports numba, over which vLLM's CPU build stumbles when an engine starts
    later.
    """

    def __init__(self, documents: dict[str, str]) -> None:
        self._words = {name: Counter(re.findall(r"\w+", text)) for name, text in documents.items()}

    def top(self, question: str, count: int) -> list[str]:
        asked = Counter(re.findall(r"\w+", question))
        return sorted(self._words, key=lambda name: -sum((asked & self._words[name]).values()))[:count]


@pytest.fixture(scope="module")
def examples():
    """The questions, over documents in orders of their own; their prompts, documents and tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMALL / "model")
    collection = read_collection(SMALL / "documents", SMALL / "questions.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmc.demo.questions.Retriever", Shared)
        prompts = Prompts(collection, tokenizer, Settings().blend_special_str)
    asked = [prompts.example(q, i) for i, q in enumerate(collection.questions) if q.kind in KINDS]
    own = [example for example in asked if example.question.kind == "self"]
    asked = own[::2] + [example for example in asked if example not in own]  # half of the easy ones: time
    return asked, prompts, tokenizer


@pytest.fixture(scope="module")
def transformers_scores(examples):
    """Which answers are right, by way and kind."""
    asked, prompts, tokenizer = examples
    settings = Settings(enable_blending=True, max_local_cpu_size=0.2)
    cached, _ = CachedModel.load(SMALL / "model", settings)
    scores = {}
    with cached:
        learn_all(cached, list(prompts.tokens.values()))
        for way, ((how, strategy, ratio), _) in WAYS.items():
            policy = RecomputePolicy(strategy=strategy, ratio=ratio) if strategy else None
            done = ((e, cached.prefill(e.prompt, how, policy=policy)) for e in asked)
            scores[way] = by_kind([(e, answers(cached, d, e.prompt, e.answer, tokenizer)) for e, d in done])
    return scores


@pytest.fixture(scope="module")
def vllm_scores(examples):
    """The same, through an engine; and that it did reuse what it was to reuse."""
    asked, prompts, tokenizer = examples
    scores = {}
    with engine(SMALL / "model", LARGE, skip_tokenizer_init=False) as lab:
        lab.learn(prompts.tokens.values())
        for way in ("blind", "deviation", "default", "full"):  # `full` last: it leaves exact chunks of whole prompts
            lab.forget_prefixes()
            found = lab.ask_all([(e.prompt, WAYS[way][1]) for e in asked], TOKENS)
            reused = [facts(out).get("reused_tokens", 0) for out in found]
            assert max(reused) == 0 if way == "full" else min(reused) > 600
            said = [tokenizer.decode(out.outputs[0].token_ids, skip_special_tokens=True) for out in found]
            scores[way] = by_kind([(e, begins(text, e.answer)) for e, text in zip(asked, said, strict=True)])
        lab.check()
    return scores


def by_kind(right) -> dict[str, list[bool]]:
    """Whether each answer is right, by kind of question."""
    return {kind: [hit for example, hit in right if example.question.kind == kind] for kind in KINDS}


@pytest.mark.parametrize("way", WAYS)
def test_each_answer_is_as_right_as_through_transformers(vllm_scores, transformers_scores, way):
    assert vllm_scores[way] == transformers_scores[way]


def test_the_default_answers_what_blind_reuse_cannot(vllm_scores):
    """The control: the documents in the prompts above do depend on each other."""
    shares = {way: {kind: sum(hits) / len(hits) for kind, hits in found.items()} for way, found in vllm_scores.items()}
    assert max(shares["blind"]["referring"], shares["blind"]["chained"]) <= 0.2
    assert min(shares["default"]["referring"], shares["default"]["self"]) >= 0.95
    assert shares["default"]["chained"] >= shares["full"]["chained"] >= 0.9
