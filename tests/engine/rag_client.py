"""Asks a vLLM server with the prompts that RAG libraries build. Runs in an environment that has them, without lmc.

python rag_client.py URL DIRECTORY      # prints for each application its reused and its documents' tokens, as JSON
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from haystack.components.builders import ChatPromptBuilder
from haystack.dataclasses import ChatMessage
from haystack.dataclasses import Document as HaystackDocument
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from llama_index.core.prompts.chat_prompts import CHAT_TEXT_QA_PROMPT
from llama_index.core.schema import MetadataMode, TextNode
from openai import OpenAI

QUESTION, IN_PROMPT, PROMPTS = "What happens if the temperature rises?", 6, 3
Chat = list[dict[str, Any]]


def langchain(texts: list[str]) -> Chat:
    made: list[Any] = []
    template = [("system", "Use the following pieces of context to answer.\n\n{context}"), ("human", "{input}")]
    model = RunnableLambda(lambda prompt: made.append(prompt) or "answer")
    chain = create_stuff_documents_chain(model, ChatPromptTemplate.from_messages(template))
    chain.invoke({"context": [Document(text) for text in texts], "input": QUESTION})
    roles = {"system": "system", "human": "user"}
    return [{"role": roles[message.type], "content": message.content} for message in made[0].to_messages()]


def llama_index(texts: list[str]) -> Chat:
    nodes = [TextNode(text=text, metadata={"file_name": f"{i}.txt"}) for i, text in enumerate(texts)]
    context = "\n\n".join(node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes)
    messages = CHAT_TEXT_QA_PROMPT.format_messages(context_str=context, query_str=QUESTION)
    return [{"role": message.role.value, "content": message.content} for message in messages]


def haystack(texts: list[str]) -> Chat:
    template = (
        "Given the following information, answer the question.\n\nContext:\n{% for document in documents %}\n"
        "    {{ document.content }}\n{% endfor %}\n\nQuestion: {{question}}\nAnswer:"
    )
    builder = ChatPromptBuilder(template=[ChatMessage.from_user(template)], required_variables="*")
    made = builder.run(documents=[HaystackDocument(content=text) for text in texts], question=QUESTION)
    return [{"role": "user", "content": message.text} for message in made["prompt"]]


def open_webui(texts: list[str]) -> Chat:
    sources = "\n".join(f'<source id="{i}" name="{i}.txt">{text}</source>' for i, text in enumerate(texts, 1))
    system = f"### Task:\nRespond to the user query using the provided context.\n\n<context>\n{sources}\n</context>"
    return [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]


def anything_llm(texts: list[str]) -> Chat:
    headed = [
        f"<document_metadata>\nsourceDocument: {i}.txt\n</document_metadata>\n\n{text}" for i, text in enumerate(texts)
    ]
    context = "".join(f"[CONTEXT {i}]:\n{text}\n[END CONTEXT {i}]\n\n" for i, text in enumerate(headed))
    system = f"Answer from the context alone.\nContext:\n{context}"
    return [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]


def dify(texts: list[str]) -> Chat:
    context = "\n".join(texts)
    system = f"What you know is in the tags.\n\n<context>\n{context}\n</context>\n\nAnswer in the user's language.\n\n"
    return [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]


def ragflow(texts: list[str]) -> Chat:
    chunks = [f"\nID: {i}\n├── Title: {i}.txt\n└── Content:\n{text}" for i, text in enumerate(texts)]
    knowledge = "\n------\n" + "\n\n------\n\n".join(chunks)
    system = f"Answer from the knowledge base.\nHere it is:\n{knowledge}\nThis was the knowledge base."
    return [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]


APPLICATIONS: list[Callable[[list[str]], Chat]] = [
    *(langchain, llama_index, haystack),
    # These have no library that builds a prompt. They are written as their servers write them.
    *(open_webui, anything_llm, dify, ragflow),
]


def main() -> None:
    url, folder = sys.argv[1:]
    texts = [path.read_text().strip() for path in sorted(Path(folder).glob("*.txt"))]
    client, dice = OpenAI(base_url=f"{url}/v1", api_key="none"), random.Random(0)
    model = client.models.list().data[0].id

    def tokens(text: str) -> int:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return int(httpx.post(f"{url}/tokenize", json=body, timeout=60).json()["count"])

    sizes = {text: tokens(text) for text in texts}
    found: dict[str, dict[str, int]] = {}
    for build in APPLICATIONS:
        reused = there = 0
        for _ in range(PROMPTS):
            chosen = dice.sample(texts, IN_PROMPT)
            answer = client.chat.completions.create(model=model, messages=build(chosen), max_tokens=1, temperature=0)
            reused += (answer.model_extra or {}).get("kv_transfer_params", {}).get("lmc", {}).get("reused_tokens", 0)
            there += sum(sizes[text] for text in chosen)
        found[build.__name__] = {"reused": reused, "tokens": there}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
