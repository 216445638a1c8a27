"""RAG with lmc and transformers: documents are prefilled once, and reused in every order and combination.

python examples/rag_transformers.py [MODEL] [DOCUMENTS]
"""

import sys
from pathlib import Path

from lmc.blend.segments import join
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.demo import SHIPPED
from lmc.errors import LmcError

model_name = sys.argv[1] if len(sys.argv) > 1 else SHIPPED / "model"
folder = Path(sys.argv[2]) if len(sys.argv) > 2 else SHIPPED / "documents"

try:
    # Settings come from LMC_* variables or a YAML file as well; values here override them.
    settings = Settings.load({"enable_blending": True, "max_local_cpu_size": 0.5, "local_disk": ".demo/rag"})
    cached, tokenizer = CachedModel.load(model_name, settings)
except LmcError as error:
    sys.exit(f"error: {error}")


def encode(text: str) -> list[int]:
    """Return the tokens of one part of a prompt. A document has the same tokens at every position."""
    return tokenizer.encode(text, add_special_tokens=False)


with cached:  # closing writes chunks that are only in memory to disk
    # 1. Once per document, ahead of time: prefill it alone and store its KV. Documents on disk are not computed
    # again.
    documents = [encode(path.read_text().strip()) for path in sorted(folder.glob("*.txt"))[:6]]
    if not documents:
        sys.exit(f"{folder} has no .txt files: use a directory of text files")
    new = sum(cached.learn(document) > 0 for document in documents)
    print(f"{len(documents)} documents, {new} of them prefilled now, the others were on disk")

    # 2. For each request: system text, documents in any order, question, with the separator between them.
    system = tokenizer.encode("this is the old register for the village and the land about it .")
    separator = encode(settings.blend_special_str)
    question = encode("at the abbey , owner of goose")
    for order in (documents, documents[::-1]):
        prompt = join(system, order, question, separator)

        # 3. "blend" reuses the documents and recomputes some of their tokens; "full" reuses nothing.
        for mode in ("full", "blend"):
            answer, report = cached.generate(prompt, mode, max_new_tokens=1, do_sample=False)
            print(
                f"{mode:>6}: {report.seconds * 1e3:6.1f} ms to the first token, "
                f"{report.reused} of {report.tokens} tokens reused, {report.charged_budget:.0%} of them recomputed "
                f"→ {tokenizer.decode(answer).strip()}"
            )
