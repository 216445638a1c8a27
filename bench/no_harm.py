"""vLLM with lmc against vLLM without it: TTFT and throughput of ten kinds of traffic. One thread, float32.

    python bench/no_harm.py [--model small|smollm2|both] [--workloads conversation,beam] [--starts 5] [--repeats 3]
    python bench/no_harm.py --model small --starts 1 --repeats 1 --seconds 0      # does it run? a few minutes

lmc has the settings that a user gets who enables blending; vLLM's own prefix cache is on in both engines. Both run side
by side in processes of their own, and are asked in turn, so that a machine that is slower for a while is slower for
both. Every ratio is 1 if both are equally fast, and larger if lmc is faster: TTFT of vLLM alone over that with lmc,
seconds until the last token likewise (throughput). A ratio is that of one round, in which both were asked shortly after
each other. The result is the median over the starts of medians over the rounds of a start, and `worst` is the smallest
one. A workload has at least `--repeats` rounds in each start, and as many as `--seconds` allow. `--twice` starts a
second engine without lmc, and shows as `vllm_twice` what the machine's own noise does to the same ratios.

Six documents of a prompt are known, i.e. learned before, where nothing else is said. Engines are cold, i.e. without
prefixes of their own, at the beginning of each workload:

    orders          known documents in a new order, and a question
    conversation    the same, and five more questions after it; counted are turns 2 to 6, and each begins with
                    the turns before it, and with the engine's own answers
    long_0.3 …      known documents in a new order, and instructions after them of 0.3, 1 and 2 times their length
    one             one known document, which is longer, and a question
    nothing         a new text without documents
    cached          the very prompt that the engine was asked before
    unknown         documents that are new, and never come again; they are learned when the response is finished, and
                    `behind_s` says for how long, which a request that does not come at once does not notice
    beam            known documents in a new order; beam search of width 4, 6 steps (time only)
    n4              known documents in a new order; four sampled answers
    burst           16 requests at once: six like `orders`, four like `nothing`, three like `one`, three like `unknown`

Three more are shown, and not counted in `worst`:

    never_idle      four conversations at once, whose turns follow each other without a pause; all turns are counted
    other_question  documents in an order that the engine was asked before, and another question
    unknown_burst   four requests like `unknown`, each sent when the one before is finished, so that learning is in the
                    way of the next one
"""

import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from chat_tokens import SMALL, SMOLLM2, ChatTokens
from common import closing_line, parser
from engine import Engine

from lmc.demo.random_model import machine

PLAIN, LMC, AGAIN = "plain", "lmc", "plain again"
DOCUMENTS, KNOWN = 6, 12  # of a prompt, and of those that are known
OTHERS = 8  # documents of whose words new texts are made
LONG_PASSAGES, LONG_KNOWN = 4, 6  # passages that make a longer document, and how many such documents are known
MOST_ROUNDS = 100  # of a workload in one start
COUNT, ANSWER, TURNS = 16, 32, 6  # tokens of an answer, of one in a conversation, and turns of a conversation
AT_ONCE = 4  # conversations of `never_idle`
WIDTH, STEPS = 4, 6  # of a beam search
TTFT, SECONDS = "ttft", "seconds"
RATIOS = {TTFT: "ttft", SECONDS: "throughput"}  # what is measured in seconds, and how its ratio is called
COUNTED = (
    "requests",
    "blends",
    "loads",
    "loads_skipped",
    "blends_skipped",
    "blends_continued",
    "backfills",
    "refused",
    "documents_learned",
)  # of lmc's own numbers
ROOM = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "skip_tokenizer_init": False}
DEFAULTS = {"load_policy": "auto", "load_deadline": 2.0}  # what `engine.SETTINGS` has otherwise
# The C library gives large tensors back to the kernel after every operation; see `vllm_overhead.py`.
os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}

Measured = dict[str, Any]  # seconds of one engine in one round of a workload: `ttft`, `seconds`, and more to show
Round = dict[str, Measured]  # of each engine
Work = Callable[[Engine], Measured]


class Traffic:
    """Prompts in which documents are known or new, and which no engine has seen."""

    def __init__(self, chats: ChatTokens, seed: int) -> None:
        self.draw, self._chats = random.Random(seed), chats
        texts = random.Random(0).sample(sorted(chats.collection.documents.values()), KNOWN + OTHERS)
        self._known, self._others = texts[:KNOWN], texts[KNOWN:]
        parts = [random.Random(i).sample(texts, LONG_PASSAGES) for i in range(LONG_KNOWN)]
        self._long = ["\n".join(chosen) for chosen in parts]

    def documents(self) -> list[list[int]]:
        """Return the documents to learn ahead."""
        return [self._chats.document(text) for text in [*self._known, *self._long]]

    def question(self) -> str:
        """Return a question of the collection."""
        return self.draw.choice(self._chats.collection.questions).question

    def known(self, behind: float = 0.0) -> list[int]:
        """Return a prompt of known documents in a new order, with instructions of `behind` times their length."""
        chosen = self.draw.sample(self._known, DOCUMENTS)
        words = sum(len(text.split()) for text in chosen)
        return self._chats.first(chosen, f"{self._new_text(round(behind * words))} {self.question()}")

    def same_documents(self, count: int) -> list[list[int]]:
        """Return prompts that differ in their questions only."""
        chosen = self.draw.sample(self._known, DOCUMENTS)
        asked = self.draw.sample(self._chats.collection.questions, count)
        return [self._chats.first(chosen, one.question) for one in asked]

    def one(self) -> list[int]:
        """Return a prompt of one known document, which is longer."""
        return self._chats.first([self.draw.choice(self._long)], self.question())

    def unknown(self) -> list[int]:
        """Return a prompt of new documents."""
        texts = self.draw.sample([*self._known, *self._others], DOCUMENTS)
        return self._chats.first([self._shuffled(text) for text in texts], self.question())

    def nothing(self) -> list[int]:
        """Return a new text as long as a prompt of known documents."""
        words = sum(len(text.split()) for text in self.draw.sample(self._known, DOCUMENTS))
        return self._chats.plain(f"{self._new_text(words)} {self.question()}")

    def next(self) -> list[int]:
        """Return what follows an answer in a conversation: a question, up to the next answer."""
        return self._chats.next(self.question())

    @property
    def no_end(self) -> dict[int, float]:
        """The bias with which answers have no special token and no separator, and so the same length in all engines."""
        separators = {token for variant in self._chats.markers.separators for token in variant}
        return dict.fromkeys(sorted(self._chats.special | separators), -100.0)

    def _new_text(self, words: int) -> str:
        texts: list[str] = []
        while len(texts) < words:
            texts += self._shuffled(self.draw.choice(self._others)).split()
        return " ".join(texts[:words])

    def _shuffled(self, text: str) -> str:
        words = text.split()
        return " ".join(self.draw.sample(words, len(words)))


class Bench:
    """The engines of one start and their traffic. One engine has lmc and knows documents."""

    def __init__(self, chats: ChatTokens, names: Sequence[str], seed: int) -> None:
        """Start an engine for each name."""
        self.traffic = Traffic(chats, seed)
        self.engines = {name: Engine(chats.path, lmc=DEFAULTS if name == LMC else None, **ROOM) for name in names}
        for document in self.traffic.documents():
            said = self.engines[LMC].ask(document, {"learn": True})
            assert said["facts"]["learned"], said["facts"]

    def both(self, work: Work) -> Round:
        """Do the same with each engine, in a random order."""
        names = self.traffic.draw.sample(list(self.engines), len(self.engines))
        return {name: work(self.engines[name]) for name in names}

    def close(self) -> None:
        """End all processes."""
        for engine in self.engines.values():
            engine.close()


# -- workloads ---------------------------------------------------------------------------------------------------------


def served(engine: Engine, prompts: Sequence[Sequence[int]], **sampling: Any) -> Measured:
    """Serve requests at once: their mean TTFT, and the seconds for all."""
    said = engine.serve(prompts, COUNT, **sampling)
    return {TTFT: fmean(one[TTFT] for one in said["answers"]), SECONDS: said["seconds"]}


def cold(engine: Engine, prompts: Sequence[Sequence[int]], **sampling: Any) -> Measured:
    """The same with an engine that has no prefixes; `behind_s` is what it does when it has responded."""
    engine.forget_prefixes()
    found = served(engine, prompts, **sampling)
    return found | {"behind_s": engine.settle()}


def conversation(bench: Bench) -> Round:
    """Six turns, read by a user; TTFT and seconds are of those after the first."""

    def work(turns: list[Measured]) -> Measured:
        later = turns[1:]
        return {
            TTFT: fmean(turn[TTFT] for turn in later),
            SECONDS: sum(turn[SECONDS] for turn in later),
            "turns_ttft": [turn[TTFT] for turn in turns],
            "turns_cached": [turn["cached"] for turn in turns],
        }

    return conversations(bench, 1, work, idle=True)


def never_idle(bench: Bench) -> Round:
    """Conversations at once, whose next turns are sent at once; TTFT and seconds are of all turns."""

    def work(turns: list[Measured]) -> Measured:
        return {TTFT: fmean(turn[TTFT] for turn in turns), SECONDS: sum(turn[SECONDS] for turn in turns)}

    return conversations(bench, AT_ONCE, work, idle=False)


def conversations(bench: Bench, count: int, measured: Callable[[list[Measured]], Measured], *, idle: bool) -> Round:
    """Have some conversations of six turns at once; `measured` gets what each turn took, in the mean over them."""
    traffic = bench.traffic
    starts = [traffic.known() for _ in range(count)]
    behind = [[traffic.next() for _ in range(count)] for _ in range(TURNS - 1)]

    def work(engine: Engine) -> Measured:
        engine.forget_prefixes()
        prompts, turns = starts, []
        for number in range(TURNS):
            said = engine.serve(prompts, ANSWER, logit_bias=traffic.no_end)
            answers = said["answers"]
            turn = {name: fmean(answer[name] for answer in answers) for name in (TTFT, "cached")}
            turns.append(turn | {SECONDS: said["seconds"]})
            if idle:
                engine.settle()  # A user reads the answer before the next turn.
            if number < len(behind):
                following = zip(prompts, answers, behind[number], strict=True)
                prompts = [[*prompt, *answer["tokens"], *question] for prompt, answer, question in following]
        return measured(turns)

    return bench.both(work)


def asked_before(bench: Bench, prompts: Sequence[Sequence[int]]) -> Round:
    """The first prompt, then all others alone; TTFT and seconds are those of the median of the others."""

    def work(engine: Engine) -> Measured:
        cold(engine, prompts[:1])
        found = []
        for prompt in prompts[1:]:
            found.append(served(engine, [prompt]))
            engine.settle()
        return {name: median(one[name] for one in found) for name in RATIOS}

    return bench.both(work)


def in_a_row(bench: Bench, prompts: Sequence[Sequence[int]]) -> Round:
    """Send requests one after another, each after the end of the previous one."""

    def work(engine: Engine) -> Measured:
        engine.forget_prefixes()
        started = time.perf_counter()
        found = [served(engine, [prompt])[TTFT] for prompt in prompts]
        seconds = time.perf_counter() - started
        return {TTFT: fmean(found), SECONDS: seconds, "behind_s": engine.settle()}

    return bench.both(work)


def searched(bench: Bench) -> Round:
    """Run a beam search. Only its total time is measured."""
    prompt = bench.traffic.known()

    def work(engine: Engine) -> Measured:
        engine.forget_prefixes()
        return {SECONDS: engine.beam_search(prompt, WIDTH, STEPS)}

    return bench.both(work)


def alone(prompt: Callable[[Traffic], list[int]], **sampling: Any) -> Callable[[Bench], Round]:
    """A workload of one request to a cold engine."""

    def run(bench: Bench) -> Round:
        prompts = [prompt(bench.traffic)]
        return bench.both(lambda engine: cold(engine, prompts, **sampling))

    return run


def burst(bench: Bench) -> Round:
    """Sixteen requests at once."""
    make = bench.traffic
    kinds = [make.known] * 6 + [make.nothing] * 4 + [make.one] * 3 + [make.unknown] * 3
    prompts = [kind() for kind in make.draw.sample(kinds, len(kinds))]
    return bench.both(lambda engine: cold(engine, prompts))


WORKLOADS: dict[str, Callable[[Bench], Round]] = {
    "orders": alone(Traffic.known),
    "conversation": conversation,
    "long_0.3": alone(lambda traffic: traffic.known(0.3)),
    "long_1": alone(lambda traffic: traffic.known(1)),
    "long_2": alone(lambda traffic: traffic.known(2)),
    "one": alone(Traffic.one),
    "nothing": alone(Traffic.nothing),
    "cached": lambda bench: asked_before(bench, [bench.traffic.known()] * 7),
    "unknown": alone(Traffic.unknown),
    "beam": searched,
    "n4": alone(Traffic.known, n=4, temperature=1.0, seed=0),
    "burst": burst,
}
SHOWN: dict[str, Callable[[Bench], Round]] = {
    "never_idle": never_idle,
    "other_question": lambda bench: asked_before(bench, bench.traffic.same_documents(4)),
    "unknown_burst": lambda bench: in_a_row(bench, [bench.traffic.unknown() for _ in range(4)]),
}
WARM_UP = ("orders", "nothing", "unknown", "n4")


# -- a start, and what follows from all --------------------------------------------------------------------------------


@dataclass
class Start:
    """What was measured with engines that were started once."""

    rounds: dict[str, list[Round]]  # by workload
    counts: dict[str, Counter[str]]  # by workload: what lmc has counted


def one_start(
    chats: ChatTokens, workloads: Sequence[str], repeats: int, seconds: float, names: Sequence[str], seed: int
) -> Start:
    """Measure with engines that are started for it."""
    bench, every = Bench(chats, names, seed), WORKLOADS | SHOWN
    found = Start(defaultdict(list), defaultdict(Counter))
    try:
        for name in WARM_UP:
            every[name](bench)
        for engine in bench.engines.values():
            engine.pin(0)  # All threads of lmc are there now. They stay where they are.
        used = dict.fromkeys(workloads, 0.0)  # seconds of each workload
        for number in range(MOST_ROUNDS):
            for name in workloads:
                if number >= repeats and used[name] * (number + 1) / number > seconds:
                    continue
                before, started = bench.engines[LMC].numbers(), time.perf_counter()
                found.rounds[name].append(every[name](bench))
                used[name] += time.perf_counter() - started
                after = bench.engines[LMC].numbers()
                took = {side: round(one.get(TTFT, one[SECONDS]), 3) for side, one in found.rounds[name][-1].items()}
                print(f"{name}: {took}", flush=True)
                found.counts[name].update({key: int(after.get(key, 0) - before.get(key, 0)) for key in COUNTED})
    finally:
        bench.close()
    return found


def summary(starts: Sequence[Start]) -> dict[str, Any]:
    """Return the numbers and ratios of each workload: medians over starts of medians over rounds."""
    return {name: _of_workload([start.rounds[name] for start in starts], name, starts) for name in starts[0].rounds}


def _of_workload(rounds: Sequence[Sequence[Round]], name: str, starts: Sequence[Start]) -> dict[str, Any]:
    sides = {side: [_middle(one, side) for one in rounds] for side in rounds[0][0]}
    found: dict[str, Any] = {}
    for what, called in RATIOS.items():
        if what not in sides[PLAIN][0]:
            continue
        ratios = [median(one[PLAIN][what] / one[LMC][what] for one in start) for start in rounds]
        found[called] = round(median(ratios), 3)
        found[f"{called}_of_starts"] = [round(min(ratios), 3), round(max(ratios), 3)]
        if AGAIN in sides:
            twice = [median(one[PLAIN][what] / one[AGAIN][what] for one in start) for start in rounds]
            found[f"{called}_of_vllm_twice"] = round(median(twice), 3)
    for side in (PLAIN, LMC):
        found[side] = {what: _over_starts([one[what] for one in sides[side]]) for what in sides[side][0]}
    turns = "turns_ttft"
    if turns in sides[PLAIN][0]:
        of_starts = [
            _median_of([[a / b for a, b in zip(one[PLAIN][turns], one[LMC][turns], strict=True)] for one in start])
            for start in rounds
        ]
        found["turns"] = [round(one, 3) for one in _median_of(of_starts)]
    counts = sum((start.counts[name] for start in starts), Counter[str]())
    return found | {"counts": {key: count for key, count in counts.items() if count}}


def _middle(rounds: Sequence[Round], side: str) -> Measured:
    """Return the medians of what was measured in the rounds of a start, of lists item by item."""
    return {what: _median_of([one[side][what] for one in rounds]) for what in rounds[0][side]}


def _median_of(values: Sequence[Any]) -> Any:
    if isinstance(values[0], list):
        return [median(one) for one in zip(*values, strict=True)]
    return median(values)


def _over_starts(values: Sequence[Any]) -> Any:
    found = _median_of(values)
    return [round(one, 4) for one in found] if isinstance(found, list) else round(found, 4)


def worst_of(by_workload: Mapping[str, Mapping[str, Any]], not_counted: Collection[str] = ()) -> tuple[float, str]:
    """Return the smallest ratio, and of what it is. Workloads count whose last word is not among `not_counted`."""
    ratios = [
        (found[called], f"{called} of {name}")
        for name, found in by_workload.items()
        for called in RATIOS.values()
        if called in found and name.split()[-1] not in not_counted
    ]
    return min(ratios)


def show(by_workload: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line for each workload, and one for the turns of conversations."""
    for name, found in by_workload.items():
        parts = []
        for what, called in RATIOS.items():
            if called in found:
                plain, ours = found[PLAIN][what], found[LMC][what]
                low, high = found[f"{called}_of_starts"]
                parts.append(f"{called} {found[called]:6.3f} [{low:.3f}, {high:.3f}] {plain:8.3f} s, lmc {ours:8.3f} s")
        print(f"{name:24} {'   '.join(parts)}   {found['counts']}")
        if "turns" in found:
            for side in (PLAIN, LMC):
                ttft, cached = found[side]["turns_ttft"], found[side]["turns_cached"]
                print(f"{'':24} TTFT by turn, {side}: {ttft}, cached {cached}")
            print(f"{'':24} ratio by turn: {found['turns']}")


def main() -> None:
    arguments = parser(__doc__, "no_harm")
    arguments.add_argument("--model", choices=(SMALL, SMOLLM2, "both"), default="both")
    arguments.add_argument("--workloads", default=",".join([*WORKLOADS, *SHOWN]))
    arguments.add_argument("--starts", type=int, default=5)
    arguments.add_argument("--repeats", type=int, default=3, help="rounds of each start, at least")
    arguments.add_argument("--seconds", type=float, default=8.0, help="for each workload of a start, if that is more")
    arguments.add_argument("--twice", action="store_true", help="a second engine without lmc, to show the noise")
    options = arguments.parse_args()
    workloads = options.workloads.split(",")
    if strange := set(workloads).difference(WORKLOADS, SHOWN):
        arguments.error(f"no workload {', '.join(sorted(strange))}: use {', '.join([*WORKLOADS, *SHOWN])}")
    names = [PLAIN, LMC, *([AGAIN] if options.twice else [])]
    print(machine())
    by_workload: dict[str, Any] = {}
    for model in (SMALL, SMOLLM2) if options.model == "both" else (options.model,):
        chats, starts = ChatTokens.of(model), list[Start]()
        for number in range(options.starts):
            starts.append(one_start(chats, workloads, options.repeats, options.seconds, names, number))
            print(f"\n{model}, start {number + 1}")
            show(summary(starts[-1:]))
        by_workload |= {f"{model} {name}": found for name, found in summary(starts).items()}
    print(f"\nmedians of {options.starts} starts")
    show(by_workload)
    worst, what = worst_of(by_workload, SHOWN if set(workloads) & set(WORKLOADS) else ())
    line = {
        "bench": "no_harm",
        "worst": worst,
        "worst_of": what,
        "starts": options.starts,
        "repeats": options.repeats,
        "seconds": options.seconds,
        "by_workload": by_workload,
    }
    name = f"no_harm_{SMOLLM2}" if options.model == SMOLLM2 else "no_harm"
    closing_line(line, name if options.keep else None)


if __name__ == "__main__":
    main()
