"""Approximate KV is for those who asked for it: never for plain requests, never for another tenant, never in our exact
chunks.
"""

import pytest
from amount import mostly_long
from lab import BLOCK, DOCUMENTS, PROMPT, Prompt, agree, answer, facts, words
from stepping import Steps, poison

OTHER = Prompt(DOCUMENTS, system=70, seed=2000)
APPROXIMATE = [
    {"strategy": "none"},
    {"strategy": "union", "ratio": 0.15},
    {"strategy": "deviation", "ratio": 0.3},
    {"strategy": "query", "ratio": 0.05},
    {"strategy": "head", "ratio": 0.5},
]


@pytest.fixture(scope="module", params=mostly_long(["llama", "gemma3mixed", "gptoss", "gemma4", "deepseek3"], "llama"))
def shared(request, models, shared_engine):
    return shared_engine(models(request.param))


@pytest.fixture
def has_prefix_cache(lab):
    """vLLM's CPU build switches its own prefix cache off for MLA."""
    if not lab.scheduler.cache_config.enable_prefix_caching:
        pytest.skip("this engine has no prefix cache")


def relearn(lab) -> None:
    lab.learn(DOCUMENTS)
    poison()


def test_plain_requests_after_any_blends_get_what_was_never_blended(lab):
    """With the same prefixes, in the engine's cache and out of our chunks; also behind a blend's own answer."""
    said = answer(lab.ask(PROMPT.tokens, PROMPT.blend(strategy="none"), 200))
    plain = [PROMPT.tokens, OTHER.tokens, PROMPT.tokens + said, PROMPT.tokens[:400] + words(50, 20), OTHER.tokens[:200]]
    wanted = [lab.vanilla(tokens) for tokens in plain]
    relearn(lab)
    wishes = [(p.tokens, p.blend(**wish)) for wish in APPROXIMATE for p in (PROMPT, OTHER)]
    blended = lab.ask_all(wishes, 200)
    assert all(facts(out)["reused_tokens"] > 0 for out in blended)
    assert answer(blended[0]) == said
    for caches in ("the engine's and ours", "ours"):
        found = [lab.ask(tokens) for tokens in plain]
        assert [agree(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(plain), caches
        lab.forget_prefixes()
        poison()


@pytest.mark.parametrize("preempted", [False, True])
def test_a_blend_leaves_only_what_is_before_its_first_document_in_our_chunks(lab, preempted):
    """Neither its documents nor its answer, under no hashes at all; 37 tokens are before the first document."""
    before, steps = lab.numbers["stored_tokens"], Steps(lab)
    name = steps.add(PROMPT.tokens, PROMPT.blend(strategy="head", ratio=0.5), 300)
    if preempted:
        steps.until(lambda: name in steps.outputs and len(answer(steps.outputs[name])) >= 150)
        steps.preempt(name)
    steps.run()
    lab.settle()
    assert lab.numbers["stored_tokens"] == before + BLOCK
    lab.forget_prefixes()
    poison()
    plain = lab.ask(PROMPT.tokens + answer(steps.outputs[name]))
    assert facts(plain) == {"exact_tokens": BLOCK, "tokens_from": {"host": BLOCK}}


def test_plain_and_blended_requests_in_the_same_steps_do_not_mix(lab):
    wanted = lab.vanilla(PROMPT.tokens)
    relearn(lab)
    wishes = [PROMPT.blend(**wish) for wish in APPROXIMATE]
    # Plain ones last: a blend behind one would begin with that one's exact blocks, and repair less.
    found = lab.ask_all([(PROMPT.tokens, wish) for wish in [*wishes, None, None, None]])
    assert [agree(out, wanted) for out in found[-3:]] == [True] * 3
    alone = []
    for wish in wishes:
        lab.forget()
        relearn(lab)
        alone.append(lab.ask(PROMPT.tokens, wish))
    assert [agree(a, b) for a, b in zip(found, alone, strict=False)] == [True] * len(wishes)
    assert not any(agree(out, wanted) for out in alone), "the control: they are approximate"


@pytest.mark.usefixtures("has_prefix_cache")
def test_the_same_blend_again_finds_its_own_blocks(lab):
    wish = PROMPT.blend(strategy="union", ratio=0.15)
    first = lab.ask(PROMPT.tokens, wish)
    blends = lab.numbers["blends"]
    again = lab.ask(PROMPT.tokens, wish)
    assert lab.numbers["blends"] == blends
    assert again.num_cached_tokens >= (len(PROMPT.tokens) - 1) // BLOCK * BLOCK
    assert agree(again, first)


@pytest.mark.parametrize("change", ["ratio", "question", "documents"])
def test_another_blend_does_not_find_them(lab, change):
    first = lab.ask(PROMPT.tokens, PROMPT.blend(strategy="query", ratio=0.15))
    tokens, wish = list(PROMPT.tokens), PROMPT.blend(strategy="query", ratio=0.15)
    if change == "ratio":
        wish["ratio"] = 0.3
    elif change == "question":
        tokens[-1] += 1
    else:
        wish["documents"] = wish["documents"][:-1]
    out = lab.ask(tokens, wish)
    assert out.num_cached_tokens >= BLOCK
    assert facts(out)["reused_tokens"] == sum(stop - start for start, stop in wish["documents"])
    if "continued_tokens" in facts(out):  # Another question revises the blend, in copies of its blocks.
        assert change == "question"
        assert agree(lab.ask(PROMPT.tokens, PROMPT.blend(strategy="query", ratio=0.15)), first)
        return
    lab.forget()
    relearn(lab)
    assert agree(out, lab.ask(tokens, wish))


@pytest.mark.usefixtures("has_prefix_cache")
def test_several_answers_to_one_prompt_go_on_from_one_blend(lab):
    before = lab.numbers.get("blends", 0)
    out = lab.ask(PROMPT.tokens, PROMPT.blend(), n=2, temperature=1.0, seed=0)
    assert len(out.outputs) == 2
    assert lab.numbers["blends"] == before + 1


def test_a_tenant_gets_no_byte_of_another(lab):
    wanted, plain = lab.vanilla(PROMPT.tokens), words(500, 9)
    wanted_plain = lab.vanilla(plain)
    lab.learn(DOCUMENTS, salt="a")
    lab.ask(plain, salt="a")
    blended = lab.ask(PROMPT.tokens, PROMPT.blend(strategy="none"), salt="a")
    assert facts(blended)["reused_tokens"] == sum(map(len, DOCUMENTS))
    for salt in ("b", None):
        out = lab.ask(PROMPT.tokens, PROMPT.blend(strategy="none"), salt=salt)
        assert facts(out) == {"unknown_documents": 4}
        assert out.num_cached_tokens == 0
        assert agree(out, wanted)
        out = lab.ask(plain, salt=salt)
        assert facts(out) == {}
        assert out.num_cached_tokens == 0
        assert agree(out, wanted_plain)
    again = lab.ask(plain, salt="a")
    assert again.num_cached_tokens > 0
    assert agree(again, wanted_plain)


def test_what_a_tenant_teaches_is_only_for_it(lab):
    """Documents learned in the background because a tenant's prompt had them."""
    lab.forget()
    lab.ask(PROMPT.tokens, PROMPT.blend(strategy="none"), salt="a")
    lab.settle()
    lab.forget_prefixes()
    assert facts(lab.ask(OTHER.tokens, OTHER.blend(strategy="none"), salt="a"))["reused_tokens"] > 0
    assert facts(lab.ask(OTHER.tokens, OTHER.blend(strategy="none"), salt="b")) == {"unknown_documents": 4}
    assert facts(lab.ask(OTHER.tokens, OTHER.blend(strategy="none"))) == {"unknown_documents": 4}


def test_generated_tokens_are_loaded_in_the_next_turn(lab):
    first = words(300, 30)
    said = answer(lab.vanilla(first, 200))
    second = first + said + words(40, 31)
    wanted = lab.vanilla(second, 50)
    lab.ask(first, None, 200)
    lab.forget_prefixes()
    poison()
    found = lab.ask(second, None, 50)
    size = lab.scheduler.block_size
    assert facts(found)["exact_tokens"] == 499 // size * size, "the last sampled token has no KV"
    assert agree(found, wanted)


def test_a_request_that_wants_no_blend_gets_none(lab):
    wanted = lab.vanilla(PROMPT.tokens)
    relearn(lab)
    found = lab.ask(PROMPT.tokens, PROMPT.blend(blend=False))
    assert facts(found) == {}
    assert agree(found, wanted)


def test_logprobs_of_the_prompt_are_computed_not_loaded(lab):
    """The engine reads no cache for them; nothing of ours may get in its way."""
    wanted = lab.ask(PROMPT.tokens, {"blend": False}, prompt_logprobs=0)
    lab.forget()
    relearn(lab)
    found = [lab.ask(PROMPT.tokens, PROMPT.blend(strategy="none"), prompt_logprobs=0) for _ in range(2)]
    for out in found:
        assert out.prompt_logprobs[1:] == wanted.prompt_logprobs[1:]
        assert agree(out, wanted)


def test_a_reset_between_the_end_of_a_blend_and_its_first_step_leaves_its_blocks_approximate(lab, has_prefix_cache):
    """The hashes of the request became exact, and the engine cached approximate blocks under them."""
    wanted = lab.vanilla(PROMPT.tokens)
    relearn(lab)
    steps = Steps(lab)
    steps.add(PROMPT.tokens, PROMPT.blend(strategy="none"), 8)

    def arrived() -> bool:
        return any(one.salts and not (one.loading or one.scheduled) for one in lab.states.values())

    steps.until(arrived)
    lab.scheduler.reset_prefix_cache(reset_connector=True)
    steps.run()
    plain = lab.ask(PROMPT.tokens, {"blend": False})
    assert agree(plain, wanted)
