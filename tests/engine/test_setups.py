"""Engines that cannot be blended: it says so once at the start, exact offload goes on, and requests are told."""

import logging

import pytest
import torch
from lab import PLAIN, SAME, SIZES, Prompt, answer, distance, engine, facts, words
from stepping import change_batches, check_pages_are_loaded_again, poison

from lmc.connectors.vllm.scheduler.admin import Administration

pytestmark = pytest.mark.long

DOCUMENTS = [words(150, 1), words(300, 2)]
PROMPT = Prompt(DOCUMENTS)
OFF = "blending is off; the log of the engine's start says why"
# Family, engine options, the reason that is logged
ENGINES = {
    "other layers": ("gpt2", {}, "the model's layers get no positions, and lmc moves keys by RoPE only"),
}


class Said(logging.Handler):
    """What lmc has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_an_engine_whose_self_test_fails_does_not_blend_and_explains_that(models, monkeypatch):
    def late(batch, positions):
        batch.seq_lens = batch.seq_lens_cpu_upper_bound = batch.seq_lens - 1  # No row sees the last key.

    change_batches(monkeypatch, late)
    with engine(models("llama")) as broken:
        asked = {"prompt_token_ids": words(300, 3), "lmc": {"documents": [[10, 200]]}}
        found = Administration(broken.setup, broken.lmc.recent).explain(asked)
        assert "the self-test failed" in found["why"]
        assert found["reused_tokens"] == 0
        assert [one["why"] for one in found["documents"]]


@pytest.fixture(scope="module", params=ENGINES, ids=lambda name: name.replace(" ", "-"))
def lab(request, models):
    family, options, reason = ENGINES[request.param]
    said, log = Said(), logging.getLogger("lmc")
    log.addHandler(said)
    log.setLevel(logging.INFO)
    with engine(models(family), None, enable_prompt_embeds=True, **options) as found:
        found.said, found.reason = said.lines, reason
        yield found
    log.removeHandler(said)
    log.setLevel(logging.NOTSET)


def test_the_log_says_why_it_does_not_blend(lab):
    reason, summary = f"blending is off: {lab.reason}", "lmc: no blending, "
    said = [begin for line in lab.said for begin in (reason, summary) if line.startswith(begin)]
    assert said == [reason, summary]


def test_pages_are_loaded_again_exactly(lab):
    check_pages_are_loaded_again(lab)


def test_pages_of_prompt_embeddings_are_loaded_again_exactly(lab):
    draw = torch.Generator().manual_seed(0)
    given, other = torch.randn(2, 700, SIZES["hidden_size"], generator=draw)

    def ask(embeddings):
        return lab.llm.generate([{"prompt_embeds": embeddings}], lab.parameters(), use_tqdm=False)[0]

    wanted = ask(given)
    lab.forget_prefixes()
    poison()
    found = ask(given)
    assert facts(found)["exact_tokens"] == 672
    assert answer(found) == answer(wanted)
    assert distance(found, wanted) <= SAME
    assert "exact_tokens" not in facts(ask(other))
    lab.check()


def test_the_reason_is_explained_with_what_is_reused_all_the_same(lab):
    lab.ask(PLAIN)
    lab.settle()
    setup = lab.setup
    asked = {"prompt_token_ids": PLAIN, "lmc": {"documents": [[100, 300]]}}
    found = Administration(setup, lab.lmc.recent).explain(asked)
    assert lab.reason in found["why"]
    assert (found["engine_tokens"] + found["exact_tokens"], found["reused_tokens"]) == (672, 0)
    lab.forget_prefixes()
    found = Administration(setup, lab.lmc.recent).explain(asked)
    assert (found["engine_tokens"], found["exact_tokens"]) == (0, 672)


def test_who_asks_for_a_blend_is_served_exactly_and_told(lab):
    wanted = lab.vanilla(PROMPT.tokens)
    assert facts(lab.ask(DOCUMENTS[0], {"learn": True}, 1)) == {"note": OFF}
    found = lab.ask(PROMPT.tokens, PROMPT.blend(strategy="none"))
    assert facts(found) == {"note": OFF}
    assert answer(found) == answer(wanted)
    assert distance(found, wanted) <= SAME
    lab.check()
