"""RAG with LangChain as anybody writes it: a retriever, a prompt, and a chat model. Nothing in it knows of lmc.

    lmc learn DOCUMENTS --url http://localhost:8000        # once, so that first requests are also fast
    python examples/langchain_lmc.py DOCUMENTS "QUESTION" [http://localhost:8000]

DOCUMENTS is a directory of .txt files. Needs `pip install langchain-openai bm25s`, and the server of serve_vllm.md,
which finds the documents that it has learned in the prompts of this program.
"""

import os
import sys
from pathlib import Path
from typing import Any

import bm25s
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_openai import ChatOpenAI
from openai import OpenAI, OpenAIError

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


PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the context.\n\n{context}"), ("human", "{question}")],
)


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder, question, url = [*sys.argv[1:], "http://localhost:8000"][:3]
    api = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    key = os.environ.get("OPENAI_API_KEY", "none")
    texts = [path.read_text() for path in sorted(Path(folder).glob("*.txt"))]
    if not texts:
        sys.exit(f"{folder} has no .txt files: use a directory of text files")
    retriever = BM25.of(texts)
    model = ChatOpenAI(
        base_url=api,
        api_key=key,
        model=OpenAI(base_url=api, api_key=key).models.list().data[0].id,
        max_tokens=64,
        temperature=0,
    )
    chain = {"context": retriever | joined, "question": RunnablePassthrough()} | PROMPT | model
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
