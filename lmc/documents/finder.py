"""Finds known documents in a prompt, token by token, wherever they are.

A document is cut into blocks of `BLOCK` tokens, one for every `STRIDE` tokens, and a hash of each block is stored. A
prompt is hashed at every position, as rsync does (Tridgell, Mackerras 1996), so that neither separators nor positions
matter. A hash that both have is only a hint: the tokens around it are compared, and the longest equal runs win.

A run of `BLOCK + STRIDE - 1` equal tokens always contains a whole block, so every run of that length is found.
Exceptions are blocks that repeat a period of at most `MAX_PERIOD` tokens, and blocks that more than `MAX_HOLDERS`
documents have: their documents are found by their other blocks.

A document of 400 tokens takes at most 300 bytes besides its tokens. `bench/find.py` measures memory and time.
"""

import secrets
from array import array
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

BLOCK = 16  # tokens of a block
STRIDE = 32  # tokens from the start of one block to the start of the next
FIRST = 2  # The first block begins here, because a tokenizer may join a document's first characters with other text.
WHOLE = 32  # minimum number of tokens in a run that is a whole document
SEAM = 2  # tokens at each end of a document that may be different in a prompt
MAX_PERIOD = 4
MAX_HOLDERS = 4
# Number of documents and shifts that are compared with a prompt: at least this, and one more per `SHIFT_TOKENS` tokens.
MIN_SHIFTS, SHIFT_TOKENS = 64, 64

SLOTS = 8  # entries of a bucket
MIN_BUCKETS = 16
MAX_LOAD = 0.8  # share of the slots that may be in use

DEAD = 0xFFFFFFFF  # block number of a removed block

Array = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.int64]


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


class DocumentFinder(Generic[D]):
    """The blocks of the documents of one namespace. Not safe for several threads at once."""

    def __init__(self) -> None:
        # The base is secret, so that a client cannot choose texts whose hashes are equal.
        self._base = secrets.randbits(64) | 1
        self.clear()

    def clear(self) -> None:
        """Remove all documents."""
        self._blocks = _Blocks()
        self._documents: list[D | None] = []  # in the order of insertion; None for a removed document
        self._starts = np.zeros(64, np.uint32)  # number of the first block of each document, ascending
        self._next = 0  # number of the next block
        self._removed = 0

    def __len__(self) -> int:
        return len(self._documents) - self._removed

    @property
    def bytes(self) -> int:
        """Number of bytes that the finder takes, besides the documents."""
        return self._blocks.bytes + self._starts.nbytes + 8 * len(self._documents)

    def insert(self, documents: Collection[D]) -> None:
        """Add documents, faster together than one by one. Documents of fewer than `WHOLE` tokens are never found."""
        documents = [document for document in documents if len(document.tokens) >= WHOLE]
        if not documents:
            return
        hashes, good, counts = self._blocks_of(documents)
        if self._next + len(hashes) >= DEAD:
            self._renumber(documents)
            return
        known, needed = len(self._documents), len(self._documents) + len(documents)
        if needed > len(self._starts):
            self._starts = np.concatenate([self._starts, np.zeros(max(needed, len(self._starts)), np.uint32)])
        self._starts[known:needed] = self._next + np.cumsum(counts) - counts
        self._documents += documents
        numbers = np.arange(self._next, self._next + len(hashes), dtype=np.uint32)
        self._next += len(hashes)
        self._blocks.insert(hashes[good], numbers[good])

    def remove(self, document: D) -> None:
        """Remove a document. An unknown document is ignored."""
        if len(document.tokens) < WHOLE:
            return
        hashes, _, _ = self._blocks_of([document])
        _, numbers = self._blocks.find(hashes)
        likely = np.unique(self._places(numbers)).tolist()
        for place in chain(likely, range(len(self._documents))):
            if self._documents[place] is document:
                first = int(self._starts[place])
                self._blocks.remove(hashes, range(first, first + len(hashes)))
                self._documents[place], self._removed = None, self._removed + 1
                break
        if 2 * self._removed > len(self._documents):
            self._renumber([])

    def find(self, tokens: Sequence[int], min_run: int = 2 * WHOLE) -> list[FoundRun[D]]:
        """Return the runs of documents in a prompt, in its order. Runs do not overlap.

        A run has at least `min_run` tokens, or `WHOLE` tokens if it is a whole document. Longer runs win. The rest of a
        shorter run is returned if it is long enough.
        """
        if not len(self) or len(tokens) < WHOLE:
            return []
        prompt = as_array(tokens)
        at, numbers = self._blocks.find(self._hashes(prompt))
        if not len(at):
            return []
        places = self._places(numbers)
        shifts = at - (FIRST + STRIDE * (numbers.astype(np.int64) - self._starts[places]))
        # Longer runs have more blocks in common. Most prompts have few shifts; the limit bounds the time of any prompt.
        pairs, hits = np.unique((places << 32) + shifts + (1 << 31), return_counts=True)
        order = np.argsort(-hits, kind="stable")[: MIN_SHIFTS + len(prompt) // SHIFT_TOKENS]
        runs: list[FoundRun[D]] = []
        for pair in pairs[order].tolist():
            document = self._documents[pair >> 32]
            if document is not None:
                runs += _runs_at(prompt, document, (pair & 0xFFFFFFFF) - (1 << 31))
        return _longest(runs, len(prompt), min_run)

    def _places(self, numbers: Array) -> Positions:
        """Return the indices of the documents that have these blocks."""
        return np.searchsorted(self._starts[: len(self._documents)], numbers, side="right") - 1

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

    def _renumber(self, more: Collection[D]) -> None:
        """Insert the remaining documents and `more` documents anew."""
        documents = [document for document in self._documents if document is not None]
        self.clear()
        self.insert([*documents, *more])


class _Blocks:
    """A hash table of block numbers by hash. A full bucket continues in the next one.

    A Bloom filter of one hash function says for most of a prompt's hashes that no block has them.
    """

    def __init__(self) -> None:
        self._allocate(MIN_BUCKETS)

    def _allocate(self, buckets: int) -> None:
        self._hashes = np.zeros((buckets, SLOTS), np.uint32)
        self._numbers = np.zeros((buckets, SLOTS), np.uint32)
        self._used = np.zeros(buckets, np.uint8)  # slots in use by bucket
        self._filter = np.zeros(buckets * SLOTS, np.uint8)  # 8 bits for each slot
        self._size = 0

    @property
    def bytes(self) -> int:
        return self._hashes.nbytes + self._numbers.nbytes + self._used.nbytes + self._filter.nbytes

    def insert(self, hashes: Array, numbers: Array) -> None:
        """Add blocks. At most `MAX_HOLDERS` blocks with the same hash are kept."""
        order = np.argsort(hashes, kind="stable")
        hashes, numbers = hashes[order], numbers[order]
        same, _ = self.find(hashes)
        fits = np.bincount(same, minlength=len(hashes)) + _ranks(hashes) < MAX_HOLDERS
        hashes, numbers = hashes[fits], numbers[fits]
        if self._size + len(hashes) > MAX_LOAD * self._hashes.size:
            self._grow(len(hashes))
        self._place(hashes, numbers)

    def find(self, hashes: Array) -> tuple[Positions, Array]:
        """Return the blocks with these hashes: indices into `hashes`, and the blocks' numbers."""
        at, buckets, slots = self._locate(hashes)
        numbers = self._numbers[buckets, slots]
        return at[numbers != DEAD], numbers[numbers != DEAD]

    def remove(self, hashes: Array, numbers: range) -> None:
        """Remove the blocks of a document; a block may be missing."""
        _, buckets, slots = self._locate(hashes)
        found = self._numbers[buckets, slots]
        gone = (found >= numbers.start) & (found < numbers.stop)
        self._numbers[buckets[gone], slots[gone]] = DEAD

    def _locate(self, hashes: Array) -> tuple[Positions, Positions, Positions]:
        """Return the slots with these hashes: indices into `hashes`, buckets, and slots of buckets."""
        mask = len(self._used) - 1
        places, bits = self._in_filter(hashes)
        at = np.flatnonzero(self._filter[places] & bits)
        wanted, found = hashes[at], list[tuple[Positions, Positions, Positions]]()
        buckets = (wanted & np.uint32(mask)).astype(np.int64)
        while True:
            used = self._used[buckets]
            rows, slots = np.nonzero(self._hashes[buckets] == wanted[:, None])
            if len(rows):
                inside = slots < used[rows]  # An unused slot has the hash 0.
                rows, slots = rows[inside], slots[inside]
            found.append((at[rows], buckets[rows], slots))
            full = used == SLOTS
            if not full.any():
                break
            at, wanted, buckets = at[full], wanted[full], (buckets[full] + 1) & mask
        if len(found) == 1:
            return found[0]
        at, buckets, slots = map(np.concatenate, zip(*found, strict=True))
        return at, buckets, slots

    def _in_filter(self, hashes: Array) -> tuple[Positions, npt.NDArray[np.uint8]]:
        """Return the byte and the bit of each hash in the filter."""
        places = (hashes >> np.uint32(3)) & np.uint32(len(self._filter) - 1)
        return places.astype(np.int64), np.uint8(1) << (hashes & np.uint32(7)).astype(np.uint8)

    def _place(self, hashes: Array, numbers: Array) -> None:
        mask = len(self._used) - 1
        np.bitwise_or.at(self._filter, *self._in_filter(hashes))
        self._size += len(hashes)
        buckets = (hashes & np.uint32(mask)).astype(np.int64)
        while len(hashes):
            order = np.argsort(buckets, kind="stable")
            hashes, numbers, buckets = hashes[order], numbers[order], buckets[order]
            slots = self._used[buckets] + _ranks(buckets)
            fits = slots < SLOTS
            self._hashes[buckets[fits], slots[fits]] = hashes[fits]
            self._numbers[buckets[fits], slots[fits]] = numbers[fits]
            self._used[buckets[fits]] = slots[fits] + 1  # The last assignment to a bucket is that of its last slot.
            hashes, numbers, buckets = hashes[~fits], numbers[~fits], (buckets[~fits] + 1) & mask

    def _grow(self, more: int) -> None:
        """Make room for `more` blocks, without the removed ones."""
        alive = (np.arange(SLOTS) < self._used[:, None]) & (self._numbers != DEAD)
        hashes, numbers, buckets = self._hashes[alive], self._numbers[alive], MIN_BUCKETS
        while len(hashes) + more > MAX_LOAD * buckets * SLOTS:
            buckets *= 2
        self._allocate(buckets)
        self._place(hashes, numbers)


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


def _ranks(ascending: npt.NDArray[np.generic]) -> Positions:
    """Return the number of equal elements before each element of a sorted array."""
    starts = np.flatnonzero(np.r_[True, ascending[1:] != ascending[:-1]]) if len(ascending) else np.zeros(0, np.int64)
    return np.arange(len(ascending)) - np.repeat(starts, np.diff(np.r_[starts, len(ascending)]))


def is_periodic(blocks: Array) -> npt.NDArray[np.bool_]:
    """Return for each block whether it repeats a period of at most `MAX_PERIOD` tokens."""
    periodic = np.zeros(len(blocks), np.bool_)
    for period in range(1, MAX_PERIOD + 1):
        periodic |= (blocks[:, period:] == blocks[:, :-period]).all(axis=1)
    return periodic


def _runs_at(prompt: Array, document: D, shift: int) -> list[FoundRun[D]]:
    """Return the runs of at least `WHOLE` tokens of a document whose token 0 is at `shift` in the prompt."""
    tokens = as_array(document.tokens)
    start, stop = max(0, shift), min(len(prompt), shift + len(tokens))
    equal = prompt[start:stop] == tokens[start - shift : stop - shift]
    return [FoundRun(start + at, document, start + at - shift, count) for at, count in _stretches(equal)]


def _stretches(true: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the position and the length of each stretch of at least `WHOLE` true elements."""
    at, found = 0, []
    for stretch in true.tobytes().split(b"\0"):
        if len(stretch) >= WHOLE:
            found.append((at, len(stretch)))
        at += len(stretch) + 1
    return found


def _longest(runs: list[FoundRun[D]], size: int, min_run: int) -> list[FoundRun[D]]:
    """Return runs that do not overlap, in the order of the prompt. Longer runs win, and of equal ones the first."""
    free, kept = np.ones(size, np.bool_), list[FoundRun[D]]()
    for run in sorted(runs, key=lambda run: -run.tokens):
        for skip, count in _stretches(free[run.at : run.at + run.tokens]):
            rest = FoundRun(run.at + skip, run.document, run.first + skip, count)
            if count >= (WHOLE if rest.whole else min_run):
                kept.append(rest)
                free[rest.at : rest.at + count] = False
    return sorted(kept, key=lambda run: run.at)
