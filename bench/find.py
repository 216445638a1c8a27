"""Known documents in the prompts of RAG applications, with the tokenizers of served models: what is found, how fast.

    make tokenizers                                    # downloads 125 MB; the Makefile names the licences
    python bench/find.py [--documents 10000,100000,1000000] [--random 1000000]

Passages of prose, code, tables and several languages are learned as `lmc learn` learns them. Prompts are written as
applications write them, without separators, and encoded. What is measured:

    found             share of the documents' tokens that is found, over all tokenizers, languages and templates
    by_template       the same for each tokenizer and template; `json` has escaped text, and is not counted in `found`
    wrong             runs in random prompts, beside near-duplicates of documents, that have another token than their
                      document, or that a search at every shift does not confirm; of `--random` prompts
    p99_ms_16k_…      milliseconds for a prompt of 16,384 tokens with 40 documents, among so many documents
    bytes_a_document  bytes of a document of 400 tokens besides its tokens, the largest of the sizes
    insert_ms         milliseconds for one more document among the most documents
"""

import json
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import closing_line, parser
from tokenizers import Tokenizer

from lmc.blend.markers import Markers, separator_variants
from lmc.blend.segments import document_tokens
from lmc.documents.finder import DocumentFinder
from lmc.rag import SEPARATOR

ROOT = Path(__file__).parent.parent
TOKENIZERS = ROOT / "build/tokenizers"
PASSAGES, IN_PROMPT, PROMPTS = 24, 6, 8  # passages of a kind; passages of a prompt; prompts of a template and kind
CHARACTERS = 1200  # of a passage of English text or code
SENTENCES = 12  # of a passage of another kind
QUESTION = "What happens if the temperature rises above 35 degrees?"


@dataclass(eq=False)
class Known:
    """A document."""

    tokens: "array[int]"


def _each(line: str, join: str = "\n") -> Callable[[Sequence[str]], str]:
    return lambda texts: join.join(
        line.replace("{i}", str(i)).replace("{text}", text) for i, text in enumerate(texts, 1)
    )


# What stands between the instructions and the question. The names are those of applications that write so.
TEMPLATES: Mapping[str, Callable[[Sequence[str]], str]] = {
    "stuff": _each("{text}", "\n\n"),  # LangChain's default
    "llama_index": _each("page_label: {i}\nfile_path: /data/handbook-{i}.pdf\n\n{text}", "\n\n"),
    "haystack": _each("  {text}"),
    "numbered": _each("[{i}] {text}"),
    "open_webui": _each('<source id="{i}" name="handbook-{i}.pdf">{text}</source>'),
    "xml": _each('<document index="{i}">\n<source>f{i}.txt</source>\n<document_content>\n{text}\n</document_content>\n'
                 "</document>"),
    "fenced": _each("Tool result {i}:\n```\n{text}\n```"),
    "bullets": _each("- {text}"),
    "quoted": _each('{i}. "{text}"'),
    "blanks": _each("{text}", " "),
    "json": lambda texts: json.dumps([{"id": i, "text": text} for i, text in enumerate(texts)]),
}  # fmt: skip


def prompt_text(template: str, texts: Sequence[str]) -> str:
    """Return a prompt as an application writes it."""
    return f"Use the following context to answer.\n\n{TEMPLATES[template](texts)}\n\nQuestion: {QUESTION}\nAnswer:"


def passages(dice: random.Random) -> dict[str, list[str]]:
    """Return passages of several kinds, from this repository."""
    english = [path.read_text() for path in sorted((ROOT / "lmc/demo/real/documents").rglob("*.txt"))]
    sources = {
        "prose": "\n\n".join(english),
        "Markdown": "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))),
        "Python": "\n\n".join(path.read_text() for path in sorted((ROOT / "lmc/engine").glob("*.py"))),
    }
    found = {kind: [_cut(text, dice) for _ in range(PASSAGES)] for kind, text in sources.items()}
    for kind, sentences in json.loads((ROOT / "bench/texts/sentences.json").read_text()).items():
        joined = "\n" if kind == "tables" else "" if kind in ("Chinese", "Japanese") else " "
        found[kind] = [joined.join(dice.choices(sentences, k=SENTENCES)) for _ in range(PASSAGES)]
    return found


def _cut(text: str, dice: random.Random) -> str:
    """Return a passage that begins and ends with a word, as a splitter leaves it."""
    start = text.index(" ", dice.randrange(len(text) - CHARACTERS - 100))
    return text[start : text.rindex(" ", start, start + CHARACTERS)].strip()


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text, without those that begin every prompt."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def learned(tokenizer: Tokenizer, text: str, markers: Markers) -> list[int]:
    """Return the tokens of a document as `lmc learn` stores it."""
    return [*document_tokens(partial(tokens_of, tokenizer), markers, SEPARATOR, text)[0]]


def share_found(tokenizer: Tokenizer, texts: Mapping[str, Sequence[str]], seed: int = 0) -> dict[str, dict[str, float]]:
    """Return the share of the documents' tokens that is found, by template and kind of text."""
    dice = random.Random(seed)
    markers = Markers(separators=separator_variants(partial(tokens_of, tokenizer), tokenizer.decode, SEPARATOR))
    known = {text: Known(array("I", learned(tokenizer, text, markers))) for kind in texts.values() for text in kind}
    finder = DocumentFinder[Known]()
    finder.insert(list(known.values()))
    shares: dict[str, dict[str, float]] = {}
    for template in TEMPLATES:
        for kind, of_kind in texts.items():
            there = found = 0
            for _ in range(PROMPTS):
                chosen = dice.sample(of_kind, IN_PROMPT)
                prompt = tokens_of(tokenizer, prompt_text(template, chosen))
                there += sum(len(known[text].tokens) for text in chosen)
                found += sum(run.tokens for run in finder.find(prompt))
            shares.setdefault(template, {})[kind] = round(found / there, 4)
    return shares


def wrong_runs(prompts: int, seed: int = 0) -> tuple[int, int]:
    """Return how many runs were found in random prompts beside near-duplicates, and how many of them are wrong."""
    dice = np.random.default_rng(seed)
    pages = dice.integers(0, 150_000, (40, 400))
    near = [page.copy() for page in pages for _ in range(25)]
    for page in near:
        page[dice.integers(0, 400, 3)] = dice.integers(0, 150_000, 3)
    finder = DocumentFinder[Known]()
    finder.insert([Known(array("I", page.tolist())) for page in (*pages, *near)])
    runs = wrong = 0
    for _ in range(prompts):
        page, start, length = pages[dice.integers(40)], int(dice.integers(300)), int(dice.integers(20, 100))
        prompt = [*dice.integers(0, 150_000, 30), *page[start : start + length], *dice.integers(0, 150_000, 30)]
        for run in finder.find(prompt):
            same = prompt[run.at : run.at + run.tokens] == run.document.tokens[run.first :][: run.tokens].tolist()
            long_enough = run.tokens >= 64 and run.tokens <= length + 2  # A random token may be equal as well.
            runs, wrong = runs + 1, wrong + (not (same and long_enough))
    return runs, wrong


def times(documents: int, seed: int = 0) -> dict[str, float]:
    """Return milliseconds to search a long prompt among so many documents, and bytes of a document."""
    dice, finder = np.random.default_rng(seed), DocumentFinder[Known]()
    lengths = dice.integers(200, 601, documents)
    known = [Known(array("I", dice.integers(0, 150_000, length, np.uint32).tobytes())) for length in lengths]
    begun = time.perf_counter()
    for start in range(0, documents, 10_000):
        finder.insert(known[start : start + 10_000])
    inserted, seconds = time.perf_counter() - begun, []
    for _ in range(300):
        prompt: list[int] = []
        for place in dice.integers(0, documents, 40):
            prompt += [*dice.integers(0, 150_000, 5).tolist(), *known[place].tokens[:390]]
        prompt = prompt[:16_384]
        begun = time.perf_counter()
        runs = finder.find(prompt)
        seconds.append(time.perf_counter() - begun)
        assert len(runs) >= 30
    one_more = Known(array("I", dice.integers(0, 150_000, 400, np.uint32).tobytes()))
    begun = time.perf_counter()
    finder.insert([one_more])
    return {
        "p50_ms": round(1e3 * float(np.median(seconds)), 2),
        "p99_ms": round(1e3 * float(np.percentile(seconds, 99)), 2),
        "bytes_a_document": round(finder.bytes / documents),
        "insert_all_s": round(inserted, 2),
        "insert_ms": round(1e3 * (time.perf_counter() - begun), 3),
    }


def main() -> None:
    """Print tables and a line of JSON."""
    options = parser(__doc__, "find")
    options.add_argument("--documents", default="10000,100000,1000000", help="numbers of documents, with commas")
    options.add_argument("--random", type=int, default=100_000, help="random prompts")
    arguments = options.parse_args()
    files = sorted(TOKENIZERS.glob("*/tokenizer.json"))
    texts = passages(random.Random(0))
    by_tokenizer: dict[str, Any] = {}
    for file in files:
        shares = share_found(Tokenizer.from_file(str(file)), texts)
        by_tokenizer[file.parent.name] = shares
        print(f"\n{file.parent.name:14s}" + "".join(f"{kind:>10s}" for kind in texts))
        for template, of_kinds in shares.items():
            print(f"{template:14s}" + "".join(f"{100 * share:10.1f}" for share in of_kinds.values()))
    counted = [
        share
        for shares in by_tokenizer.values()
        for template, of_kinds in shares.items()
        if template != "json"
        for share in of_kinds.values()
    ]
    runs, wrong = wrong_runs(arguments.random)
    sizes = [int(size) for size in arguments.documents.split(",")]
    by_size = {size: times(size) for size in sizes}
    for size, measured in by_size.items():
        print(f"{size:9,} documents: {measured}")
    result: dict[str, object] = {
        "bench": "find",
        "found": round(float(np.mean(counted)), 4) if counted else None,
        "worst_found": min(counted, default=None),
        "wrong": wrong,
        "runs_in_random_prompts": runs,
        **{f"p99_ms_16k_{size // 1000}k".replace("000k", "m"): by_size[size]["p99_ms"] for size in sizes},
        "bytes_a_document": max(measured["bytes_a_document"] for measured in by_size.values()),
        "insert_ms": by_size[max(sizes)]["insert_ms"],
    }
    also = {"random_prompts": arguments.random, "by_size": by_size, "by_template": by_tokenizer}
    closing_line(result, "find" if arguments.keep else None, also)


if __name__ == "__main__":
    main()
