"""Quality of conversations in vLLM: later turns ask about other documents than the first one did. SmolLM2, float32.

    python bench/conversation.py [--conversations 20] [--rows FILE] [--load-policy always]

Six documents, all of them known, stand in a new order in the first turn, which asks about one of them. The second and
third turn ask about two others. The earlier answers are those of full prefill, so that all ways answer the same prompt:

    full        vLLM without lmc
    goes on     lmc with what its engine has, after a pause: the first turn was blended, and vLLM's own prefix cache has
                what lmc lets vLLM find of the turns before, and what lmc computes in idle steps
    at once     the same without a pause, so that the engine has no idle steps
    fresh       a blend of the whole prompt: the engine's prefix cache is emptied before
    blind       blind reuse (strategy `none`) of the whole prompt, likewise

What is measured of each way and turn, as means over conversations; the answer is full prefill's, of up to 16 tokens,
and given to all ways (teacher forcing):

    kl          KL(full ‖ way) in nats over the answer's tokens, of the 500 tokens that are likeliest in full prefill
                and all others together
    kl_first    the same of the first token only
    closed      1 − KL of the way / KL of blind reuse, and the interval that holds 90 % of 1000 resamplings
    first       whether the likeliest first token is full prefill's
    agreement8, agreement16   how many of the first 8 and 16 tokens come before the first that differs
    cached      tokens of the prompt that were not computed as vLLM counts them: its own cache, and what lmc reused
    reused      tokens of documents that were taken from lmc's store in this turn
    blended     share of the turns in which there were such tokens: 1 for `goes on` means that it blends anew every time
    ttft        median seconds
"""

import json
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from chat_tokens import SMALL, SMOLLM2, ChatTokens
from common import closing_line, parser
from engine import Engine
from quality.rows import closed, interval

from lmc.demo.questions import TOP, Question
from lmc.demo.random_model import machine
from lmc.keys import common_prefix

FULL, GOES_ON, AT_ONCE, FRESH, BLIND = "full", "goes on", "at once", "fresh", "blind"
LMC_WAYS: dict[str, dict[str, Any]] = {GOES_ON: {}, AT_ONCE: {}, FRESH: {}, BLIND: {"strategy": "none"}}
TURNS, TOKENS, LIKELIEST, SEED = 3, 16, 500, 11
SEVERAL = ("kl", "kl_first", "first", "agreement8", "agreement16", "cached", "reused", "blended")
ROOM = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "skip_tokenizer_init": False,
    "max_logprobs": LIKELIEST,
    "logits_processors": ["forced:Forced"],
}
Predictions = Sequence[Mapping[int, float]]  # logprobs of the likeliest tokens, for each token of an answer


def divergence(full: Mapping[int, float], way: Mapping[int, float], wanted: int) -> float:
    """Return KL(full ‖ way) in nats over the tokens whose logprobs are known of `full`, and all others together.

    A token that is not among the likeliest of `way` counts as the least likely of these. vLLM adds the logprob of the
    `wanted` token to the likeliest ones, which is left out if it is far below them.
    """
    least = min((logprob for token, logprob in way.items() if token != wanted), default=min(way.values()))
    pairs = [(math.exp(logprob), math.exp(way.get(token, least))) for token, logprob in full.items()]
    rest = [max(1e-9, 1 - sum(side)) for side in zip(*pairs, strict=True)]
    return sum(p * math.log(p / q) for p, q in [*pairs, (rest[0], rest[1])] if p > 0)


def compared(full: Predictions, way: Predictions, answer: Sequence[int]) -> dict[str, float]:
    """Compare a way's predictions along an answer with those of full prefill, whose answer it is."""
    kls = [divergence(*one) for one in zip(full, way, answer, strict=True)]
    likeliest = [max(found, key=lambda token: found[token]) for found in way]
    same = common_prefix(likeliest, answer)
    agreement = {f"agreement{count}": min(same, count) / min(len(answer), count) for count in (TOKENS // 2, TOKENS)}
    return {"kl": fmean(kls), "kl_first": kls[0], "first": float(same > 0), **agreement}


class Lab:
    """Both engines, and the documents that lmc has learned."""

    def __init__(self, chats: ChatTokens, load_policy: str) -> None:
        self.chats, self._learned = chats, set[str]()
        self._plain = Engine(chats.path, lmc=None, **ROOM)
        self._ours = Engine(chats.path, lmc={"load_policy": load_policy, "blend_min_tokens": 0}, **ROOM)

    def measure(self, documents: Sequence[str], questions: Sequence[Question]) -> dict[str, Any]:
        """Return what was measured of the turns of one conversation, by turn and way."""
        for text in documents:
            if text not in self._learned:
                self._ours.ask(self.chats.document(text), {"learn": True})
                self._learned.add(text)
        prompts, answers, full = self._in_full(documents, questions)
        later: dict[str, Any] = {}
        for turn in range(1, len(prompts)):
            ways = {FULL: full[turn]}
            for way in (FRESH, BLIND):
                self._ours.forget_prefixes()
                ways[way] = self._forced(self._ours, prompts[turn], answers[turn], LMC_WAYS[way])
            later[f"turn {turn + 1}"] = ways
        for way in (AT_ONCE, GOES_ON):
            self._ours.forget_prefixes()
            for turn, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                said = self._forced(self._ours, prompt, answer, LMC_WAYS[way])
                if way == GOES_ON:
                    self._ours.settle()
                if turn:
                    later[f"turn {turn + 1}"][way] = said
        return {
            turn: {way: self._row(said, ways[FULL], answers[number + 1]) for way, said in ways.items()}
            for number, (turn, ways) in enumerate(later.items())
        }

    def close(self) -> None:
        """End both processes."""
        self._plain.close()
        self._ours.close()

    def _in_full(
        self, documents: Sequence[str], questions: Sequence[Question]
    ) -> tuple[list[list[int]], list[list[int]], list[dict[str, Any]]]:
        """Return the prompts of all turns, the answers of full prefill, and what it said."""
        prompts, answers, full = list[list[int]](), list[list[int]](), list[dict[str, Any]]()
        for turn, question in enumerate(questions):
            if turn:
                prompt = [*prompts[-1], *answers[-1], *self.chats.next(question.question, question.lead)]
            else:
                prompt = self.chats.first(documents, question.question, question.lead)
            self._plain.forget_prefixes()
            (said,) = self._plain.serve([prompt], TOKENS, logprobs=LIKELIEST)["answers"]
            prompts.append(prompt)
            answers.append(self._up_to_the_end(said["tokens"]))
            full.append(said)
        return prompts, answers, full

    def _up_to_the_end(self, tokens: Sequence[int]) -> list[int]:
        """Return an answer without the tokens that vLLM generates after its end."""
        end = next((at for at, token in enumerate(tokens) if token in self.chats.special), len(tokens))
        return list(tokens[: max(end, 1)])

    def _forced(
        self, engine: Engine, prompt: Sequence[int], answer: Sequence[int], lmc: dict[str, Any]
    ) -> dict[str, Any]:
        extra = {"forced": list(answer)}
        served = engine.serve([prompt], len(answer), lmc or None, logprobs=LIKELIEST, extra_args=extra)
        said: dict[str, Any] = served["answers"][0]
        assert said["tokens"] == list(answer), "a way did not answer what it was told to"
        return said

    def _row(self, said: Mapping[str, Any], full: Mapping[str, Any], answer: Sequence[int]) -> dict[str, float]:
        count, reused = len(answer), said["facts"].get("reused_tokens", 0)
        return compared(full["logprobs"][:count], said["logprobs"][:count], answer) | {
            "cached": said["cached"],
            "reused": reused,
            "blended": float(reused > 0),
            "ttft": said["ttft"],
        }


def conversations(chats: ChatTokens, count: int) -> list[tuple[list[str], list[Question]]]:
    """Return documents in a new order, and questions about three different ones of them."""
    draw, collection = random.Random(SEED), chats.collection
    asked = [one for one in collection.questions if one.answer is not None and one.kind in ("one passage", "self")]
    found = []
    for _ in range(count):
        questions: list[Question] = []
        for question in draw.sample(asked, len(asked)):
            if len(questions) < TURNS and question.document not in [one.document for one in questions]:
                questions.append(question)
        about = [str(one.document) for one in questions]
        others = draw.sample(sorted(collection.documents.keys() - set(about)), TOP - TURNS)
        names = draw.sample([*about, *others], TOP)
        found.append(([collection.documents[name] for name in names], questions))
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means of each turn and way over conversations."""
    found: dict[str, Any] = {}
    for turn in rows[0]:
        ways = found[turn] = defaultdict[str, Any](dict)
        for way in rows[0][turn]:
            measured = [row[turn][way] for row in rows]
            ways[way] = {name: round(fmean(one[name] for one in measured), 4) for name in SEVERAL}
            ways[way]["ttft"] = round(median(one["ttft"] for one in measured), 4)
            if way not in (FULL, BLIND):
                gaps = [{"ways": {key: row[turn][key] for key in (way, BLIND)}} for row in rows]
                pairs = [(one["ways"][way]["kl"], one["ways"][BLIND]["kl"]) for one in gaps]
                ways[way] |= {"closed": round(closed(pairs), 3), "interval": interval([gaps], way)}
        found[turn] = dict(ways)
    return found


def main() -> None:
    arguments = parser(__doc__, "conversation")
    arguments.add_argument("--model", choices=(SMALL, SMOLLM2), default=SMOLLM2)
    arguments.add_argument("--conversations", type=int, default=20)
    arguments.add_argument("--load-policy", choices=("auto", "always"), default="always")
    arguments.add_argument("--rows", type=Path, help="write what was measured of each conversation, as lines of JSON")
    options = arguments.parse_args()
    chats = ChatTokens.of(options.model)
    lab, rows = Lab(chats, options.load_policy), list[dict[str, Any]]()
    print(machine())
    try:
        for documents, questions in conversations(chats, options.conversations):
            rows.append(lab.measure(documents, questions))
            if options.rows:
                options.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
            short = {turn: {way: round(one["kl"], 3) for way, one in ways.items()} for turn, ways in rows[-1].items()}
            print(f"{len(rows)}: KL {short}", flush=True)
    finally:
        lab.close()
    turns = summary(rows)
    for turn, ways in turns.items():
        print(turn)
        for way, numbers in ways.items():
            print(f"  {way:8}  " + "  ".join(f"{name} {value}" for name, value in numbers.items()))
    result = {"bench": "conversation", "model": options.model, "conversations": len(rows), "turns": turns}
    closing_line(result, "conversation" if options.keep else None)


if __name__ == "__main__":
    main()
