"""Finds known documents in a prompt, token by token, wherever they are.

A document is cut into blocks of `BLOCK` tokens, one for every `STRIDE` tokens, and a hash of each block is stored. A
prompt is hashed at every position, as rsync does (Tridgell, Mackerras 1996), so that neither separators nor positions
matter. A hash that both have is only a hint: the tokens around it are compared, and the longest equal runs win.

A run of `BLOCK + STRIDE - 1` equal tokens always contains a whole block, so every run of that length is found.
Exceptions are blocks that repeat a period of at most `MAX_PERIOD` tokens, and blocks that more than `MAX_HOLDERS`
documents have: their documents are found by their other blocks.

A document of 400 tokens takes 150 to 280 bytes besides its tokens, and up to 410 bytes while the table grows.
`bench/find.py` measures memory and time.
"""

import secrets
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lmc.documents.block_table import MAX_HOLDERS, Array, BlockTable, Positions

BLOCK = 16  # tokens of a block
STRIDE = 32  # tokens from the start of one block to the start of the next
FIRST = 2  # The first block begins here, because a tokenizer may join a document's first characters with other text.
WHOLE = 32  # minimum number of tokens in a run that is a whole document
SEAM = 2  # tokens at each end of a document that may be different in a prompt
MAX_PERIOD = 4
# Number of runs that are compared with a prompt: at least this, and one more per `RUN_TOKENS` tokens.
MIN_RUNS, RUN_TOKENS = 64, 16
COMPARED = 32  # Runs are compared until they have this many tokens for each token of the prompt.
COMPARED_TOKENS = 512  # tokens that are compared first
PLACE_BLOCKS = 1 << 10  # numbers of blocks of a place
MAX_PLACES = (1 << 22) - 1
PLACE_LIST_BYTES = 220  # memory of a list of places, and of its entry in a dictionary


class Tokenized(Protocol):
    """What the finder needs to know about a document."""

    @property
    def tokens(self) -> Sequence[int]:
        """Its tokens; fastest as an array of 4-byte unsigned integers."""


D = TypeVar("D", bound=Tokenized)


class FoundRun(NamedTuple, Generic[D]):
    """Equal tokens: `tokens` tokens of a prompt from `at` on, and as many tokens of a document from `first` on."""

    at: int
    document: D
    first: int
    tokens: int

    @property
    def whole(self) -> bool:
        """Whether the run is the whole document, except for tokens that a tokenizer may join with other text."""
        return self.first <= SEAM and self.first + self.tokens >= len(self.document.tokens) - SEAM

    @property
    def stop(self) -> int:
        """Where it ends in the prompt."""
        return self.at + self.tokens

    @property
    def shift(self) -> int:
        """Where its document begins in the prompt; negative if that is before the prompt."""
        return self.at - self.first

    def has(self, part: "FoundRun[D]") -> bool:
        """Return whether another run is a part of this one."""
        return (
            self.document is part.document
            and self.shift == part.shift
            and self.at <= part.at
            and part.stop <= self.stop
        )

    def is_long_enough(self, min_run: int) -> bool:
        """Return whether it has `min_run` tokens, or `WHOLE` tokens if it is a whole document."""
        return self.tokens >= (WHOLE if self.whole else min_run)


class Intervals:
    """Parts of a prompt. Those that touch are one."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        """Add a part."""
        touching = [part for part in self._parts if part[0] <= stop and start <= part[1]]
        self._parts = [part for part in self._parts if part not in touching]
        self._parts.append(
            (min([start, *(part[0] for part in touching)]), max([stop, *(part[1] for part in touching)]))
        )

    def end_around(self, position: int) -> int | None:
        """Return the end of the part that has a position; None if none has it."""
        return next((stop for start, stop in self._parts if start <= position < stop), None)


class DocumentFinder(Generic[D]):
    """The blocks of the documents of one namespace. Not safe for several threads at once.

    The number of a block is the place of its document, and its position in the document. A document of more than
    `PLACE_BLOCKS` blocks has several places. A removed document's places are used again.
    """

    def __init__(self, used: Callable[[D], float] | None = None) -> None:
        """Create an empty finder. Of equal runs, that of the document wins that was `used` last.

        `used` returns the time; without it, the first run wins.
        """
        # The base is secret, so that a client cannot choose texts whose hashes are equal.
        self._base = secrets.randbits(64) | 1
        self._used = used or (lambda _: 0.0)
        self._blocks = BlockTable()
        self._documents: list[D | None] = []  # by place; None for a free place
        self._offsets = np.zeros(64, np.uint32)  # by place: the document's token at which the place begins
        self._free: list[int] = []  # places
        # Places by the `id()` of a document, for documents that have a place without blocks. The places of all other
        # documents are found by their blocks.
        self._places_without_blocks: dict[int, list[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def bytes(self) -> int:
        """Number of bytes that the finder takes, besides the documents."""
        places = self._offsets.nbytes + 8 * len(self._documents)
        return self._blocks.bytes + places + PLACE_LIST_BYTES * len(self._places_without_blocks)

    def insert(self, documents: Collection[D]) -> list[D]:
        """Add documents, faster together than one by one. Returns those that lack blocks, because others have them.

        Documents of fewer than `WHOLE` tokens are never found, nor those for which no places are left.
        """
        documents = [document for document in documents if len(document.tokens) >= WHOLE]
        if not documents or len(self._documents) + len(documents) > MAX_PLACES:
            return []
        hashes, good, counts = self._blocks_of(documents)
        places = [
            [self._place(document, block) for block in range(0, count, PLACE_BLOCKS)]
            for document, count in zip(documents, counts.tolist(), strict=True)
        ]
        firsts = np.cumsum([0, *map(len, places)])[:-1]  # indices into all places
        blocks = np.arange(len(hashes)) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = np.concatenate(places)[np.repeat(firsts, counts) + blocks // PLACE_BLOCKS] * PLACE_BLOCKS
        numbers = (numbers + blocks % PLACE_BLOCKS).astype(np.uint32)[good]
        added = self._blocks.insert(hashes[good], numbers)
        self._count += len(documents)
        with_blocks = set((numbers[added] // PLACE_BLOCKS).tolist())
        for document, of_document in zip(documents, places, strict=True):
            if not with_blocks.issuperset(of_document):
                self._places_without_blocks[id(document)] = of_document
        lacking = np.unique(np.repeat(np.arange(len(documents)), counts)[good][~added])
        return [documents[i] for i in lacking.tolist()]

    def remove(self, document: D) -> None:
        """Remove a document. An unknown document is ignored."""
        if len(document.tokens) < WHOLE:
            return
        hashes, _, _ = self._blocks_of([document])
        _, numbers = self._blocks.find(hashes)
        if places := self._places_of(document, numbers):
            self._blocks.remove(hashes, lambda found: np.isin(found // PLACE_BLOCKS, places))
            for place in places:
                self._documents[place] = None
            self._free += places
            self._count -= 1
            self._places_without_blocks.pop(id(document), None)

    def has_room_for_more_of(self, document: D) -> bool:
        """Return whether an insertion would add blocks that a document lacks, because others that had them are gone."""
        hashes, good, _ = self._blocks_of([document])
        hashes = hashes[good]
        at, numbers = self._blocks.find(hashes)
        is_own = np.isin(numbers // PLACE_BLOCKS, self._places_of(document, numbers))
        own, holders = (np.bincount(of, minlength=len(hashes)) for of in (at[is_own], at))
        return bool(((own == 0) & (holders < MAX_HOLDERS)).any())

    def find(self, tokens: Sequence[int], min_run: int = 2 * WHOLE) -> list[FoundRun[D]]:
        """Return the runs of documents in a prompt, in its order. Runs do not overlap.

        A run has at least `min_run` tokens, or `WHOLE` tokens if it is a whole document. Longer runs win. The rest of a
        shorter run is returned if it is long enough.
        """
        return without_overlaps(self.all_runs(tokens, min_run), min_run)

    def all_runs(self, tokens: Sequence[int], min_run: int = 2 * WHOLE) -> list[FoundRun[D]]:
        """Return the runs of documents in a prompt, which may overlap, longest first. Their length is as for `find`."""
        if not len(self) or len(tokens) < WHOLE:
            return []
        prompt = as_array(tokens)
        at, numbers = self._blocks.find(self._hashes(prompt))
        if not len(at):
            return []
        places, blocks = np.divmod(numbers.astype(np.int64), PLACE_BLOCKS)
        shifts = at - (FIRST + STRIDE * blocks + self._offsets[places])
        # Longer runs have more blocks in common. The limits bound the time of any prompt.
        _, pair, hits = np.unique((places << 32) + shifts + (1 << 31), return_inverse=True, return_counts=True)
        order, left = np.lexsort((at, pair, -hits[pair])), MIN_RUNS + len(prompt) // RUN_TOKENS
        left_tokens, runs = COMPARED * len(prompt), list[FoundRun[D]]()
        pairs = pair[order]
        firsts = np.concatenate([[0], np.flatnonzero(pairs[1:] != pairs[:-1]) + 1])
        # Lists are faster to read one by one than arrays.
        starts, bounds = at[order].tolist(), [*firsts.tolist(), len(order)]
        of_pairs = zip(pairwise(bounds), places[order[firsts]].tolist(), shifts[order[firsts]].tolist(), strict=True)
        covered = defaultdict[int, Intervals](Intervals)  # parts of the prompt that have a run of a document
        for (first, stop), place, shift in of_pairs:
            document, index = self._documents[place], first
            while index < stop and document is not None:
                # Text with a period has a run at each shift by a period. The first of these is enough.
                end = covered[id(document)].end_around(starts[index])
                if end is None:
                    if not left or left_tokens < 0:
                        break
                    run = _run_around(prompt, document, starts[index], starts[index] - shift)
                    left, left_tokens, end = left - 1, left_tokens - run.tokens, max(run.stop, starts[index] + 1)
                    if run.is_long_enough(min_run):
                        runs.append(run)
                        covered[id(document)].add(run.at, run.stop)
                index = stop if starts[stop - 1] < end else bisect_left(starts, end, index, stop)
        return sorted(runs, key=lambda run: (-run.tokens, -self._used(run.document)))

    def _places_of(self, document: D, numbers: Array) -> list[int]:
        """Return the places of a document, given the `numbers` of its blocks; none for an unknown document."""
        places = self._places_without_blocks.get(id(document))
        if places is None:
            likely = np.unique(numbers // PLACE_BLOCKS).tolist()
            places = [place for place in likely if self._documents[place] is document]
        return places

    def _place(self, document: D, block: int) -> int:
        """Return a free place for a document's blocks from `block` on."""
        if self._free:
            place = self._free.pop()
            self._documents[place] = document
        else:
            place = len(self._documents)
            self._documents.append(document)
            if place == len(self._offsets):
                self._offsets = np.concatenate([self._offsets, np.zeros_like(self._offsets)])
        self._offsets[place] = STRIDE * block
        return place

    def _blocks_of(self, documents: Collection[D]) -> tuple[Array, npt.NDArray[np.bool_], Positions]:
        """Return the hashes of all blocks, which of them are not periodic, and the number of each document's blocks."""
        lengths = np.array([len(document.tokens) for document in documents])
        counts = np.maximum(0, (lengths - FIRST - BLOCK) // STRIDE + 1)
        before = np.cumsum(counts) - counts
        tokens = np.concatenate([as_array(document.tokens) for document in documents])
        starts = np.repeat(np.cumsum(lengths) - lengths, counts)
        starts += FIRST + STRIDE * (np.arange(int(counts.sum())) - np.repeat(before, counts))
        return self._hashes(tokens)[starts], ~is_periodic(tokens[starts[:, None] + np.arange(BLOCK)]), counts

    def _hashes(self, tokens: Array) -> Array:
        """Return a hash of the `BLOCK` tokens from each position on."""
        return (polynomials(tokens, self._base) >> np.uint64(32)).astype(np.uint32)


def polynomials(tokens: Array, base: int) -> npt.NDArray[np.uint64]:
    """Return a polynomial in `base` modulo 2^64 of the `BLOCK` tokens from each position on. Its upper half is a hash.

    The base has to be odd.
    """
    sums, size = tokens.astype(np.uint64), 1
    while size < BLOCK:
        factor = np.uint64(pow(base, size, 1 << 64))
        sums, size = sums[:-size] * factor + sums[size:], 2 * size
    return sums


def as_array(tokens: Sequence[int]) -> Array:
    """Return tokens as an array of 4-byte unsigned integers."""
    # numpy takes four times as long to convert a list as `array` does.
    return np.frombuffer(tokens if isinstance(tokens, array) else array("I", tokens), np.uint32)


def is_periodic(blocks: Array) -> npt.NDArray[np.bool_]:
    """Return for each block whether it repeats a period of at most `MAX_PERIOD` tokens."""
    periodic = np.zeros(len(blocks), np.bool_)
    for period in range(1, MAX_PERIOD + 1):
        periodic |= (blocks[:, period:] == blocks[:, :-period]).all(axis=1)
    return periodic


def _run_around(prompt: Array, document: D, at: int, first: int) -> FoundRun[D]:
    """Return the run of equal tokens around token `at` of a prompt, which is compared with token `first`.

    It is empty if those differ.
    """
    tokens = as_array(document.tokens)
    after = _equal(prompt[at:], tokens[first:])
    before = _equal(prompt[:at][::-1], tokens[:first][::-1]) if after else 0
    return FoundRun(at - before, document, first - before, before + after)


def _equal(one: Array, other: Array) -> int:
    """Return how many tokens at the start of both are equal."""
    size, start, step = min(len(one), len(other)), 0, COMPARED_TOKENS
    while start < size:
        stop = min(start + step, size)
        equal = one[start:stop] == other[start:stop]
        first = int(equal.argmin())
        if not equal[first]:
            return start + first
        start, step = stop, 2 * step
    return size


def _stretches(true: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the position and the length of each stretch of at least `WHOLE` true elements."""
    if not true.any():  # the usual case in a prompt that repeats itself
        return []
    starts, stops = np.flatnonzero(np.diff(true, prepend=False, append=False)).reshape(-1, 2).T
    long = stops - starts >= WHOLE
    return list(zip(starts[long].tolist(), (stops - starts)[long].tolist(), strict=True))


def without_overlaps(runs: Sequence[FoundRun[D]], min_run: int) -> list[FoundRun[D]]:
    """Return runs that do not overlap, in the order of the prompt. Earlier runs of the list win."""
    free, kept = np.ones(max((run.stop for run in runs), default=0), np.bool_), list[FoundRun[D]]()
    for run in runs:
        for skip, count in _stretches(free[run.at : run.stop]):
            rest = FoundRun(run.at + skip, run.document, run.first + skip, count)
            if rest.is_long_enough(min_run):
                kept.append(rest)
                free[rest.at : rest.stop] = False
    return sorted(kept, key=lambda run: run.at)


def stored_without_overlaps(
    runs: Sequence[FoundRun[D]], min_run: int, stored: Callable[[Sequence[FoundRun[D]]], Sequence[FoundRun[D]]]
) -> list[FoundRun[D]]:
    """Return runs that do not overlap, in the order of the prompt. What is stored wins over what is not.

    Among these, longer runs win, and then earlier runs of the list. `stored` returns the parts of runs that are stored.
    It is called only if runs overlap, and for all of them only if one that has won is not stored.
    """
    chosen, in_order = without_overlaps(runs, min_run), sorted(runs, key=lambda run: run.at)
    if not any(run.stop > later.at for run, later in pairwise(in_order)) or stored(chosen) == chosen:
        return chosen
    parts = without_overlaps(sorted(stored(runs), key=lambda run: -run.tokens), min_run)
    return without_overlaps([*_extended(parts, runs), *runs], min_run)


def _extended(parts: Sequence[FoundRun[D]], runs: Sequence[FoundRun[D]]) -> Iterator[FoundRun[D]]:
    """Yield parts of runs, in the order of the prompt, each extended within its run up to its neighbours."""
    stop = 0
    for part, following in zip_longest(parts, parts[1:]):
        of = next(run for run in runs if run.has(part))
        at, stop = max(of.at, stop), min(of.stop, following.at) if following else of.stop
        yield FoundRun(at, of.document, at - of.shift, stop - at)
