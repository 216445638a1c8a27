"""The list of tested architectures has those that tests run, and no others (docs/models.md shows the list)."""

from lab import FAMILIES
from test_exact_and_blend import ENGINES
from test_only_in_vllm import ARCHITECTURES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmc.connectors.vllm.model_kinds import TESTED

WITH_IMAGES = {"Qwen3VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"}  # in `multimodal.py`


def test_each_listed_architecture_is_run_and_each_that_is_run_is_listed():
    configurations = (FAMILIES[family][0] for family, *_ in ENGINES.values())
    run = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind.model_type] for kind in configurations}
    assert run | ARCHITECTURES.keys() | WITH_IMAGES == TESTED.keys()
