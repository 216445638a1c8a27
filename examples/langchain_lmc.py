"""RAG with LangChain: a retriever, a prompt that separates the documents for lmc, and a chat model.

    lmc learn DOCUMENTS --url http://localhost:8000        # once, so that first requests are also fast
    python examples/langchain_lmc.py DOCUMENTS "QUESTION" [http://localhost:8000]

DOCUMENTS is a directory of .txt files. Needs lmc, `pip install langchain-openai bm25s`, and the server of
serve_vllm.md. With a retriever of your own, only `prompt` is new.
"""

import os
import sys
from pathlib import Path
from typing import Any

import bm25s
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI
from openai import OpenAI, OpenAIError

from lmc.rag import messages

TOP = 6  # documents of a prompt


class BM25(BaseRetriever):
    """Finds documents by their words."""

    texts: list[str]
    index: Any

    @classmethod
    def of(cls, texts: list[str]) -> "BM25":
        """Return a retriever over texts."""
        index = bm25s.BM25()
        index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
        return cls(texts=texts, index=index)

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        words = bm25s.tokenize(query, show_progress=False)
        ranked, _ = self.index.retrieve(words, k=min(TOP, len(self.texts)), show_progress=False)
        return [Document(self.texts[i]) for i in ranked[0]]


def prompt(inputs: dict[str, Any]) -> list[dict[str, str]]:
    texts = [document.page_content for document in inputs["documents"]]
    return messages("Answer from the documents.", texts, inputs["question"], intro="Here they are.")


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder, question, url = [*sys.argv[1:], "http://localhost:8000"][:3]
    key = os.environ.get("OPENAI_API_KEY", "none")
    texts = [path.read_text() for path in sorted(Path(folder).glob("*.txt"))]
    if not texts:
        sys.exit(f"{folder} has no .txt files: use a directory of text files")
    retriever = BM25.of(texts)
    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        model=OpenAI(base_url=f"{url}/v1", api_key=key).models.list().data[0].id,
        max_tokens=64,
        temperature=0,
    )
    chain = {"documents": retriever, "question": RunnablePassthrough()} | RunnableLambda(prompt) | model
    answer = chain.invoke(question)
    print(answer.content)
    usage = answer.usage_metadata or {}
    cached = usage.get("input_token_details", {}).get("cache_read", 0)
    print(f"{cached} of {usage.get('input_tokens')} prompt tokens came from the cache")


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:
        sys.exit(f"the request failed: {error} Is the server running at this address?")
