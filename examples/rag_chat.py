"""RAG through a chat API: BM25 finds the documents, and `lmc.rag.messages` separates them for lmc.

    lmc learn DOCUMENTS --url http://localhost:8000        # once, so that first requests are also fast
    python examples/rag_chat.py DOCUMENTS "QUESTION" [http://localhost:8000]

DOCUMENTS is a directory of .txt files. Needs lmc, `pip install openai bm25s`, and the server of serve_vllm.md.
"""

import os
import sys
from pathlib import Path

import bm25s
from openai import OpenAI, OpenAIError

from lmc.rag import messages

TOP = 6  # documents of a prompt

if len(sys.argv) < 3:
    sys.exit(__doc__)
folder, question, url = [*sys.argv[1:], "http://localhost:8000"][:3]
api = f"{url.rstrip('/').removesuffix('/v1')}/v1"
texts = [path.read_text() for path in sorted(Path(folder).glob("*.txt"))]
if not texts:
    sys.exit(f"{folder} has no .txt files: use a directory of text files")
index = bm25s.BM25()
index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
query = bm25s.tokenize(question, show_progress=False)
ranked, _ = index.retrieve(query, k=min(TOP, len(texts)), show_progress=False)
chat = messages("Answer from the documents.", [texts[i] for i in ranked[0]], question, intro="Here they are.")
try:
    with OpenAI(base_url=api, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(model=model, messages=chat, max_tokens=64, temperature=0)
except OpenAIError as error:
    sys.exit(f"the request failed: {error} Is the server running at this address?")
print(answer.choices[0].message.content)
print(getattr(answer, "kv_transfer_params", None) or "lmc reported no reuse")
