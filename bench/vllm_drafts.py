"""Speculative decoding after a blend: how many drafted tokens are accepted, and TTFT with an EAGLE head.

    python bench/vllm_drafts.py MODEL [--limit 20] [--rounds 5]

MODEL is the checkpoint's directory, as `lmc.demo.pretrained.smollm2` makes it. The model drafts for itself, so that
nearly all drafts are accepted after full prefill. `absent` is a blend that places zeros instead of the documents' KV of
the draft model, and corrects these. Prompts are real questions, as in `vllm_quality.py`.

    accepted    accepted tokens of the drafts of a step, at most `DRAFTED`; mean over all steps

TTFT is that of a random model of 144M weights with a random EAGLE head of one layer, for 2,064 tokens of documents in
new orders, against vLLM alone with the same head. Both engines run side by side and are asked in turn.
"""

import random
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from common import closing_line, parser
from engine import Engine, Host, in_folder, make_head, make_model, parameters, prompt_of, told, words
from quality.cases import REAL_TASK, SEED, collection_of, shuffled

from lmc.config.settings import Settings
from lmc.demo.questions import Prompts
from lmc.demo.random_model import machine

DRAFTED, ANSWER = 3, 48  # tokens drafted in a step, and tokens of an answer
DOCUMENTS, TOKENS = 8, 250
ROOM = {"max_model_len": 5120, "max_num_batched_tokens": 5120}
WAYS = ("blend", "absent")


class Drafting(Host):
    """An engine that counts the steps of an answer."""

    def accepted(self, tokens: list[int], lmc: dict[str, Any] | None, count: int) -> dict[str, Any]:
        """Return how many drafted tokens a step accepts after the first token, and the `facts` of lmc."""
        self.engine.add_request("drafting", {"prompt_token_ids": tokens}, parameters(lmc, count))
        steps, out = list[int](), None
        while self.engine.has_unfinished_requests():
            for out in self.engine.step():
                steps.append(len(out.outputs[0].token_ids))
        gained = [after - before - 1 for before, after in pairwise(steps[:-1])]
        return {"accepted": gained, "facts": told(out)["facts"]}

    def leave_out(self, absent: bool) -> dict[str, Any]:
        """With `absent`, blends write zeros where they would place the draft model's keys and values."""
        from lmc.connectors.vllm.worker.canvas import PagedCanvas

        if not hasattr(PagedCanvas, "places"):
            PagedCanvas.places = PagedCanvas._place  # type: ignore[attr-defined]

        def zeros(canvas: Any, layer: int, parts: Any, slots: Any, into: Any) -> None:
            canvas.places(layer, parts, slots, into)
            if absent and layer >= canvas.depth:
                for half in into[:2]:
                    half.zero_()

        PagedCanvas._place = zeros  # type: ignore[method-assign]
        return {}


def acceptance(model: str, limit: int) -> dict[str, float]:
    """Return the mean number of accepted tokens of a step, by way."""
    from transformers import AutoTokenizer

    tokenizer, collection = AutoTokenizer.from_pretrained(model), collection_of(REAL_TASK)
    prompts = Prompts(collection, tokenizer, Settings().blend_special_str)
    itself = {"method": "draft_model", "model": model, "num_speculative_tokens": DRAFTED}
    found: dict[str, list[int]] = {"full": [], **{way: [] for way in WAYS}}
    options = {**ROOM, "skip_tokenizer_init": False, "speculative_config": itself}
    with (
        Engine(model, lmc=None, host=Drafting, **options) as plain,
        Engine(model, lmc={"blend_min_tokens": 0}, host=Drafting, **options) as ours,
    ):
        learned: set[str] = set()
        for question in shuffled(collection)[:limit]:
            example = prompts.example(question, f"{SEED} {question.question}")
            for name in set(example.order) - learned:
                ours.ask(prompts.tokens[name], {"learn": True})
            learned.update(example.order)
            plain.forget_prefixes()
            found["full"] += plain.do("accepted", example.prompt, None, ANSWER)["accepted"]
            for way in WAYS:
                ours.forget_prefixes()
                ours.do("leave_out", way == "absent")
                answer = ours.do("accepted", example.prompt, {}, ANSWER)
                assert answer["facts"].get("reused_tokens"), answer
                found[way] += answer["accepted"]
            print(question.question, {way: round(fmean(one), 3) for way, one in found.items()}, flush=True)
    return {way: round(fmean(one), 3) for way, one in found.items()}


def ttft(rounds: int) -> dict[str, float]:
    """Return the median seconds to the first token, of vLLM alone and of a blend, and how many times faster it is."""
    draw, documents = random.Random(SEED), [words(TOKENS, number) for number in range(DOCUMENTS)]
    seconds: dict[str, list[float]] = {"full": [], "blend": []}
    with in_folder() as folder:
        model = make_model(folder)
        head = {"method": "eagle", "model": make_head(model, folder), "num_speculative_tokens": DRAFTED}
        with (
            Engine(model, lmc=None, speculative_config=head) as plain,
            Engine(model, lmc={}, speculative_config=head) as ours,
        ):
            for document in documents:
                ours.ask(document, {"learn": True})
            for number in range(rounds + 1):
                prompt, spans = prompt_of(draw.sample(documents, DOCUMENTS), number)
                plain.forget_prefixes()
                ours.forget_prefixes()
                times = plain.ask(prompt)["seconds"], ours.ask(prompt, {"documents": spans})["seconds"]
                for way, took in zip(seconds, times, strict=True):
                    seconds[way] += [took] if number else []  # The first round warms up.
    middle = {way: round(median(one), 4) for way, one in seconds.items()}
    return {**middle, "times": round(middle["full"] / middle["blend"], 2)}


def main() -> None:
    arguments = parser(__doc__, "vllm_drafts")
    arguments.add_argument("model")
    arguments.add_argument("--limit", type=int, default=20, help="questions")
    arguments.add_argument("--rounds", type=int, default=5, help="prompts whose TTFT is measured")
    options = arguments.parse_args()
    print(machine())
    result = {
        "bench": "vllm_drafts",
        "accepted": acceptance(options.model, options.limit),
        "ttft": ttft(options.rounds),
    }
    closing_line(result, "vllm_drafts" if options.keep else None)


if __name__ == "__main__":
    main()
