"""The policy `simhash`: routes by a fingerprint that similar prompts have in common."""

from collections.abc import Sequence
from typing import Any

from lmc.router.policies.base import Policy, check, check_count
from lmc.router.policies.simple import Ring
from lmc.router.policy_types import Candidate, PromptRequest, RoutingChoice
from lmc.router.prefix_hashes import encoded

HASHED_CHARACTERS = 400_000  # hashed part of a prompt; hashing more would delay other requests
WINDOW_BYTES = 16  # bytes, about three words of English
SAMPLING = 8  # one in eight windows counts; which one depends on its bytes, not on its position
FACTOR = 0x100000001B3  # base of the polynomial over a window's bytes: the prime of FNV-1a
MIX = 0x9E3779B97F4A7C15  # spreads a polynomial's value over 64 bits; 2^64 divided by the golden ratio


def _window_hashes(data: Any) -> Any:
    """Return the hash of each run of `WINDOW_BYTES` bytes of an array, or of the whole array if it is shorter."""
    import numpy as np

    count = max(1, len(data) - WINDOW_BYTES + 1)
    hashes = np.zeros(count, np.uint64)
    for place in range(min(WINDOW_BYTES, len(data))):  # Array arithmetic wraps around at 64 bits.
        hashes = hashes * np.uint64(FACTOR) + data[place : place + count]
    for shift in (32, 29):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(MIX)
    return hashes ^ (hashes >> np.uint64(32))


def fingerprint(text: str, bits: int) -> int:
    """Return the SimHash of a text: each bit has the value that most window hashes have at this place.

    Which windows count does not depend on their position, so a text in front of another one shifts nothing.
    """
    import numpy as np

    hashes = _window_hashes(np.frombuffer(encoded(text), np.uint8))
    sampled = hashes[hashes % np.uint64(SAMPLING) == 0]
    counted = sampled if len(sampled) else hashes
    places = np.arange(64 - bits, 64, dtype=np.uint64)
    counts = [int(np.count_nonzero(counted >> place & np.uint64(1))) for place in places]
    return sum(1 << place for place, count in enumerate(counts) if 2 * count > len(counted))


class SimHash(Policy):
    """The engine to which the prompt's SimHash belongs on a consistent ring.

    Source: the second policy of the RFC of vLLM's production-stack on prefix-aware routing, after Charikar's SimHash.
    The RFC gives no parameters and measures fewer hits than with its HashTrie. The parameters are ours: windows of 16
    bytes, of these one in eight, and fingerprints of 8 bits. With fewer bits, similar prompts have the same
    fingerprint more often; more bits spread the load better. The first 400,000 characters count. The scope is part of
    the key. As published, loads are not balanced.
    """

    def __init__(self, *, bits: int = 8, replicas: int = 256) -> None:
        """`bits` is the length of a fingerprint, `replicas` the number of points of each engine on the ring."""
        check(isinstance(bits, int) and 1 <= bits <= 32, "bits", bits, "a whole number from 1 to 32")
        check_count("replicas", replicas)
        self._bits, self._ring = bits, Ring(replicas)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine of the prompt's fingerprint."""
        names = {candidate.name for candidate in candidates}
        key = f"{request.scope}\0{fingerprint(request.text[:HASHED_CHARACTERS], self._bits)}"
        return RoutingChoice(next(self._ring.walk(key, names)), "similar prompts")

    def forget(self, engine: str) -> None:
        """Remove an engine from the ring. It returns to its place when it is a candidate again."""
        self._ring.remove(engine)
