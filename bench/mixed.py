"""Mixed traffic of a chat application for half an hour, with restarts: vLLM with lmc against vLLM without it.

    python bench/mixed.py [--model smollm2] [--minutes 30] [--restarts 4] [--pause 0.25] [--twice]

Every request goes to both engines, shortly after each other and in a random order. Its twin in vLLM without lmc says
how long it takes there. The result is, for each kind of request, how much longer it takes with lmc until the first and
until the last token: quotients of twins; the median and the 99th percentile are shown (1.05: 5 % slower).
`--twice` has a second engine without lmc, and shows what the machine's own noise does to the same quotients.

lmc has the settings of a user who enables blending and gives it a disk. It knows nothing at first. Between requests
there are pauses of `--pause` seconds on average, in which an engine may do what it has left to do. With SmolLM2 on two
cores, where requests take 2 to 7 s, the default is a server that is never idle. A restart ends all engines; lmc then
has what is on its disk. Kinds of requests:

    first           the first turn of a conversation: documents that the application has used before, and a question
    later           a further turn of one of the conversations that are open; they have six turns
    question        the documents of an earlier request in the same order, and another question
    instructions    documents, and instructions of the same length after them
    unknown         documents that never come again
    text            a long text without documents
    chat            a short question without documents
    together        three of the others at once
"""

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from chat_tokens import SMALL, SMOLLM2, ChatTokens
from common import closing_line, parser
from engine import Engine
from no_harm import AGAIN, ANSWER, COUNTED, DEFAULTS, LMC, PLAIN, ROOM, SECONDS, TTFT, TURNS, Traffic, served

from lmc.demo.random_model import machine

SHARES = {"first": 3, "later": 9, "question": 2, "instructions": 1, "unknown": 1, "text": 1, "chat": 3, "together": 2}
OPEN = 4  # conversations
LONGEST = ROOM["max_model_len"] - 2 * ANSWER  # tokens of a prompt

Prompts = dict[str, list[int]]  # what each engine is asked: later turns have the engine's own answers


class Conversation:
    """A conversation of each engine, with the same questions."""

    def __init__(self, prompt: list[int], names: Sequence[str]) -> None:
        self.prompts, self.turns = {name: list(prompt) for name in names}, 1

    def goes_on(self, said: dict[str, list[int]], question: list[int]) -> None:
        """Append each engine's answer, and the next question."""
        for name, prompt in self.prompts.items():
            prompt += [*said[name], *question]
        self.turns += 1


class Application:
    """Makes the requests."""

    def __init__(self, chats: ChatTokens, names: Sequence[str]) -> None:
        self.traffic, self._chats, self._names = Traffic(chats, 0), chats, names
        self.draw = self.traffic.draw
        self._open: list[Conversation] = []
        self._before: list[list[list[int]]] = []  # prompts with documents in an order that was used

    def restarted(self) -> None:
        """Forget what was asked. Conversations go on."""
        self._before.clear()

    def next(self) -> list[tuple[str, Prompts, Conversation | None]]:
        """Return the next requests, which are sent at once: their kinds, prompts and conversations."""
        (kind,) = self.draw.choices(list(SHARES), list(SHARES.values()))
        if kind != "together":
            return [self._request(kind)]
        kinds = self.draw.sample([one for one in SHARES if one not in ("together", "later", "first")], 3)
        return [("together", self._request(one)[1], None) for one in kinds]

    def answered(self, conversation: Conversation, said: dict[str, list[int]]) -> None:
        """Continue a conversation with its answers and the next question."""
        conversation.goes_on(said, self.traffic.next())
        ended = conversation.turns > TURNS or max(map(len, conversation.prompts.values())) > LONGEST
        if ended and conversation in self._open:
            self._open.remove(conversation)

    def _request(self, kind: str) -> tuple[str, Prompts, Conversation | None]:
        traffic = self.traffic
        if kind == "later" and self._open:
            conversation = self.draw.choice(self._open)
            return kind, conversation.prompts, conversation
        if kind == "question" and self._before:
            prompt = self._before[-1].pop()
            self._before = [prompts for prompts in self._before if prompts]
            return kind, self._same(prompt), None
        if kind in ("first", "later", "question"):
            first, *others = traffic.same_documents(4)
            self._before = [*self._before[-3:], others]
            conversation = Conversation(first, self._names)
            self._open = [*self._open[1 - OPEN :], conversation]
            return "first", conversation.prompts, conversation
        if kind == "chat":
            return kind, self._same(self._chats.plain(traffic.question())), None
        make = {"instructions": lambda: traffic.known(1), "unknown": traffic.unknown, "text": traffic.nothing}[kind]
        return kind, self._same(make()), None

    def _same(self, prompt: list[int]) -> Prompts:
        return dict.fromkeys(self._names, prompt)


def run(
    chats: ChatTokens, names: Sequence[str], minutes: float, restarts: int, pause_seconds: float, disk: str
) -> dict[str, Any]:
    """Return the quotients of each kind, and what lmc has counted."""
    application, counts = Application(chats, names), Counter[str]()
    twins: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(restarts + 1):
        engines = started(chats.path, names, disk)
        ends = time.monotonic() + minutes * 60 / (restarts + 1)
        while time.monotonic() < ends:
            requests = application.next()
            measured, answers = {}, dict[str, list[int]]()
            for name in application.draw.sample(names, len(names)):
                prompts = [prompts[name] for _, prompts, _ in requests]
                said = engines[name].serve(prompts, ANSWER, logit_bias=application.traffic.no_end)
                measured[name] = {
                    TTFT: [one[TTFT] for one in said["answers"]],
                    SECONDS: [one[SECONDS] for one in said["answers"]],
                }
                answers[name] = said["answers"][0]["tokens"]
            for number, (kind, _, conversation) in enumerate(requests):
                twins[kind].append({name: {what: one[what][number] for what in one} for name, one in measured.items()})
                if conversation is not None:
                    application.answered(conversation, answers)
            pause = application.draw.expovariate(1 / pause_seconds)
            for name in names:
                engines[name].settle(pause)
        counts.update({key: int(engines[LMC].numbers().get(key, 0)) for key in COUNTED})
        for engine in engines.values():
            engine.close()
        application.restarted()
    return {"by_kind": {kind: quotients(twins[kind], names) for kind in sorted(twins)}, "counts": dict(counts)}


def started(path: str, names: Sequence[str], disk: str) -> dict[str, Engine]:
    """Start the engines, and let each compute something."""
    with_disk = DEFAULTS | {"local_disk": disk, "max_local_disk_size": 4.0}
    engines = {name: Engine(path, lmc=with_disk if name == LMC else None, **ROOM) for name in names}
    for engine in engines.values():
        for length in (2000, 100):
            served(engine, [[7 + number % 300 for number in range(length)]])
        engine.pin(0)
    return engines


def quotients(twins: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return the median and the 99th percentile of how much longer requests took than their twins."""
    found: dict[str, Any] = {"requests": len(twins)}
    for name in names:
        for what in (TTFT, SECONDS):
            if name == PLAIN:
                found[f"{what}_plain_s"] = round(median(one[PLAIN][what] for one in twins), 4)
                continue
            each = sorted(one[name][what] / one[PLAIN][what] for one in twins)
            key = what if name == LMC else f"{what}_of_vllm_twice"
            found[f"{key}_p50"] = round(median(each), 3)
            found[f"{key}_p99"] = round(each[min(len(each) - 1, int(0.99 * len(each)))], 3)
    return found


def main() -> None:
    arguments = parser(__doc__, "mixed")
    arguments.add_argument("--model", choices=(SMALL, SMOLLM2), default=SMOLLM2)
    arguments.add_argument("--minutes", type=float, default=30.0)
    arguments.add_argument("--restarts", type=int, default=4)
    arguments.add_argument("--pause", type=float, default=0.25, help="seconds between requests, on average")
    arguments.add_argument("--twice", action="store_true", help="a second engine without lmc, to show the noise")
    options = arguments.parse_args()
    names = [PLAIN, LMC, *([AGAIN] if options.twice else [])]
    print(machine())
    with tempfile.TemporaryDirectory(prefix="lmc-bench-") as disk:
        found = run(ChatTokens.of(options.model), names, options.minutes, options.restarts, options.pause, disk)
    for kind, numbers in found["by_kind"].items():
        print(f"{kind:14} {numbers}")
    line = {"bench": "mixed", "model": options.model} | {
        name: getattr(options, name) for name in ("minutes", "restarts", "pause")
    }
    closing_line(line | found, f"mixed_{options.pause:g}" if options.keep else None)


if __name__ == "__main__":
    main()
