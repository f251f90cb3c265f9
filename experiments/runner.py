"""What every program of `experiments` shares: flags, a strict config, a directory.

A program is a frozen config dataclass and a function:

    runner.define_flags("configs/quickstart.py")

    def main(config: Config, workdir: runner.Workdir) -> None: ...

    if __name__ == "__main__":
        runner.run("ablate", Config, main)

It is called as `python -m experiments.ablate --config=FILE.py --workdir=DIR
[--config.train.steps=300 ...]`. What the caller got wrong ends in one line on standard
error and exit status 2.
"""

import dataclasses
import difflib
import re
import runpy
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from absl import app, flags
from ml_collections import config_flags

from experiments.progress import Progress, print_table
from experiments.workdir import Workdir, WorkdirError, write_atomic

__all__ = [
    "ConfigError",
    "Progress",
    "Workdir",
    "WorkdirError",
    "define_flags",
    "print_table",
    "run",
    "to_dataclass",
    "write_atomic",
]

# What ml_collections lets escape for an override of a key that it lacks.
_ESCAPES = (KeyError, AttributeError, TypeError)
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=\s]+)")


class ConfigError(ValueError):
    """A config that does not fit its dataclass."""


def define_flags(default_config: str | None = None) -> None:
    """Defines --config, --workdir and --overwrite; once, when a program is imported.

    Args:
      default_config: path of the config file that stands in for a missing --config.
    """
    try:
        config_flags.DEFINE_config_file(
            "config", default_config, "the config file", lock_config=True
        )
    except _ESCAPES:
        # Overrides are applied to the default at once, before flags are parsed.
        message = _explain_overrides(sys.argv, default_config)
        if message is None:
            raise
        _fail(message)
    flags.DEFINE_string("workdir", None, "directory of the run; made if missing")
    flags.DEFINE_bool("overwrite", False, "replace another run in --workdir")


def run[C](
    program: str, config_class: type[C], main: Callable[[C, Workdir], None]
) -> None:
    """Parses the flags, opens the run's directory, calls `main`, and exits.

    Args:
      program: name of the program, kept in config.json.
      config_class: frozen dataclass that the config is converted to.
      main: called with the config and the open directory; a ConfigError or
        WorkdirError that it raises ends the program in one line too.
    """

    def body(argv: Sequence[str]) -> None:
        if len(argv) > 1:
            _fail(f"unexpected argument {argv[1]!r}; flags are written --name=value")
        if not flags.FLAGS.workdir:
            _fail("--workdir=DIR is missing: the directory of the run")
        if flags.FLAGS["config"].value is None:
            _fail("--config=FILE.py is missing: a file with a get_config() function")
        try:
            config = to_dataclass(config_class, flags.FLAGS.config)
            workdir = Workdir(
                flags.FLAGS.workdir,
                program,
                dataclasses.asdict(typing.cast(Any, config)),
                overwrite=flags.FLAGS.overwrite,
            )
        except (ConfigError, WorkdirError, OSError) as error:
            _fail(str(error))
        try:
            main(config, workdir)
        except (ConfigError, WorkdirError) as error:
            _fail(str(error))
        finally:
            workdir.close()

    app.run(body, flags_parser=_parse_flags)


def to_dataclass[C](cls: type[C], config: Any, path: str = "config") -> C:
    """Converts a ConfigDict, or any mapping, to a frozen dataclass, strictly.

    Nested dataclasses, tuples, lists, dicts, Literal and Optional fields are followed;
    a list is taken for a tuple and an int for a float, and nothing else is converted.
    A key that is missing takes the field's default.

    Args:
      cls: the dataclass.
      config: keys are the field names.
      path: where the config stands, for messages.

    Raises:
      ConfigError: an unknown key (naming the nearest one), a missing key, a value of
        another type (naming both types), or what the dataclass itself refuses.
    """
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise _wrong(path, f"the keys of {cls.__name__}", config)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls)) if f.init}
    for key in config:
        if key not in fields:
            raise ConfigError(_unknown(path, str(key), fields))
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in config:
            values[name] = _convert(hints[name], config[name], f"{path}.{name}")
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{path}.{name} is missing")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _convert(kind: Any, value: Any, path: str) -> Any:
    """The value as the annotated type, or ConfigError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(kind, arguments, value, path)
    if origin is typing.Literal:
        for allowed in arguments:
            if type(allowed) is type(value) and allowed == value:
                return value
        raise _wrong(path, f"one of {', '.join(map(repr, arguments))}", value)
    if dataclasses.is_dataclass(kind):
        return to_dataclass(typing.cast(type, kind), value, path)
    if origin in (tuple, list) or kind in (tuple, list):
        return _convert_sequence(kind, origin or kind, arguments, value, path)
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(path, _name(kind), value)
        of_key, of_value = arguments or (Any, Any)
        return {
            _convert(of_key, key, f"{path} key"): _convert(
                of_value, item, f"{path}.{key}"
            )
            for key, item in value.items()
        }
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is type(None) and value is None:
        return None
    # bool is a subclass of int, but True steps is a slip of the pen.
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise _wrong(path, _name(kind), value)


def _convert_union(kind: Any, arguments: tuple, value: Any, path: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    others = [argument for argument in arguments if argument is not type(None)]
    if len(others) == 1:
        return _convert(others[0], value, path)
    # An exact type first: in `int | float` the number 1 stays an int.
    others.sort(key=lambda argument: argument is not type(value))
    for argument in others:
        try:
            return _convert(argument, value, path)
        except ConfigError:
            continue
    raise _wrong(path, _name(kind), value)


def _convert_sequence(
    kind: Any, origin: Any, arguments: tuple, value: Any, path: str
) -> Any:
    if not isinstance(value, list | tuple):
        raise _wrong(path, _name(kind), value)
    if origin is list or not arguments or arguments[-1] is Ellipsis:
        kinds = [arguments[0] if arguments else Any] * len(value)
    else:
        kinds = list(arguments)
    if len(kinds) != len(value):
        raise _wrong(path, f"{len(kinds)} items", value)
    pairs = enumerate(zip(kinds, value, strict=True))
    return origin(_convert(k, item, f"{path}[{i}]") for i, (k, item) in pairs)


def _name(kind: Any) -> str:
    return (
        kind.__name__
        if isinstance(kind, type) and not typing.get_args(kind)
        else (str(kind).replace("typing.", ""))
    )


def _wrong(path: str, expected: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{path}: expected {expected}, got {type(value).__name__} {value!r}"
    )


def _unknown(path: str, key: str, known: Iterable[str]) -> str:
    names = sorted(str(name) for name in known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.4)
    hint = f"did you mean {path}.{near[0]}?" if near else f"it has {', '.join(names)}"
    return f"unknown key {path}.{key}; {hint}"


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return app.parse_flags_with_usage(argv)
    except _ESCAPES:
        message = _explain_overrides(argv, flags.FLAGS["config"].default)
        if message is None:
            raise
        _fail(message)


def _explain_overrides(argv: Sequence[str], path: str | None) -> str | None:
    """What is wrong with the first --config.a.b that names no key of the config.

    ``path`` is the file that stands in for a missing --config.
    """
    for index, argument in enumerate(argv):
        match = re.fullmatch(r"--?config(?:=(.*))?", argument)
        if match:
            path = match[1] if match[1] is not None else argv[index + 1]
    if not isinstance(path, str):
        return None
    file, _, argument = path.partition(":")
    config = runpy.run_path(file)["get_config"](*([argument] if argument else []))
    for argument in argv:
        match = _OVERRIDE.match(argument)
        here, at = config, "config"
        for key in match[1].split(".") if match else []:
            if not hasattr(here, "keys"):
                return f"unknown key {at}.{key}; {at} is a {type(here).__name__}"
            if key not in here:
                return _unknown(at, key, here.keys())
            here, at = here[key], f"{at}.{key}"
    return None


def _fail(message: str) -> typing.NoReturn:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)
