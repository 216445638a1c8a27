"""The other connectors of an engine, if vLLM's `MultiConnector` runs several connectors.

When the engine starts, `MultiConnector` passes only the metadata of its first connector to all connectors. With
`MultiConnector`, lmc's workers therefore send their facts with their first report.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

# Connectors of vLLM 0.32 that find and store a block only under its hash in the block pool. They are safe, because lmc
# gives approximate blocks their own hashes. According to their sources, these connectors are not safe:
# OffloadingConnector     reads the hashes of a prompt before lmc replaces them
# NixlConnector, Mooncake, MoRIIO     send blocks to another engine, which hashes the tokens again
# ExampleConnector, LMCache, FlexKV     hash tokens
USES_BLOCK_HASHES = frozenset({"SimpleCPUOffloadConnector"})


def neighbours(connector: Any, top: Any) -> list[str] | None:
    """Return the class names of the other connectors of an engine; None if `connector` is its only connector.

    `top` is the engine's own connector, which may contain several connectors.
    """
    leaves = list(_leaves(top))
    if connector is top or not any(leaf is connector for leaf in leaves):
        return None
    return [type(leaf).__name__ for leaf in leaves if leaf is not connector]


def blending_objection(names: list[str]) -> str:
    """Return why these other connectors make blending unsafe; an empty string if blending is safe."""
    unsafe = [name for name in Counter(names) if name not in USES_BLOCK_HASHES]
    if not unsafe:
        return ""
    return (
        f"{', '.join(unsafe)} next to lmc may serve approximate KV to exact requests; to blend, use lmc without it, "
        f"or with {', '.join(sorted(USES_BLOCK_HASHES))}"
    )


def _leaves(connector: Any) -> Iterator[Any]:
    inside = getattr(connector, "sub_connectors", None)
    if inside is None:
        yield connector
        return
    for child in inside:
        yield from _leaves(child)
