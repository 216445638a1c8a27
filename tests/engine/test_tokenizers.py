"""Chats of Mistral's tokenizers, SentencePiece of several versions and Tekken: as vLLM wraps them, which writes chats
without a template, and as transformers reads them, with templates.
"""

import random
import shutil
from pathlib import Path

import mistral_common
import pytest
from amount import mostly_long
from transformers import LlamaTokenizer
from transformers.integrations.mistral import convert_tekken_tokenizer
from vllm.tokenizers.mistral import MistralTokenizer

from lmc.blend.markers import Markers
from lmc.blend.segments import document_tokens, split
from lmc.rag import SEPARATOR, messages

DATA = Path(mistral_common.__file__).parent / "data"
FILES = {
    "tokenizer.model.v1": "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240323.model.v3": "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7": "mistral_instruct_tokenizer_241114.model.v7",
    "tekken_240911.json": "tekken.json",  # the name that the wrapper looks for
}
TEXTS = [
    "The cat sat on the mat.\n\nIt slept.",
    "A dog barked at 12 owls",
    "# Heading\n\n- one\n- two",
    "naïve café 東京",
    "owner of goose Kai . owner of duck Mara .",
    "def f(x):\n    return x  # twice",
]


@pytest.fixture(scope="module", params=FILES)
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(DATA / request.param, folder / FILES[request.param])
    return MistralTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("answer", ["It sat.", "It sat # # on a mat # # at night"])
def test_a_conversation_has_the_documents_that_were_learned_ahead_and_no_others(tokenizer, answer) -> None:
    markers = Markers.of(tokenizer, SEPARATOR)
    known = {text: document_tokens(tokenizer.encode, markers, SEPARATOR, text) for text in TEXTS}
    assert all(len(found) == 1 for found in known.values())
    if "#" in answer and not markers.answers:
        pytest.skip("version 1 writes roles as text, so that nothing tells where an answer begins")
    draw = random.Random(0)
    for _ in range(10):
        chat, wanted = [], []
        for turn in range(3):
            chosen = draw.sample(TEXTS, 3)
            asked = messages("" if turn else "be brief", chosen, "who sat?", intro=draw.choice(["", "Read this."]))
            chat += asked
            wanted += [list(known[text][0]) for text in chosen]
            prompt = list(tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=True))
            found = [prompt[one.start : one.stop] for one in split(prompt, markers).documents]
            assert found == wanted
            chat.append({"role": "assistant", "content": answer})


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}SEAM{{ m.content }}SEAM{{ eos_token }}"
    "{% else %}[INST]SEAM{{ m.content }}SEAM[/INST]{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module", params=mostly_long(FILES, "mistral_instruct_tokenizer_241114.model.v7"))
def templated(request, tmp_path_factory):
    """A tokenizer that writes chats with a template."""
    if request.param.startswith("tekken"):
        return convert_tekken_tokenizer(str(DATA / request.param))
    folder = tmp_path_factory.mktemp("templated")
    shutil.copy(DATA / request.param, folder / "tokenizer.model")
    return LlamaTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("seam", ["", " ", "\n", "\n\n", "  \n\t"])
def test_templates_with_white_space_around_contents_do_not_change_documents(templated, seam) -> None:
    templated.chat_template = TEMPLATE.replace("SEAM", seam)
    markers = Markers.of(templated, SEPARATOR)
    known = {text: document_tokens(templated.encode, markers, SEPARATOR, text) for text in TEXTS}
    assert all(len(found) == 1 for found in known.values())
    draw = random.Random(0)
    for _ in range(5):
        chat, wanted = [], []
        for turn in range(3):
            chosen = draw.sample(TEXTS, 3)
            # The contents begin and end with separators too, which then stand directly beside the seams.
            intro, question = draw.choice([("", ""), ("Read this.", "who sat?"), ("", "who sat?")])
            chat += messages("" if turn else "be brief", chosen, question, intro=intro)
            wanted += [list(known[text][0]) for text in chosen]
            prompt = list(templated.apply_chat_template(chat, tokenize=True, return_dict=False))
            found = [prompt[one.start : one.stop] for one in split(prompt, markers).documents]
            assert found == wanted
            chat.append({"role": "assistant", "content": "It sat."})
