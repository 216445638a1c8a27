"""The checks of policies' options. A wrong one is an error before the first request."""

from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from lmc.errors import ConfigError


class Plain(NamedTuple):
    """The kind of an option that can be written as a number or a word."""

    types: tuple[type, ...]

    @classmethod
    def of(cls, annotation: Any) -> "Plain | None":
        """Return the kind of an annotated option; None if it takes anything else, such as a clock."""
        parts = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        kinds = tuple(type(get_args(part)[0]) if get_origin(part) is Literal else part for part in parts)
        return cls(kinds) if set(kinds) <= {int, float, str, type(None)} else None

    def takes(self, value: object) -> bool:
        """Return whether a value is of this kind."""
        return type(value) in self.types or (type(value) is int and float in self.types)

    @property
    def words(self) -> str:
        """What it takes, for people."""
        return "a number" if float in self.types else "a whole number" if int in self.types else "a word"


def check(right: bool, name: str, value: object, needed: str) -> None:
    """Raise `ConfigError` if the option `name` is not right; `needed` says what would be."""
    if not right:
        raise ConfigError(f"{name} = {value!r}: it has to be {needed}")


def check_count(name: str, value: int) -> None:
    """Raise `ConfigError` unless a value is a whole number above 0."""
    check(isinstance(value, int) and value > 0, name, value, "a whole number above 0")
