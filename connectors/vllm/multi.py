"""The other connectors of an engine, if vLLM's `MultiConnector` runs several of them.

`MultiConnector` hands only the metadata of its first connector to all of them when the engine starts. There, lmc's
workers send their facts with their first report instead.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

# Connectors of vLLM 0.32 that find and store a block only under the hash that the block pool has for it. lmc gives
# approximate blocks hashes of their own. Not among them, as their sources show:
# OffloadingConnector     notes the hashes of a prompt before lmc replaces them
# NixlConnector, Mooncake, MoRIIO     hand blocks to another engine, which hashes the tokens anew
# ExampleConnector, LMCache, FlexKV     hash tokens
USES_BLOCK_HASHES = frozenset({"SimpleCPUOffloadConnector"})


def neighbours(connector: Any, top: Any) -> list[str] | None:
    """Return the class names of the connectors beside `connector`, or None if it is the engine's only one.

    `top` is the engine's connector.
    """
    leaves = list(_leaves(top))
    if connector is top or not any(leaf is connector for leaf in leaves):
        return None
    return [type(leaf).__name__ for leaf in leaves if leaf is not connector]


def blending_objection(names: list[str]) -> str:
    """Return why nothing is blended beside these connectors; empty if blending is safe."""
    unsafe = [name for name in Counter(names) if name not in USES_BLOCK_HASHES]
    if not unsafe:
        return ""
    return (
        f"{', '.join(unsafe)} beside lmc may give approximate KV to requests that want exact KV; to blend, use lmc "
        f"without it, or with {', '.join(sorted(USES_BLOCK_HASHES))}"
    )


def _leaves(connector: Any) -> Iterator[Any]:
    inside = getattr(connector, "sub_connectors", None)
    if inside is None:
        yield connector
        return
    for one in inside:
        yield from _leaves(one)
