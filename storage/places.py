"""The table of places where chunks can be: device memory, memory, and the tiers below it.

Metrics, KV events, reports and `lmc top` read it. A new tier needs a line here; docs/structure.md says what
else it needs.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A kind of memory, or a tier below memory."""

    name: str
    title: str  # the name that is shown to people
    in_memory: bool = False  # whether its chunks can be read without a load
    medium: str = ""  # the name in vLLM's KV events; empty if the place's chunks are not announced
    hit_source: str = "EXTERNAL_UNSPECIFIED"  # the name in vLLM's metrics


# All places, in the order of lookups: fastest first.
PLACES = (
    Place(name="device", title="device memory", in_memory=True, medium="GPU", hit_source="DEVICE"),
    Place(name="host", title="memory", in_memory=True, medium="CPU", hit_source="HOST"),
    Place(name="disk", title="disk", medium="STORAGE", hit_source="DISK"),
    # Not announced: they evict by themselves without reporting it.
    Place(name="redis", title="Redis"),
    Place(name="mooncake", title="Mooncake"),
    Place(name="directory", title="shared directory"),
    Place(name="objects", title="object store"),
)
MEMORY = frozenset(place.name for place in PLACES if place.in_memory)
_BY_NAME = {place.name: place for place in PLACES}


def place_of(name: str) -> Place:
    """Return the place with this name. For a tier that is not in the table, return a place that is not announced."""
    return _BY_NAME.get(name) or Place(name=name, title=name)


def fastest_first(names: "set[str]") -> list[str]:
    """Return the names in the order of the table; unknown names come last, sorted."""
    known = [place.name for place in PLACES if place.name in names]
    return [*known, *sorted(names - set(known))]
