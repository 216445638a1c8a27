"""Wrong use is answered with a message that says what would be right; no request's fault ends the engine."""

import logging
from types import SimpleNamespace

import pytest
from lab import Prompt, answer, cleanup_dist_env_and_memory, engine, facts, words

from lmc.blend.markers import Markers
from lmc.config import Settings
from lmc.connectors.vllm.connector import LMCConnector
from lmc.connectors.vllm.native import NativeLayers
from lmc.errors import ConfigError, UnsupportedModel

DOCUMENTS = [words(150, 1), words(90, 2)]
BOS = 1


@pytest.fixture(scope="module")
def lab(models):
    """One engine for all requests: it has to live through every one of them."""
    with engine(models("llama")) as found:
        # As a tokenizer would say.
        found.connector._scheduler._setup.markers = Markers(separators=((2, 2),), special=frozenset({BOS}))
        found.learn(DOCUMENTS)
        yield found


# -- requests ---------------------------------------------------------------------------------------------------------

WRONG = {
    "a word instead of an object": ("blend", "kv_transfer_params['lmc'] must be an object, not 'blend'"),
    "unknown option": ({"ration": 0.3}, "has no 'ration'; there are blend, learn, name, strategy, ratio, documents"),
    "blend as text": ({"blend": "no"}, "lmc.blend must be true or false, not 'no'"),
    "learn as a number": ({"learn": 1}, "lmc.learn must be true or false, not 1"),
    "ratio above 1": ({"ratio": 15}, "lmc.ratio must be between 0 and 1, not 15"),
    "ratio below 0": ({"ratio": -0.1}, "lmc.ratio must be between 0 and 1, not -0.1"),
    "ratio that is no number": ({"ratio": float("nan")}, "lmc.ratio must be between 0 and 1, not nan"),
    "ratio as text": ({"ratio": "0.3"}, "lmc.ratio must be between 0 and 1, not '0.3'"),
    "unknown strategy": ({"strategy": "fancy"}, "'fancy'"),
    "strategy that is no text": ({"strategy": ["query"]}, "lmc.strategy must be one of"),
    "documents as text": (
        {"documents": "0-10"},
        "lmc.documents must be a list of [start, stop], or of texts, not '0-10'",
    ),
    "documents as a number": ({"documents": 7}, "lmc.documents must be a list of [start, stop], or of texts, not 7"),
    "a span as a number": ({"documents": [7]}, "lmc.documents: 7 is no [start, stop]"),
    "a span of three": ({"documents": [[1, 2, 3]]}, "[1, 2, 3] is no [start, stop]"),
    "a span of text": ({"documents": [["1", "9"]]}, "['1', '9'] is no [start, stop]"),
    "a span of fractions": ({"documents": [[1.0, 9.0]]}, "[1.0, 9.0] is no [start, stop]"),
    "a span behind the prompt": ({"documents": [[0, 10_000]]}, "[0, 10000] is not inside the prompt of 300 tokens"),
    "a span before the prompt": ({"documents": [[-5, 10]]}, "[-5, 10] is not inside the prompt"),
    "an empty span": ({"documents": [[9, 9]]}, "[9, 9] is not inside the prompt"),
    "a reversed span": ({"documents": [[90, 9]]}, "[90, 9] is not inside the prompt"),
    "a document to learn with documents in it": ({"learn": True, "documents": [[0, 9]]}, "exclude each other"),
    "overlapping spans": ({"documents": [[0, 50], [40, 90]]}, "[40, 90) overlaps what comes before it"),
    "spans in the wrong order": ({"documents": [[50, 90], [0, 40]]}, "[0, 40) overlaps what comes before it"),
}
PROMPT = Prompt(DOCUMENTS)


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_is_answered_exactly_with_a_note(lab, name):
    wish, said = WRONG[name]
    wanted = answer(lab.ask(PROMPT.tokens, {"blend": False}))
    refused = lab.numbers.get("refused", 0)
    out = lab.ask(PROMPT.tokens, wish)
    assert said in facts(out)["note"]
    assert answer(out) == wanted
    assert lab.numbers["refused"] == refused + 1


@pytest.mark.parametrize("given", [{"other": 1}, {"lmc": None}, {}], ids=repr)
def test_parameters_of_other_connectors_are_nobody_s_fault(lab, given):
    parameters = lab.parameters()
    parameters.extra_args = {"kv_transfer_params": given}
    (out,) = lab.llm.generate([{"prompt_token_ids": PROMPT.tokens}], parameters, use_tqdm=False)
    assert "note" not in facts(out)


def test_a_refusal_is_logged_once_and_counted(lab, caplog):
    lab.connector._scheduler._roles.told.clear()
    with caplog.at_level(logging.WARNING, "lmc"):
        for _ in range(3):
            lab.ask(PROMPT.tokens, {"ratio": 2})
    (line,) = [record.message for record in caplog.records if "served without blending" in record.message]
    assert line == (
        "a request is served without blending: lmc.ratio must be between 0 and 1, not 2 "
        "(said once, counted as lmc:refused)"
    )


def test_a_document_to_learn_that_begins_with_bos_is_not_learned(lab):
    out = lab.ask([BOS, *words(150, 5)], {"learn": True})
    assert facts(out) == {"note": facts(out)["note"]}
    assert "must have no special tokens" in facts(out)["note"]


def test_after_all_that_a_blend_still_works(lab):
    prompt = Prompt(DOCUMENTS[::-1], seed=2000)
    assert facts(lab.ask(prompt.tokens, prompt.blend()))["reused_tokens"] > 0
    lab.check()


# -- the engine -------------------------------------------------------------------------------------------------------


def test_without_a_load_failure_policy_a_warning_says_what_to_add(models, caplog):
    with (
        caplog.at_level(logging.WARNING, "lmc"),
        engine(models("llama"), transfer={"kv_load_failure_policy": "fail"}) as lab,
    ):
        lab.ask(words(100, 1))
    assert """add "kv_load_failure_policy":"recompute" to --kv-transfer-config""" in caplog.text


def test_a_model_that_cannot_be_blended_is_offloaded_exactly(models, caplog):
    with caplog.at_level(logging.WARNING, "lmc"), engine(models("gemma3")) as lab:
        assert "blending is off: Gemma3ForCausalLM has not been proven" in caplog.text
        assert "Exact offload goes on." in caplog.text
        prompt = Prompt(DOCUMENTS)
        wanted = lab.vanilla(prompt.tokens)
        lab.ask(prompt.tokens)
        lab.forget_prefixes()
        again = lab.ask(prompt.tokens)
        assert facts(again)["exact_tokens"] >= 288
        assert answer(again) == answer(wanted)
        for wish in (prompt.blend(), {"learn": True}):
            assert "blending is off" in facts(lab.ask(prompt.tokens, wish))["note"]
        lab.check()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"chunk_size": 100}, "set chunk_size (LMC_CHUNK_SIZE) to 96, or --block-size to a divisor of it"),
        ({"chunk_sice": 128}, "unknown setting chunk_sice (override chunk_sice): did you mean chunk_size?"),
        ({"blend_strategy": "fancy"}, "must be one of query, deviation, head, union, random, all, none"),
    ],
    ids=["block size", "misspelt", "strategy"],
)
def test_a_setting_that_cannot_work_ends_the_start(models, settings, said):
    assert said in refusal(models("llama"), settings)


def test_an_unknown_variable_ends_the_start(models, monkeypatch):
    monkeypatch.setenv("LMC_CHUNKSIZE", "128")
    said = refusal(models("llama"))
    assert said == "unknown setting LMC_CHUNKSIZE (environment LMC_CHUNKSIZE): did you mean LMC_CHUNK_SIZE?"


def test_a_special_string_that_encodes_to_nothing_ends_the_start():
    class Deaf:
        bos_token_id, all_special_ids = None, ()

        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text if letter != "#"]

        def decode(self, tokens: list[int]) -> str:
            return "".join(map(chr, tokens))

    with pytest.raises(
        ConfigError, match="the special string ' # # ' encodes to no token of its own; set blend_special"
    ):
        markers(Deaf())


def test_pipeline_parallel_is_not_blended():
    model = type("LlamaForCausalLM", (), {})()
    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    with pytest.raises(UnsupportedModel, match="its layers are on several pipeline stages"):
        NativeLayers(model, config, None, {})


def refusal(model, settings=None) -> str:
    """What an engine that does not start says."""
    try:
        with pytest.raises(ConfigError) as error, engine(model, settings):
            pass
    finally:
        cleanup_dist_env_and_memory()
    return str(error.value)


def markers(tokenizer):
    """What a connector finds with a tokenizer."""
    connector = LMCConnector.__new__(LMCConnector)
    connector.settings = Settings(enable_blending=True)
    return connector._markers(tokenizer)


def test_ranks_that_each_have_a_scheduler_of_their_own_are_refused():
    """As under torchrun (external_launcher): each would take the slots of a slab for one rank, and its worker for one
    of several.
    """
    connector = LMCConnector.__new__(LMCConnector)
    connector.settings = Settings()
    connector._config = SimpleNamespace(
        model_config=SimpleNamespace(is_prefix_caching_supported=True),
        cache_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
    )
    with pytest.raises(ConfigError, match=r"1 of 2 workers.*external_launcher"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace(facts=None)})
