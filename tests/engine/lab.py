"""A vLLM engine in this process with the connector, and what tests want to know of it."""

import gc
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before vLLM is imported. One thread: on two shared cores an OpenMP barrier costs more than the work.
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
for name, value in QUIET.items():
    os.environ.setdefault(name, value)

import transformers  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402

from lmc.keys import RecordKind  # noqa: E402

# vLLM starts a process to look at each class of models, so that CUDA stays uninitialized here. It takes many seconds.
registry._run_in_subprocess = lambda look: look()

BLOCK = 32
SAME = 1e-5  # logprobs, float32
SETTINGS = {
    "enable_blending": True,
    "max_local_cpu_size": 0.25,
    "blend_min_tokens": 16,
    "blend_find": "separators",  # most tests say themselves where documents are
    "chunk_size": 128,
    "load_policy": "always",  # models this small are computed faster than loaded
}
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 12,
    "long_factor": [1.0 + i / 4 for i in range(12)],
}
WINDOWED = ["sliding_attention"] * 3 + ["full_attention"]
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,  # vLLM's CPU build has no kernel for other sizes of the latent vector and the rotated key.
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 4,
    # vLLM's CPU build rotates the rows of MLA wrongly with plain RoPE, because they are views of longer rows.
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
SHARING = {  # The last layers read the KV of earlier ones, and each layer has an input of its own.
    "head_dim": 32,
    "sliding_window": 128,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 1024,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"head_dim": 32}),
    "llama3": (transformers.LlamaConfig, {"head_dim": 32, "rope_parameters": LLAMA3}),
    "yarn": (transformers.LlamaConfig, {"head_dim": 32, "rope_parameters": YARN}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "mistral": (
        transformers.MistralConfig,
        {"head_dim": 32, "sliding_window": None, "rope_parameters": LINEAR},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}),
    "phi3": (transformers.Phi3Config, {}),
    "qwen3moe": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    "qwen2moe": (
        transformers.Qwen2MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "gemma": (transformers.GemmaConfig, {"head_dim": 32, "initializer_range": 0.1}),  # so that attention matters
    "deepseek2": (transformers.DeepseekV2Config, {**LATENT, "q_lora_rank": None}),
    "deepseek3": (
        transformers.DeepseekV3Config,
        {**LATENT, "q_lora_rank": 64, "first_k_dense_replace": 2, "topk_method": "noaux_tc"},
    ),
    "ministral3": (
        transformers.Ministral3Config,
        {
            "head_dim": 32,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 512},
        },
    ),
    "ernie": (transformers.Ernie4_5Config, {"head_dim": 32}),
    "erniemoe": (
        transformers.Ernie4_5_MoeConfig,
        {
            "head_dim": 32,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 128,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "granitemoe": (
        transformers.GraniteMoeConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 2.0, "attention_multiplier": 0.2},
    ),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "apertus": (transformers.ApertusConfig, {"head_dim": 32}),
    "nemotron": (transformers.NemotronConfig, {"head_dim": 32}),
    "cohere": (transformers.CohereConfig, {}),
    "stablelm": (transformers.StableLmConfig, {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "exaonemoe": (
        transformers.ExaoneMoeConfig,
        {"head_dim": 32, "sliding_window": 128, "sliding_window_pattern": 4, "layer_types": WINDOWED},
    ),
    # vLLM serves these with the layers of transformers.
    "olmo2": (transformers.Olmo2Config, {}),
    "olmo3": (transformers.Olmo3Config, {"sliding_window": 128, "layer_types": WINDOWED, "rope_parameters": YARN}),
    "smollm3": (transformers.SmolLM3Config, {}),
    "seedoss": (transformers.SeedOssConfig, {"head_dim": 32}),
    "hunyuan": (transformers.HunYuanDenseV1Config, {"head_dim": 32}),
    "starcoder2": (transformers.Starcoder2Config, {}),
    "arcee": (transformers.ArceeConfig, {"head_dim": 32}),
    "dots1": (
        transformers.Dots1Config,
        {
            "head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "sliding_window": None,
        },
    ),
    "glm4moelite": (
        transformers.Glm4MoeLiteConfig,
        {**LATENT, "q_lora_rank": 64, "first_k_dense_replace": 1, "topk_method": "noaux_tc"},
    ),
    "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 128}),
    "gemma3mixed": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma4": (
        transformers.Gemma4TextConfig,
        {
            "head_dim": 32,
            "sliding_window": 128,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 1024,
            # vLLM lists the layers of one kind first.
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention", *WINDOWED],
            "per_layer_config": {layer: {"head_dim": 64, "num_key_value_heads": 2} for layer in ("01", "05")},
        },
    ),
    "gemma4small": (  # as E2B and E4B, whose caches differ in size
        transformers.Gemma4TextConfig,
        {
            **SHARING,
            "per_layer_config": {layer: {"head_dim": 64} for layer in ("01", "03", "05")},
        },
    ),
    "gemma3n": (
        transformers.Gemma3nTextConfig,
        {
            **SHARING,
            "intermediate_size": [512] * 6,
            "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
            "laurel_rank": 16,
        },
    ),
    "gptoss": (
        transformers.GptOssConfig,
        {
            "head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "cohere2": (
        transformers.Cohere2Config,
        {"head_dim": 32, "sliding_window": 128, "layer_types": WINDOWED},
    ),
    "cohere2moe": (
        transformers.Cohere2MoeConfig,
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": WINDOWED,
        },
    ),
    "afmoe": (
        transformers.AfmoeConfig,
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "moe_intermediate_size": 128,
            "score_func": "sigmoid",
            "route_norm": True,
            "route_scale": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "mup_enabled": True,
            "sliding_window": 128,
            "layer_types": WINDOWED,
        },
    ),
    "exaone4": (
        transformers.Exaone4Config,
        {"head_dim": 32, "sliding_window": 128, "sliding_window_pattern": 4, "layer_types": WINDOWED},
    ),
    "llama4": (
        transformers.Llama4TextConfig,
        {
            "head_dim": 32,
            "intermediate_size_mlp": 512,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 128,
            "no_rope_layers": [1, 1, 1, 0],
            "interleave_moe_layer_step": 2,
        },
    ),
    "glm4": (transformers.Glm4Config, {"head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4moe": (
        transformers.Glm4MoeConfig,
        {
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "granite": (
        transformers.GraniteConfig,
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "longrope": (
        transformers.Phi3Config,
        {"original_max_position_embeddings": 512, "rope_parameters": LONGROPE},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 128,
            "attn_logit_softcapping": 0.5,  # so low that it changes attention
        },
    ),
    "gpt2": (transformers.GPT2Config, {}),
    "draft": (transformers.LlamaConfig, {"num_hidden_layers": 1}),
    "mistralwindow": (transformers.MistralConfig, {"head_dim": 32, "sliding_window": 128}),
    "qwen3next": (  # vLLM's CPU build computes its states in bfloat16 only, and heads of other sizes not at all.
        transformers.Qwen3NextConfig,
        {
            "head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "partial_rotary_factor": 0.5,
        },
    ),
    "qwen35": (
        transformers.Qwen3_5TextConfig,
        {
            "head_dim": 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "granite4": (  # Mamba 2, whose steps vLLM's CPU build does not run.
        transformers.GraniteMoeHybridConfig,
        {
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "position_embedding_type": None,
        },
    ),
    "nemotronh": (
        transformers.NemotronHConfig,
        {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 1,
        },
    ),
    "lfm2": (
        transformers.Lfm2Config,
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "conv_bias": False,
            "conv_dim": 256,
            "conv_dim_out": 256,
            "block_dim": 256,
            "block_ff_dim": 512,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
    ),
}


def make_model(family: str, folder: Path) -> Path:
    """A small model with random weights, the same every time."""
    path = folder / family
    if not path.exists():
        import torch

        kind, options = FAMILIES[family]
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(kind(**{**SIZES, **options})).save_pretrained(path)
    return path


def words(count: int, seed: int) -> list[int]:
    """Random tokens, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(4, 1020) for _ in range(count)]


class Prompt:
    """A system text, documents, a question; where the documents are."""

    def __init__(
        self, documents: Sequence[Sequence[int]], system: int = 37, question: int = 23, seed: int = 1000
    ) -> None:
        self.tokens = words(system, seed)
        self.spans = []
        for document in documents:
            self.spans.append([len(self.tokens), len(self.tokens) + len(document)])
            self.tokens = [*self.tokens, *document]
        self.tokens = [*self.tokens, *words(question, seed + 1)]

    def blend(self, **wishes: Any) -> dict[str, Any]:
        """What to ask of lmc."""
        return {"documents": self.spans, **wishes}


# What several files ask: documents that are learned, a prompt with all of them in another order, and one without any.
DOCUMENTS = [words(150, 1), words(300, 2), words(150, 3), words(90, 4)]
PROMPT = Prompt([DOCUMENTS[i] for i in (2, 0, 3, 1)])
PLAIN = words(700, 9)


def scheduler_of(connector: Any) -> Any:
    """lmc's scheduler behind a connector."""
    return connector._scheduler


def setup_of(connector: Any) -> Any:
    """What the scheduler behind a connector was given at the start."""
    return scheduler_of(connector)._setup


class Lab:
    """An engine with its insides."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()

    def parameters(self, lmc: dict[str, Any] | None = None, tokens: int = 8, **more: Any) -> SamplingParams:
        """Greedy, with logprobs."""
        extra = {"kv_transfer_params": {"lmc": lmc}} if lmc is not None else None
        options = {"temperature": 0, "detokenize": False, "ignore_eos": True, "logprobs": 1, **more}
        return SamplingParams(max_tokens=tokens, extra_args=extra, **options)

    def ask(self, tokens: Sequence[int], lmc: dict[str, Any] | None = None, count: int = 8, **more: Any) -> Any:
        """One request, alone."""
        return self.ask_all([(tokens, lmc)], count, **more)[0]

    def ask_all(
        self, requests: Sequence[tuple[Sequence[int], dict[str, Any] | None]], count: int = 8, **more: Any
    ) -> Any:
        """Several at once; `salt` of cache_salt may be among the keywords."""
        salt = more.pop("salt", None)
        prompts = [
            {"prompt_token_ids": list(tokens), **({"cache_salt": salt} if salt else {})} for tokens, _ in requests
        ]
        return self.llm.generate(prompts, [self.parameters(lmc, count, **more) for _, lmc in requests], use_tqdm=False)

    def vanilla(self, tokens: Sequence[int], count: int = 8) -> Any:
        """What the engine answers without any cache; its caches are empty afterwards."""
        self.forget()
        out = self.ask(tokens, {"blend": False}, count)
        self.forget()
        return out

    def learn(self, documents: Sequence[Sequence[int]], **more: Any) -> None:
        """Keep documents' KV; the engine's own prefix cache is empty afterwards."""
        for document in documents:
            self.ask(document, {"learn": True}, 1, **more)
        self.settle()
        self.forget_prefixes()

    def settle(self) -> int:
        """Step until nothing is left to do: saves, learning."""
        steps, end = 0, time.monotonic() + 60
        while self.scheduler.has_requests() and (steps < 2000 or time.monotonic() < end):
            self.core.step_fn()
            steps += 1
        assert not self.scheduler.has_requests()
        return steps

    def forget_prefixes(self) -> None:
        """Empty the engine's own prefix cache."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def forget(self) -> None:
        """Empty all caches, ours too."""
        self.forget_prefixes()
        self.store.flush()
        self.lmc.forget_all()

    @property
    def lmc(self) -> Any:
        """lmc's scheduler."""
        return scheduler_of(self.connector)

    @property
    def setup(self) -> Any:
        """What lmc's scheduler was given at the start."""
        return setup_of(self.connector)

    @property
    def states(self) -> Any:
        """What lmc's scheduler knows of each request that has not ended."""
        from vllm_fakes import states_of

        return states_of(self.lmc)

    @property
    def is_windowed(self) -> bool:
        """Whether the engine keeps only a window of some layers."""
        return bool(self.setup.groups.windowed)

    def drop_backfills(self) -> None:
        """The engine has no idle step for what waits to be computed exactly."""
        from vllm_fakes import drop_backfills

        drop_backfills(self.lmc)

    @property
    def store(self) -> Any:
        """Where the chunks are."""
        return self.lmc.engine.store

    @property
    def tiers(self) -> Any:
        """The tiers below memory, which tests wrap."""
        from storage_fakes import tiers_of  # Programs of their own, which import this module, do not find it.

        return tiers_of(self.store)

    @property
    def memory(self) -> Any:
        """The state of the store, which has the slots of memory."""
        from storage_fakes import state_of

        return state_of(self.store)

    def document_keys(self, tokens: Sequence[int]) -> list[Any]:
        """Keys of a document's chunks."""
        engine = self.lmc.engine
        return engine.document_keys(tokens, engine.namespace(RecordKind.DOCUMENT))

    @property
    def numbers(self) -> dict[str, float]:
        """What lmc has counted."""
        return self.lmc.numbers()

    def check(self) -> None:
        """Nothing is held, nothing has leaked."""
        self.check_idle()
        assert self.store.check_integrity() == []

    def check_idle(self) -> None:
        """Nothing is held."""
        self.settle()
        self.store.flush()
        assert self.pool.get_num_free_blocks() == self.free_at_start
        assert self.store.held() == 0
        assert not self.lmc.pending.under_way
        assert not self.states

    def forget_pages(self) -> None:
        """Forget exact chunks, so that only documents can be reused."""
        self.store.flush()
        documents = {key for document in self.lmc.engine.known.list() for key in document.keys}
        for key in self.store.known_keys() - documents:
            self.store.forget(key)


def launch(model: Path, settings: dict[str, Any] | None = None, **options: Any) -> LLM:
    """A fresh engine; `transfer` among the options changes how the connector is named."""
    transfer = options.pop("transfer", {})
    return LLM(
        str(model),
        kv_transfer_config=KVTransferConfig(
            **{
                "kv_connector": "LMCConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {**SETTINGS, **(settings or {})},
                **transfer,
            }
        ),
        **{
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 2048,
            "dtype": "float32",
            "disable_log_stats": True,
            "block_size": BLOCK,
            "max_num_batched_tokens": 256,
            # The other backend of MLA, for CPUs with AMX, does not take float32.
            **({"attention_backend": "CPU_MLA"} if "kv_lora_rank" in FAMILIES.get(model.name, (None, {}))[1] else {}),
            **options,
        },
    )


@contextmanager
def engine(model: Path, settings: dict[str, Any] | None = None, **options: Any) -> Iterator[Lab]:
    """A fresh engine in this process."""
    llm = None
    try:
        llm = launch(model, settings, **options)
        yield Lab(llm)
    finally:  # also if it did not start: what it leaves would be the next engine's
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        ensure_kv_transfer_shutdown()  # the engine's own end leaves the worker's connector for the next engine
        cleanup_dist_env_and_memory()


def answer(out: Any) -> list[int]:
    """The tokens of an answer."""
    return list(out.outputs[0].token_ids)


def facts(out: Any) -> dict[str, Any]:
    """What lmc says of a request."""
    return (out.kv_transfer_params or {}).get("lmc", {})


def distance(one: Any, other: Any) -> float:
    """The largest difference of the chosen tokens' logprobs."""
    pairs = zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
    return max(abs(next(iter(a.values())).logprob - next(iter(b.values())).logprob) for a, b in pairs)


def agree(one: Any, other: Any) -> bool:
    """Whether two answers have the same tokens, and logprobs that differ by no more than float32 does."""
    return answer(one) == answer(other) and distance(one, other) <= SAME


def check_at_ratio_1(lab: Lab, strategy: str) -> None:
    """At ratio 1 a blend of `PROMPT` is the engine's own prefill; the control is that blind reuse is not."""
    wanted = lab.vanilla(PROMPT.tokens)
    lab.learn(DOCUMENTS)
    lab.forget_pages()
    blind = lab.ask(PROMPT.tokens, PROMPT.blend(strategy="none"))
    assert distance(blind, wanted) > 100 * SAME, "the control: stored KV is used"
    lab.forget_prefixes()
    lab.forget_pages()
    found = lab.ask(PROMPT.tokens, PROMPT.blend(strategy=strategy, ratio=1.0))
    assert facts(found)["reused_tokens"] == sum(map(len, DOCUMENTS))
    assert agree(found, wanted)
    lab.check()
