"""At ratio 1 the blend is the engine's own prefill, whatever the model, the strategy and the engine's options."""

import pytest
import torch
from amount import mostly_long
from lab import SETTINGS, Prompt, answer, distance, facts, words
from stepping import Steps, poison
from transformers import AutoModelForCausalLM

from lmc.blend.markers import Markers
from lmc.blend.segments import join
from lmc.blend.strategies import NEEDS_QUESTION, RecomputePolicy
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.connectors.vllm.worker.native import NativeLayers

SAME = 1e-5  # logprobs, float32
SEPARATOR, HEADER = (1021, 1022, 1021), (1001, 1002, 1003)
DOCUMENTS = [words(150, 1), words(300, 2), words(150, 3), words(90, 4)]
ORDER = [DOCUMENTS[i] for i in (2, 0, 3, 1)]

# The configuration of AFMoE in vLLM 0.30 sets what newer versions of transformers call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*rope_scaling. is deprecated.*:FutureWarning")

# One engine each: family, settings, engine options
ENGINES = {
    "llama": ("llama", {}, {}),
    "llama3": ("llama3", {}, {}),
    "yarn": ("yarn", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "mistral": ("mistral", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "phi3": ("phi3", {}, {}),
    "qwen3moe": ("qwen3moe", {}, {}),
    "qwen2moe": ("qwen2moe", {}, {}),
    "gemma": ("gemma", {}, {}),
    "mistralwindow": ("mistralwindow", {}, {}),
    "gemma2": ("gemma2", {}, {}),
    "gemma3mixed": ("gemma3mixed", {}, {}),
    "one block table": ("gemma3mixed", {}, {"disable_hybrid_kv_cache_manager": True}),
    "gemma4": ("gemma4", {}, {}),
    "gemma4small": ("gemma4small", {}, {}),
    "gemma3n": ("gemma3n", {}, {}),
    "fast prefill": ("gemma3n", {}, {"kv_sharing_fast_prefill": True}),
    "fast prefill with two head sizes": ("gemma4small", {}, {"kv_sharing_fast_prefill": True}),
    "gptoss": ("gptoss", {}, {}),
    "cohere2": ("cohere2", {}, {}),
    "cohere2moe": ("cohere2moe", {}, {}),
    "afmoe": ("afmoe", {}, {}),
    "exaone4": ("exaone4", {}, {}),
    "llama4": ("llama4", {}, {}),
    "deepseek2": ("deepseek2", {}, {}),
    "deepseek3": ("deepseek3", {}, {}),
    "glm4moelite": ("glm4moelite", {}, {}),
    "ministral3": ("ministral3", {}, {}),
    "ernie": ("ernie", {}, {}),
    "erniemoe": ("erniemoe", {}, {}),
    "granitemoe": ("granitemoe", {}, {}),
    "olmoe": ("olmoe", {}, {}),
    "apertus": ("apertus", {}, {}),
    "nemotron": ("nemotron", {}, {}),
    "cohere": ("cohere", {}, {}),
    "stablelm": ("stablelm", {}, {}),
    "exaonemoe": ("exaonemoe", {}, {}),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": ("olmo3", {}, {}),
    "smollm3": ("smollm3", {}, {}),
    "seedoss": ("seedoss", {}, {}),
    "hunyuan": ("hunyuan", {}, {}),
    "starcoder2": ("starcoder2", {}, {}),
    "arcee": ("arcee", {}, {}),
    "dots1": ("dots1", {}, {}),
    "glm4": ("glm4", {}, {}),
    "glm4moe": ("glm4moe", {}, {}),
    "granite": ("granite", {}, {}),
    "longrope": ("longrope", {}, {}),
    "no prefix caching": ("llama", {}, {"enable_prefix_caching": False}),
    "small steps": ("llama", {}, {"max_num_batched_tokens": 64, "max_num_seqs": 8}),
    "one large step": ("llama", {}, {"max_num_batched_tokens": 2048}),
    "large blocks": ("llama", {"chunk_size": 256}, {"block_size": 128}),
    "compiled": ("llama", {}, {"enforce_eager": False, "max_num_batched_tokens": 5120}),
}

# Those that transformers computes as vLLM does. For Cohere 2, vLLM makes windows longer by one token, and its CPU build
# answers differently for DeepSeek V3. Its transformers backend changes the layers of transformers in this process.
IN_BOTH = (
    "llama", "mistralwindow", "qwen3", "qwen3moe", "gemma3mixed", "gptoss", "exaone4", "glm4", "glm4moe", "granite",
    "deepseek2",
)  # fmt: skip


@pytest.fixture(
    scope="module",
    params=mostly_long(ENGINES, "llama", "deepseek3", "gemma4small", "smollm3"),
    ids=lambda name: name.replace(" ", "-"),
)
def lab(request, models, shared_engine):
    family, settings, options = ENGINES[request.param]
    found = shared_engine(models(family), settings, **options)
    found.name = request.param
    return found


def same(found, wanted) -> bool:
    return answer(found) == answer(wanted) and distance(found, wanted) <= SAME


@pytest.mark.parametrize("strategy", ["query", "union", "deviation", "head", "all"])
def test_at_ratio_1_the_blend_is_full_prefill(lab, strategy):
    prompt, wanted = only_documents_are_known(lab)
    found = lab.ask(prompt.tokens, prompt.blend(strategy=strategy, ratio=1.0))
    assert facts(found)["reused_tokens"] == sum(map(len, ORDER))
    if strategy in NEEDS_QUESTION:  # otherwise the engine computes what is behind the last document
        assert facts(found)["fresh_tokens"] == len(prompt.tokens) - sum(map(len, ORDER))
    assert same(found, wanted)
    lab.check()


def test_a_compiled_model_is_called_as_a_whole(lab, monkeypatch):
    calls, run_through = [], NativeLayers.run_through
    monkeypatch.setattr(NativeLayers, "run_through", lambda self, *what: [calls.append(what), run_through(self, *what)])
    prompt, wanted = only_documents_are_known(lab)
    learned = len(calls)
    assert same(lab.ask(prompt.tokens, prompt.blend(strategy="union", ratio=1.0)), wanted)
    assert (learned > 0, len(calls) > learned) == (lab.name == "compiled",) * 2


def test_an_approximate_blend_is_not_full_prefill(lab):
    """The control: the blend above really does use the stored KV."""
    prompt, wanted = only_documents_are_known(lab)
    assert distance(lab.ask(prompt.tokens, prompt.blend(strategy="none")), wanted) > 100 * SAME


@pytest.mark.parametrize("lab", mostly_long(IN_BOTH), indirect=True)
@pytest.mark.parametrize("strategy", ["union", "deviation"])
def test_at_a_ratio_of_015_the_blend_is_that_of_transformers(lab, models, monkeypatch, strategy):
    """Other canvases, kernels and masks choose the same tokens, and compute and correct the same KV.

    How close a blend comes to full prefill says little of random weights: at 0.15 it closes 66 % of the gap of blind
    reuse for Llama, and 45 % for Gemma 3.
    """
    tokens, path = join(words(37, 1000), ORDER, words(23, 1001), SEPARATOR), models(ENGINES[lab.name][0])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with CachedModel(model, Settings(**SETTINGS), SEPARATOR, checkpoint=path) as cached:
        for document in DOCUMENTS:
            cached.learn(document)
        policy = RecomputePolicy.of(cached.settings, strategy, 0.15)
        wanted, full = (cached.prefill(tokens, way, policy=policy).logits.log_softmax(-1) for way in ("blend", "full"))
    monkeypatch.setattr(lab.setup, "markers", Markers(separators=(SEPARATOR,)))
    lab.forget()
    lab.learn(DOCUMENTS)
    out = lab.ask(tokens, {"strategy": strategy, "ratio": 0.15}, 1, logprobs=20)
    assert facts(out)["reused_tokens"] == sum(map(len, ORDER))
    found = {token: one.logprob for token, one in out.outputs[0].logprobs[0].items()}
    assert max(abs(float(wanted[token]) - logprob) for token, logprob in found.items()) <= SAME
    assert max(abs(float(full[token]) - logprob) for token, logprob in found.items()) > 1000 * SAME, "the control"


def test_nothing_of_an_approximate_blend_reaches_other_requests(lab):
    """Neither in the engine's cache nor in lmc's chunks. `test_isolation.py` has more, for fewer families."""
    prompt, wanted = only_documents_are_known(lab)
    blended = lab.ask(prompt.tokens, prompt.blend(strategy="none"))
    assert facts(blended)["reused_tokens"] == sum(map(len, ORDER))
    assert distance(blended, wanted) > 100 * SAME, "the control: it is approximate"
    lab.drop_backfills()
    for _ in range(2):
        assert same(lab.ask(prompt.tokens, {"blend": False}), wanted)
        lab.forget_prefixes()
        poison()
    tenant = lab.ask(prompt.tokens, prompt.blend(strategy="none"), salt="another tenant")
    assert facts(tenant) == {"unknown_documents": len(ORDER)}
    assert same(tenant, wanted)
    lab.check()


def test_a_turn_after_a_blend_continues_from_it_also_if_it_is_preempted(lab, monkeypatch):
    """`test_conversations.py` has more, for fewer families."""
    if not lab.scheduler.cache_config.enable_prefix_caching:
        pytest.skip("this engine has no prefix cache: vLLM's CPU build switches it off for MLA")
    monkeypatch.setattr(lab.setup, "markers", Markers(separators=(), answers=(HEADER,)))
    prompt, _ = only_documents_are_known(lab)
    first = [*prompt.tokens, *HEADER]
    said = answer(lab.ask(first, prompt.blend(ratio=1.0), 40))
    lab.drop_backfills()
    second, steps = [*first, *said, *words(40, 1002), *HEADER], Steps(lab)
    name = steps.add(second, prompt.blend(ratio=1.0), 40)
    steps.until(lambda: name in steps.outputs and len(answer(steps.outputs[name])) >= 10)
    steps.preempt(name)
    steps.run()
    assert facts(steps.outputs[name])["continued_tokens"] > 600
    assert answer(steps.outputs[name]) == answer(lab.vanilla(second, 40))
    lab.check()


def test_pages_that_are_loaded_again_are_what_was_computed(lab):
    tokens = words(700, 9)
    wanted = lab.vanilla(tokens)
    lab.ask(tokens)
    lab.forget_prefixes()
    found = lab.ask(tokens)
    size = lab.scheduler.block_size
    assert facts(found)["exact_tokens"] == 700 // size * size
    assert same(found, wanted)
    lab.check()


def test_six_requests_at_once(lab):
    """Blends, plain prompts and prompts with a common beginning, in the same steps."""
    first, second = Prompt(ORDER), Prompt(ORDER[::-1], system=80, seed=2000)
    plain = [words(200, 20), first.tokens[:300], DOCUMENTS[0] + words(30, 21)]
    prompts = [first.tokens, plain[0], second.tokens, plain[1], first.tokens, plain[2]]
    wanted = [lab.vanilla(tokens) for tokens in prompts]
    lab.learn(DOCUMENTS)
    lab.forget_pages()
    exact = [first.blend(ratio=1.0), None, second.blend(ratio=1.0), None, first.blend(ratio=1.0), None]
    found = lab.ask_all(list(zip(prompts, exact, strict=True)))
    assert [same(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * 6
    lab.check()


def test_a_blend_behind_pages_that_are_loaded(lab):
    """Each layer is computed when its pages are there, also by a strategy that computes it only once."""
    prompt = Prompt(ORDER, system=2 * lab.setup.engine.chunk_size + 10)
    wanted = lab.vanilla(prompt.tokens)
    lab.learn(DOCUMENTS)
    lab.forget_pages()
    lab.ask(prompt.tokens[: prompt.spans[0][0]], {"blend": False}, 1)
    lab.forget_prefixes()
    poison()
    found = lab.ask(prompt.tokens, prompt.blend(strategy="head", ratio=1.0))
    assert (facts(found)["exact_tokens"] > 0, facts(found)["reused_tokens"]) == (True, sum(map(len, ORDER)))
    assert same(found, wanted)
    lab.check()


def test_a_blend_behind_a_prefix_that_the_engine_has(lab):
    prompt, wanted = only_documents_are_known(lab)
    lab.ask(prompt.tokens[:230] + words(10, 30), {"blend": False}, 1)
    found = lab.ask(prompt.tokens, prompt.blend(ratio=1.0))
    assert same(found, wanted)
    lab.check()


def only_documents_are_known(lab):
    """A prompt of learned documents, and what the engine alone answers."""
    prompt = Prompt(ORDER)
    wanted = lab.vanilla(prompt.tokens)
    lab.learn(DOCUMENTS)
    lab.forget_pages()
    return prompt, wanted
