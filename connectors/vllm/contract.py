"""The contract: what lmc needs of a vLLM, and the check whether a vLLM offers it, which runs no engine.

    python -m lmc.connectors.vllm.contract                      the installed vLLM
    python -m lmc.connectors.vllm.contract WHEEL_OR_DIRECTORY   another one; a CUDA wheel needs no GPU for this
    python -m lmc.connectors.vllm.contract WHEEL --extract FILE.json      write its facts, which the tests keep

The check reads Python files, and compares them with lmc's code and the tables below. It compares:

- the names that lmc imports,
- the signatures of the hooks that lmc overrides, and of the functions that lmc calls,
- the attributes that lmc reads,
- the functions in which vLLM calls hooks.

The last comparison is needed because a version that differs in nothing else may still break lmc: 0.30 does not call
`wait_for_save` in steps without tokens, and 0.33 repeats the handshake after a sleep.

At start, `objections` checks only names and signatures of hooks, which takes milliseconds.
"""

import argparse
import ast
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lmc.connectors.vllm.vllm_api import LATER, NEWEST, OLDEST, SUBSTITUTES, USED, installed_version, parsed_version
from lmc.connectors.vllm.vllm_facts import (
    Signature,
    Sources,
    VllmFacts,
    accepts,
    own_attributes,
    read_facts,
    signature_of,
)
from lmc.errors import InputError

HERE = Path(__file__).parent
BASE = f"{USED['KVConnectorBase_V1']}.KVConnectorBase_V1"
# The base class of connectors for models with several kinds of caches, and its hook
HMA, HMA_HOOKS = f"{USED['SupportsHMA']}.SupportsHMA", frozenset({"request_finished_all_groups"})
INSTALL = f"install 'vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"

# Hooks that lmc overrides, and that some of the supported versions lack. lmc does not need them there.
OPTIONAL_HOOKS = frozenset({"get_external_cache_hit_sources", "unregister_kv_caches"})

# Attributes that lmc reads, by class. `name(2, word)` is called with two positional arguments and a keyword.
FIELDS: Mapping[str, str] = {
    BASE: "_get_connector_metadata() role",
    HMA: "request_finished_all_groups(2)",
    "vllm.config.CacheConfig": "block_size cache_dtype enable_prefix_caching prefix_caching_hash_algo",
    "vllm.config.CompilationConfig": "cudagraph_mode static_forward_context",
    "vllm.config.CUDAGraphMode": "NONE",
    "vllm.config.KVEventsConfig": "enable_kv_cache_events",
    "vllm.config.KVTransferConfig": "kv_connector_extra_config kv_load_failure_policy",
    "vllm.config.LoadConfig": "load_format",
    "vllm.config.ModelConfig": "dtype get_vocab_size() hf_config hf_overrides hf_text_config "
    "is_prefix_caching_supported max_model_len model multimodal_config quantization revision served_model_name "
    "tokenizer uses_mrope",
    "vllm.config.MultiModalConfig": "mm_processor_cache_gb",
    "vllm.config.ObservabilityConfig": "otlp_traces_endpoint",
    "vllm.config.ParallelConfig": "data_parallel_index data_parallel_size decode_context_parallel_size is_moe_model "
    "pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size",
    "vllm.config.SchedulerConfig": "max_num_batched_tokens max_num_seqs",
    "vllm.config.SpeculativeConfig": "draft_model_config method num_speculative_tokens",
    "vllm.config.VllmConfig": "cache_config compilation_config kv_events_config kv_transfer_config load_config "
    "lora_config model_config observability_config parallel_config scheduler_config speculative_config",
    "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory": "_registry register_connector(3)",
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorRole": "SCHEDULER WORKER",
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults": "failed_recving",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorPromMetrics": "_counter_cls _gauge_cls "
    "_histogram_cls __init__(4) observe(2)",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorStats": "aggregate(1) data is_empty() reduce() "
    "reset()",
    "vllm.distributed.parallel_state.GroupCoordinator": "all_reduce(1) cpu_group device_group rank_in_group "
    "world_size",
    "vllm.lora.request.LoRARequest": "load_inplace lora_int_id lora_path",
    "vllm.model_executor.layers.attention.Attention": "attn_backend head_size impl kv_cache_dtype layer_name "
    "sliding_window",
    "vllm.model_executor.layers.attention.MLAAttention": "_v_up_proj(1,out) attn_backend forward_impl(5,output) impl "
    "kv_cache_dtype kv_lora_rank layer_name qk_nope_head_dim qk_rope_head_dim",
    "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbeddingBase": "cos_sin_cache is_neox_style",
    "vllm.v1.attention.backend.AttentionMetadataBuilder": "__init__(4) build(2)",
    **{
        f"vllm.v1.attention.backends.{name}": "alibi_slopes do_kv_cache_update(5) forward(7) logits_soft_cap scale"
        for name in (
            "cpu_attn.CPUAttentionBackendImpl", "flash_attn.FlashAttentionImpl", "flashinfer.FlashInferImpl",
            "triton_attn.TritonAttentionImpl",
        )
    },
    "vllm.v1.attention.backend.MLAAttentionImpl": "do_kv_cache_update(6)",
    "vllm.v1.core.block_pool.BlockPool": "blocks cache_full_blocks(6) free_blocks(1) get_cached_block(2) "
    "get_new_blocks(1) get_num_free_blocks() hash_block_size touch(1)",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": "get_block_ids()",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": "block_id is_null ref_cnt",
    "vllm.v1.core.sched.output.KVConnectorBlockState": "get_block_ids(1)",
    "vllm.v1.core.sched.output.SchedulerOutput": "kv_connector_block_state num_scheduled_tokens",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "kv_cache_groups num_blocks",
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": "kv_cache_spec layer_names",
    "vllm.v1.kv_cache_interface.KVCacheSpec": "block_size copy_with_new_block_size(1)",
    "vllm.v1.kv_cache_interface.MambaSpec": "mamba_cache_mode num_speculative_blocks",
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": "sliding_window",
    "vllm.v1.metrics.stats.PrefillStats": "set(3)",
    "vllm.v1.outputs.KVConnectorOutput": "finished_recving kv_connector_worker_meta",
    "vllm.v1.request.Request": "all_token_ids arrival_time block_hashes cache_salt is_finished() kv_transfer_params "
    "lora_request max_tokens mm_features num_computed_tokens num_output_tokens num_preemptions num_prompt_tokens "
    "num_tokens prefill_stats prompt_embeds prompt_token_ids request_id skip_reading_prefix_cache status trace_headers "
    "update_block_hashes()",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": "attn_groups get_model()",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": "attn_groups get_model()",
    "vllm.v1.worker.worker_base.WorkerBase": "get_model()",
    "vllm.v1.worker.worker_base.WorkerWrapperBase": "initialize_from_config()",
}  # fmt: skip

# Where vLLM calls hooks: the file and the function, and the hooks. With ?, only some supported versions call the hook.
CALLS: Mapping[str, str] = {
    "config/vllm.py VllmConfig.__post_init__": "requires_piecewise_for_cudagraph",
    "distributed/kv_transfer/kv_connector/utils.py get_kv_connector_cache_layout": "get_required_kvcache_layout",
    "distributed/kv_transfer/kv_connector/v1/base.py KVConnectorBase_V1.bind_kv_cache_manager": "bind_gpu_block_pool",
    "distributed/kv_transfer/kv_connector/v1/base.py KVConnectorBase_V1.get_transfer_results": "get_finished",
    "distributed/kv_transfer/kv_connector/v1/metrics.py KVConnectorLogging.observe": "build_kv_connector_stats",
    "distributed/kv_transfer/kv_connector/v1/metrics.py KVConnectorProm.__init__": "build_prom_metrics",
    "distributed/kv_transfer/kv_transfer_state.py ensure_kv_transfer_shutdown": "shutdown",
    "model_executor/layers/attention/kv_transfer_utils.py maybe_transfer_kv_layer.wrapper": "save_kv_layer "
    "wait_for_layer_load",
    "v1/core/sched/scheduler.py Scheduler.add_request": "on_new_request request_finished request_finished_all_groups",
    "v1/core/sched/scheduler.py Scheduler.finish_requests": "request_finished request_finished_all_groups",
    "v1/core/sched/scheduler.py Scheduler.has_requests": "has_pending_push_work",
    "v1/core/sched/scheduler.py Scheduler.reset_connector_cache": "reset_cache",
    "v1/core/sched/scheduler.py Scheduler.reset_prefix_cache": "reset_cache",
    "v1/core/sched/scheduler.py Scheduler.schedule": "build_connector_meta ?get_external_cache_hit_sources "
    "get_num_new_matched_tokens update_state_after_alloc",
    "v1/core/sched/scheduler.py Scheduler.shutdown": "shutdown",
    "v1/core/sched/scheduler.py Scheduler.update_from_output": "?get_external_cache_hit_sources "
    "get_kv_connector_stats request_finished request_finished_all_groups take_events update_connector_output "
    "?update_state_after_alloc",
    "v1/engine/core.py DPMoEEngineCoreActor.__init__": "set_xfer_handshake_metadata_pp_aware",
    "v1/engine/core.py EngineCore.__init__": "set_xfer_handshake_metadata_pp_aware",
    "v1/engine/core.py EngineCore.wake_up": "?set_xfer_handshake_metadata_pp_aware",
    "v1/engine/core.py EngineCoreActor.__init__": "set_xfer_handshake_metadata_pp_aware",
    "v1/worker/gpu/kv_connector.py ActiveKVConnector.__init__": "register_kv_caches",
    "v1/worker/gpu/kv_connector.py ActiveKVConnector.finalize_step": "?wait_for_save",
    "v1/worker/gpu/kv_connector.py ActiveKVConnector.no_forward": "build_connector_worker_meta "
    "get_block_ids_with_load_errors get_kv_connector_stats get_transfer_results start_load_kv ?wait_for_save",
    "v1/worker/gpu/kv_connector.py ActiveKVConnector.post_forward": "build_connector_worker_meta "
    "get_block_ids_with_load_errors get_kv_connector_stats get_transfer_results start_load_kv wait_for_save",
    "v1/worker/gpu/kv_connector.py ActiveKVConnector.pre_forward": "start_load_kv",
    "v1/worker/gpu_model_runner.py GPUModelRunner.initialize_kv_cache": "register_kv_caches",
    "v1/worker/gpu_model_runner.py GPUModelRunner.profile_cudagraph_memory": "register_kv_caches",
    "v1/worker/gpu_worker.py Worker.discard": "?unregister_kv_caches",
    "v1/worker/gpu_worker.py Worker.get_kv_connector_handshake_metadata": "get_handshake_metadata",
    "v1/worker/gpu_worker.py Worker.sleep": "?unregister_kv_caches",
    "v1/worker/kv_connector_model_runner_mixin.py KVConnectorModelRunnerMixin.finalize_kv_connector": "wait_for_save",
    "v1/worker/kv_connector_model_runner_mixin.py KVConnectorModelRunnerMixin.kv_connector_no_forward":
    "build_connector_worker_meta get_block_ids_with_load_errors get_kv_connector_stats get_transfer_results "
    "start_load_kv ?wait_for_save",
    "v1/worker/kv_connector_model_runner_mixin.py KVConnectorModelRunnerMixin.maybe_get_kv_connector_output":
    "build_connector_worker_meta get_block_ids_with_load_errors get_kv_connector_stats get_transfer_results "
    "start_load_kv wait_for_save",
}  # fmt: skip


def lmc_hooks() -> dict[str, Signature]:
    """Return the hooks that lmc's connector overrides, with their signatures."""
    tree = ast.parse((HERE / "connector.py").read_text())
    (connector,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LMCConnector")
    methods = own_attributes(connector).items()
    return {name: has for name, has in methods if has is not None and (name == "__init__" or name[:1] != "_")}


@cache
def lmc_calls() -> set[tuple[str, int, tuple[str, ...]]]:
    """Return lmc's calls of names from vLLM: name, number of positional arguments, keywords."""
    found = set()
    for file in HERE.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case (
                    ast.Call(func=ast.Attribute(value=ast.Name(id="vllm_api"), attr=name))
                    | ast.Call(func=ast.Name(id=name))
                ) if name in USED:
                    found.add((name, len(call.args), tuple(sorted(_keywords(call)))))
    return found


def _keywords(call: ast.Call) -> Iterator[str]:
    """Yield the keywords of a call, including those in a dict literal after `**`."""
    for keyword in call.keywords:
        if keyword.arg:
            yield keyword.arg
        elif isinstance(keyword.value, ast.Dict):
            yield from (str(key.value) for key in keyword.value.keys if isinstance(key, ast.Constant))


def facts_of(sources: Sources) -> VllmFacts:
    """Read the facts that the contract needs from a vLLM's files."""
    fields = {path: [item.partition("(")[0] for item in names.split()] for path, names in FIELDS.items()}
    for name, _, _ in lmc_calls():
        fields.setdefault(f"{USED[name]}.{name}", []).append("__init__")
    return read_facts(sources, [f"{module}.{name}" for name, module in USED.items()], fields, BASE, lmc_hooks())


def facts_of_imported() -> VllmFacts:
    """Return those facts about the vLLM of this process that are fast to read: names, and signatures of hooks."""
    functions: dict[str, Signature | None] = {}
    for name, module in USED.items():
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        functions[f"{module}.{name}"] = None
    hooks: dict[str, Signature | None] = {}
    abstract: list[str] = []
    if BASE in functions:
        base = importlib.import_module(USED["KVConnectorBase_V1"]).KVConnectorBase_V1
        abstract = sorted(getattr(base, "__abstractmethods__", ()))
        for hook in lmc_hooks():
            if method := inspect.getattr_static(base, hook, None):
                function = getattr(method, "__func__", method)  # the function of a class method
                hooks[hook] = signature_of(function, bound=not isinstance(method, staticmethod))
    return VllmFacts(version=installed_version(), functions=functions, classes={BASE: hooks}, abstract=abstract)


def objections(facts: VllmFacts) -> list[str]:
    """Return why lmc cannot run with a vLLM, from its version, names and hooks; an empty list if it can."""
    number = parsed_version(facts.version)
    if number is not None and number < OLDEST:
        return [f"it is older than {OLDEST[0]}.{OLDEST[1]}"]
    return [*_missing_names(facts), *_changed_hooks(facts)]


def findings(facts: VllmFacts) -> list[str]:
    """Return all differences between a vLLM and the contract."""
    return [
        *objections(facts),
        *_refused_calls(facts),
        *_missing_fields(facts),
        *_refused_hook_calls(facts),
        *_moved_hook_calls(facts),
    ]


def _missing_names(facts: VllmFacts) -> Iterator[str]:
    for name, module in USED.items():
        path = f"{module}.{name}"
        if not (path in facts.functions or path in facts.classes or name in SUBSTITUTES or name in LATER):
            yield f"{path} is missing"


def _changed_hooks(facts: VllmFacts) -> Iterator[str]:
    ours, theirs = lmc_hooks(), facts.classes.get(BASE, {})
    if not theirs:
        return
    for hook, signature in ours.items():
        if hook in theirs:
            given = theirs[hook]
            if given is None:
                yield f"{hook} of connectors is data instead of a method"
            elif change := _change(signature, given):
                yield f"{hook} of connectors has other parameters, ({', '.join(given)}): {change}"
        elif hook not in OPTIONAL_HOOKS | HMA_HOOKS:
            yield f"{hook} of connectors is missing"
    for method in facts.abstract:
        if method not in ours:
            yield f"{method} of connectors is new, and lmc must implement it"


def _change(ours: Signature, theirs: Signature) -> str:
    """Return why lmc's hook cannot be called like the hook of vLLM; an empty string if it can."""
    parts = [_split(signature) for signature in (ours, theirs)]
    (positional, keywords, rest), (their_positional, their_keywords, their_rest) = parts
    for place, name in enumerate(their_positional):
        if place < len(positional) and positional[place] != name and "*" not in rest:
            return f"lmc expects {positional[place]} instead of {name}"
        if place >= len(positional) and "*" not in rest:
            return f"lmc does not accept {name}"
    if extra := [name for name in positional[len(their_positional) :] if f"{name}=" not in ours]:
        return f"lmc needs {extra[0]}"
    if unknown := [name for name in their_keywords if name not in keywords and "**" not in rest]:
        return f"lmc does not accept {unknown[0]}"
    return "" if their_rest <= rest else "lmc does not accept further arguments"


def _split(signature: Signature) -> tuple[list[str], list[str], set[str]]:
    """Return the positional parameters, the keyword-only parameters, and the stars of variadic parameters."""
    stars = [place for place, part in enumerate(signature) if part.startswith("*")]
    first = stars[0] if stars else len(signature)
    names = [part.rstrip("=") for part in signature]
    rest = {part[: len(part) - len(part.lstrip("*"))] for part in signature if part.strip("*") and part[0] == "*"}
    return names[:first], [name for name in names[first:] if not name.startswith("*")], rest


def _refused_calls(facts: VllmFacts) -> Iterator[str]:
    for name, positional, keywords in sorted(lmc_calls()):
        path = f"{USED[name]}.{name}"
        signature = facts.functions.get(path) or facts.classes.get(path, {}).get("__init__")
        if signature is not None and not accepts(signature, positional, keywords):
            yield f"{path} has other parameters, ({', '.join(signature)}), than lmc passes"


def _missing_fields(facts: VllmFacts) -> Iterator[str]:
    for path, names in FIELDS.items():
        attributes = facts.classes.get(path)
        if attributes is None:
            yield f"{path} is missing"
            continue
        for name, arguments in (item.rstrip(")").partition("(")[::2] for item in names.split()):
            if name not in attributes:
                yield f"{path}.{name} is missing"
            elif (signature := attributes[name]) is not None and arguments:
                count, *keywords = arguments.split(",")
                if not accepts(signature, int(count), keywords):
                    yield f"{path}.{name} has other parameters, ({', '.join(signature)}), than lmc passes"


def _refused_hook_calls(facts: VllmFacts) -> Iterator[str]:
    ours = lmc_hooks()
    for call in facts.calls:
        keywords = [name for name in call.keywords if name != "**"]
        if call.hook in ours and not accepts(ours[call.hook], call.positional, keywords):
            given = [f"{call.positional} positional", *keywords]
            yield f"{call.hook} is called with other arguments than lmc accepts, in {call.file}: {', '.join(given)}"


def _moved_hook_calls(facts: VllmFacts) -> Iterator[str]:
    called = {(call.hook, call.file, function) for call in facts.calls for function in call.functions}
    always: set[tuple[str, str, str]] = set()
    sometimes: set[tuple[str, str, str]] = set()
    for place, hooks in CALLS.items():
        file, _, function = place.partition(" ")
        for hook in hooks.split():
            (sometimes if hook.startswith("?") else always).add((hook.removeprefix("?"), file, function))
    for hook, file, function in sorted(always - called):
        yield f"{hook} is no longer called in {function} ({file})"
    for hook, file, function in sorted(called - always - sometimes):
        yield f"{hook} is now called in {function} ({file}) as well"


def main(arguments: Iterable[str] | None = None) -> int:
    """Check a vLLM, print the differences, and return 1 if it does not fulfil the contract, 2 if it cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m lmc.connectors.vllm.contract", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("vllm", nargs="?", type=Path, help="wheel or directory of vLLM; by default the installed vLLM")
    parser.add_argument("--extract", type=Path, metavar="FILE", help="write the facts to this file, without a check")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        facts = facts_of(Sources(options.vllm or installed_package()))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    if options.extract:
        options.extract.write_text(facts.to_json() + "\n")
        print(f"wrote the facts about vLLM {facts.version} to {options.extract}")
        return 0
    differences = findings(facts)
    for difference in differences:
        print(difference)
    verdict = f"{len(differences)} differences" if differences else "fulfils the contract"
    print(f"vLLM {facts.version}: {verdict}")
    return bool(differences)


def installed_package() -> Path:
    """Return the directory of the installed vLLM. Raises `InputError` if there is none."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise InputError("vLLM is not installed in this Python: pass a wheel or a directory")
    return Path(spec.origin).parent


if __name__ == "__main__":
    sys.exit(main())
