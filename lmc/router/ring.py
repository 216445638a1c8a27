"""A ring for consistent hashing: each key has an order of engines, and an engine that goes moves only its own keys."""

from bisect import bisect
from collections.abc import Collection, Iterator

from lmc.router.prefix_hashes import digest


class Ring:
    """Engines stand at many points of the ring, and a key belongs to the engine whose point comes next.

    Points are hashes of names, so that all routers with the same engines agree, and so does one that was restarted.
    """

    def __init__(self, replicas: int = 256) -> None:
        """`replicas` is the number of points of each engine."""
        self._replicas = replicas
        self._names: set[str] = set()
        self._points: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Put an engine on the ring, if it is not there."""
        if name not in self._names:
            self._names.add(name)
            self._points += [(digest(f"{name}\0{replica}"), name) for replica in range(self._replicas)]
            self._points.sort()

    def remove(self, name: str) -> None:
        """Take an engine off the ring, if it is there."""
        if name in self._names:
            self._names.remove(name)
            self._points = [point for point in self._points if point[1] != name]

    def walk(self, key: str, among: Collection[str]) -> Iterator[str]:
        """Yield the engines of `among` in the order of a key, each once. They are put on the ring before.

        Engines that are not in `among` stay on the ring and are passed over, so that one which is away for a while
        finds its keys again.
        """
        for name in among:
            self.add(name)
        waiting = set(among)
        place = bisect(self._points, (digest(key), ""))
        while waiting:
            name = self._points[place % len(self._points)][1]
            if name in waiting:
                waiting.remove(name)
                yield name
            place += 1
