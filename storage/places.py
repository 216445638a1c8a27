"""The places where chunks can be, in one table, which metrics, KV events, reports and `lmc top` read.

A new tier needs a line here, and a class with the methods of `lmc.storage.tiers.tier.Tier`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A kind of memory, or a tier."""

    name: str
    title: str  # in texts for people
    in_memory: bool = False  # Chunks need not be loaded.
    medium: str = ""  # its name in vLLM's KV events; empty if its chunks are not announced
    hit_source: str = "EXTERNAL_UNSPECIFIED"  # its name in vLLM's metrics


# In the order in which they are asked for a chunk, fastest first.
PLACES = (
    Place(name="device", title="device memory", in_memory=True, medium="GPU", hit_source="DEVICE"),
    Place(name="host", title="memory", in_memory=True, medium="CPU", hit_source="HOST"),
    Place(name="disk", title="disk", medium="STORAGE", hit_source="DISK"),
    Place(name="redis", title="Redis"),  # Redis evicts by itself and tells nobody, so its chunks are not announced.
)
MEMORY = frozenset(place.name for place in PLACES if place.in_memory)
_BY_NAME = {place.name: place for place in PLACES}


def place_of(name: str) -> Place:
    """Return the place of this name. A tier that is not in the table is a place too, and is not announced."""
    return _BY_NAME.get(name) or Place(name=name, title=name)


def fastest_first(names: "set[str]") -> list[str]:
    """Return the names in the order of the table, and unknown ones last."""
    known = [place.name for place in PLACES if place.name in names]
    return [*known, *sorted(names - set(known))]
