"""The same promises where nothing is in one process: scheduler and workers apart, tensor-parallel ranks, no plugin."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

CHILD = Path(__file__).parent / "parallel_child.py"
SECONDS = 240
REUSED = 690
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
NO_PLUGIN = {"transfer": {"kv_connector_module_path": "lmc.connectors.vllm.entry"}}
# Environment, engine options
ENGINES = {
    "processes, no plugin": ({**APART, "VLLM_PLUGINS": ""}, NO_PLUGIN),
    # `collective_rpc` of a function is what the variable allows.
    "tensor parallel": (
        {**APART, "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        {"tensor_parallel_size": 2},
    ),
}

# vLLM's CPU build runs several stages only compiled.
STAGES = (
    {**APART, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"backend": "eager"}},
)


@pytest.fixture(scope="module", params=ENGINES, ids=lambda name: name.replace(", ", "-").replace(" ", "-"))
def seen(request, models):
    """What a child process saw, by promise."""
    return seen_by_child(models("llama"), *ENGINES[request.param])


def seen_by_child(model, environment, options):
    done = subprocess.run(
        [sys.executable, str(CHILD), str(model), json.dumps(options)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(CHILD.parent.parent), os.environ.get("PYTHONPATH", "")]),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_pages_are_loaded_again_exactly(seen):
    assert seen["pages"] == {"exact_tokens": 672, "tokens_from": {"host": 672}}
    assert seen["pages are exact"]


def test_pages_of_two_pipeline_stages_are_loaded_again_exactly(models):
    seen = seen_by_child(models("llama"), *STAGES)
    assert seen == {"pages": {"exact_tokens": 672, "tokens_from": {"host": 672}}, "pages are exact": True}


@pytest.mark.parametrize("family", ["deepseek3", "gemma3mixed"])
def test_ranks_with_all_of_the_latent_kv_and_with_two_block_tables_blend_alike(models, family):
    seen = seen_by_child(models(family), *ENGINES["tensor parallel"])
    promises = ["pages are exact", *(f"{strategy} is exact" for strategy in ("query", "union", "deviation"))]
    assert [seen[promise] for promise in promises] == [True] * 4
    assert seen["union reused"] == REUSED
    assert not seen["none is exact"], "the control: stored KV is used"


def test_documents_that_nobody_knows_are_computed_and_learned(seen):
    assert seen["unknown"] == {"unknown_documents": 4}
    assert seen["unknown documents do no harm"]
    assert seen["learned"]["learned"]


@pytest.mark.parametrize("strategy", ["query", "union", "deviation"])
def test_at_ratio_1_the_blend_is_full_prefill(seen, strategy):
    assert seen[f"{strategy} reused"] == REUSED
    assert seen[f"{strategy} is exact"]


def test_a_rank_without_memory_refuses_a_blend_for_all(seen):
    if "refused" not in seen:
        pytest.skip("one rank")
    assert seen["refused"] == [0, 0]
    assert seen["refused blends are computed"]
    assert seen["asked for memory"] == [4, 4], "before each step of the first one, and before the second one"


def test_blind_reuse_is_not_and_does_not_reach_plain_requests(seen):
    """The control: stored KV is really used."""
    assert seen["none reused"] == REUSED
    assert not seen["none is exact"]
    assert seen["plain after blends"]
