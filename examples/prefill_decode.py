"""Separates prefill and decode: one vLLM server computes a prompt, and another one answers, with the same `lmc serve`.

    python examples/prefill_decode.py "PROMPT" --prefill http://localhost:8000 --decode http://localhost:8001

Needs `pip install openai`, and the three servers of docs/service.md, section "Prefill and decode apart".
"""

import argparse
import os
import sys
import time
from pathlib import Path

from openai import OpenAI, OpenAIError


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compute a prompt in one vLLM server, and generate the answer in another."
    )
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("prompt", nargs="?", help="text of the prompt")
    text.add_argument("--file", type=Path, help="file with the prompt, instead of the text")
    parser.add_argument(
        "--prefill", metavar="URL", default="http://localhost:8000", help="server that computes prompts"
    )
    parser.add_argument(
        "--decode", metavar="URL", default="http://localhost:8001", help="server that generates answers"
    )
    parser.add_argument("--model", help="name of the model; by default the first model of the second server")
    parser.add_argument("--max-tokens", type=int, default=64, help="maximum number of tokens of the answer")
    return parser.parse_args()


def client(url: str) -> OpenAI:
    api = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    return OpenAI(base_url=api, api_key=os.environ.get("OPENAI_API_KEY", "none"))


def main() -> None:
    arguments = read_arguments()
    try:
        prompt = arguments.file.read_text() if arguments.file else arguments.prompt
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"cannot read the prompt: {error}")
    with client(arguments.prefill) as prefill, client(arguments.decode) as decode:
        model = arguments.model or decode.models.list().data[0].id

        # 1. One token has to be generated, so that the whole prompt is computed. Its KV is stored when this returns, or
        # a step of the engine later.
        prefill.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0)

        # 2. The second server finds the KV in the shared memory, and computes the tokens that are not stored yet.
        started, first, usage = time.perf_counter(), 0.0, None
        for part in decode.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=arguments.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            first = first or time.perf_counter() - started
            usage = part.usage or usage
            print("".join(choice.text for choice in part.choices), end="", flush=True)
    print(f"\n{first * 1e3:.0f} ms to the first token of the second server")
    if usage and usage.prompt_tokens_details:  # vllm serve --enable-prompt-tokens-details
        print(f"{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} tokens came from the cache")


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:
        sys.exit(f"a request failed: {error} Are both servers running at these addresses?")
