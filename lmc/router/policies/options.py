"""The checks of policies' options. A wrong one is an error before the first request."""

from lmc.errors import ConfigError


def check(right: bool, name: str, value: object, needed: str) -> None:
    """Raise `ConfigError` if the option `name` is not right; `needed` says what would be."""
    if not right:
        raise ConfigError(f"{name} = {value!r}: it has to be {needed}")


def check_count(name: str, value: int) -> None:
    """Raise `ConfigError` unless a value is a whole number above 0."""
    check(isinstance(value, int) and value > 0, name, value, "a whole number above 0")
