"""Fields of a foreign configuration: what is missing or not supported, by name."""

from typing import Any


class ConfigError(ValueError):
    """A field of a checkpoint's configuration is missing or not supported."""


def expect(field: str, value: Any, *expected: Any, where: str = "config.json") -> Any:
    """The value, if it is one of those expected.

    Raises:
      ConfigError: names the file, the field, what it is and what was expected.
    """
    if value not in expected:
        raise ConfigError(
            f"{where}: {field}={value!r}: expected "
            + " or ".join(repr(e) for e in expected)
        )
    return value


class Fields:
    """The fields of a configuration; a missing one is an error that names it.

    ``where`` names the file in error texts.
    """

    def __init__(self, values: dict[str, Any], where: str = "config.json"):
        self.values, self.where = values, where

    def __getitem__(self, field: str) -> Any:
        if self.values.get(field) is None:
            raise ConfigError(f"{self.where}: {field} is missing")
        return self.values[field]

    def get(self, field: str, default: Any = None) -> Any:
        value = self.values.get(field)
        return default if value is None else value
