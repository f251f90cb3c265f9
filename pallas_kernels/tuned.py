"""Tables of the fastest configurations of kernels, one JSON file a device kind.

    {"format": "pallas_kernels.tuned", "version": 1, "device_kind": "NVIDIA H200",
     "jax": "0.12.0",
     "entries": [{"op": "window_attention", "sizes": {"t": 8192, "h": 512},
                  "dtype": "bfloat16", "config": {"block_k": 64, "stages": 2},
                  "microseconds": 310.2}]}

An entry whose config and microseconds are null names a shape that waits for a device;
the kernel's own default serves it. `autotune` makes the others.
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.device import current_target

FORMAT = "pallas_kernels.tuned"
VERSION = 1
DIRECTORY = Path(__file__).with_name("tuned")
# Powers of two by which all sizes together may differ from an entry's.
_FARTHEST = 3.0


class TableError(ValueError):
    """A table that cannot be used; names the file and what is wrong in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The configuration for one shape.

    Attributes:
      op: the operation's name, as its `Dispatch` has it.
      sizes: what the configuration depends on, by the name of the axis.
      dtype: name of the element type.
      config: fields of the kernel's ``Config``; None where nothing was measured.
      microseconds: of one call, measured on the table's device; None like ``config``.
    """

    op: str
    sizes: Mapping[str, int]
    dtype: str
    config: Mapping[str, int | str | bool] | None = None
    microseconds: float | None = None

    @property
    def key(self) -> tuple[str, tuple[tuple[str, int], ...], str]:
        """What there is one entry of in a table."""
        return self.op, tuple(sorted(self.sizes.items())), self.dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """All entries of one device kind; ``jax`` is the version they were timed with."""

    device_kind: str
    jax: str | None
    entries: tuple[Entry, ...]

    def lookup(self, op: str, sizes: Mapping[str, int], dtype: str) -> Sequence[Entry]:
        """The measured entries that may serve, nearest first.

        Those of the same operation, dtype and names of sizes whose sizes differ by at
        most three doublings in all; of equally near ones the earlier.
        """
        found = [
            (distance, entry)
            for entry in self.entries
            if entry.config is not None and entry.op == op and entry.dtype == dtype
            if (distance := _distance(entry.sizes, sizes)) <= _FARTHEST
        ]
        return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]

    def updated(self, entries: Sequence[Entry], *, jax: str | None) -> "Table":
        """The table with entries added; those of the same key are replaced."""
        by_key = {entry.key: entry for entry in (*self.entries, *entries)}
        ordered = sorted(by_key.values(), key=lambda entry: entry.key)
        return dataclasses.replace(self, entries=tuple(ordered), jax=jax)


class Question(NamedTuple):
    """What a kernel asked for while it was traced; see `choose`."""

    op: str
    sizes: Mapping[str, int]
    dtype: str
    legal: Sequence[Any]


_asked: contextvars.ContextVar[list[Question] | None] = contextvars.ContextVar(
    "asked", default=None
)
_assumed: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar(
    "assumed", default=None
)


@contextlib.contextmanager
def recorded() -> Iterator[list[Question]]:
    """What the kernels that are traced inside ask for."""
    token = _asked.set([])
    try:
        asked = _asked.get()
        assert asked is not None
        yield asked
    finally:
        _asked.reset(token)


@contextlib.contextmanager
def assumed(configs: Mapping[str, Any]) -> Iterator[None]:
    """Operations traced inside take these configurations, by name, and no table's.

    None stands for the kernel's own default. jit's cache does not know of it: trace a
    function that was not traced before.
    """
    token = _assumed.set({**(_assumed.get() or {}), **configs})
    try:
        yield
    finally:
        _assumed.reset(token)


def choose[C](
    op: str,
    sizes: Mapping[str, int],
    dtype: Any,
    legal: Sequence[C],
    *,
    device_kind: str | None = None,
    directory: Path = DIRECTORY,
) -> C | None:
    """The configuration that was fastest at the nearest shape.

    Args:
      op: the operation's name.
      sizes: of the call, by the names that the op's entries have.
      dtype: of the call.
      legal: the configurations that the kernel takes for this call (dataclasses).
      device_kind: None for the device that is traced for.
      directory: of the tables.

    Returns:
      One of ``legal``, or None: the kernel's own default is then the best guess.

    Raises:
      TableError: the device's table is damaged or belongs to another device.
      ValueError: a configuration is `assumed` that is not legal.
    """
    name = np.dtype(dtype).name
    if (asked := _asked.get()) is not None:
        asked.append(Question(op, dict(sizes), name, tuple(legal)))
    if op in (configs := _assumed.get() or {}):
        config = configs[op]
        if config is not None and config not in legal:
            raise ValueError(f"{op}: {config} is not legal for {dict(sizes)}")
        return config
    kind = current_target().kind if device_kind is None else device_kind
    table = load(kind, directory)
    if table is None:
        return None
    for entry in table.lookup(op, sizes, name):
        for config in legal:
            # A config that is not legal for these sizes leaves it to the next nearest.
            if dataclasses.asdict(config) == entry.config:  # pyright: ignore
                return config
    return None


def path_of(device_kind: str, directory: Path = DIRECTORY) -> Path:
    """The file of a device kind, which need not exist."""
    return directory / (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()) + ".json")


def load(device_kind: str, directory: Path = DIRECTORY) -> Table | None:
    """The table of a device kind, None where there is no file; read once a process.

    Raises:
      TableError: the file is damaged, of another version, or of another device.
    """
    return _load(device_kind, directory)


@functools.cache
def _load(device_kind: str, directory: Path) -> Table | None:
    path = path_of(device_kind, directory)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: {error}") from error
    table = parse(text, str(path))
    if table.device_kind != device_kind:
        raise TableError(
            f"{path}: of device kind {table.device_kind!r}, expected {device_kind!r}"
        )
    return table


def parse(text: str, name: str) -> Table:
    """The table that a text holds.

    Args:
      text: JSON.
      name: of the file, for messages.

    Raises:
      TableError: what is wrong, and in which file.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise TableError(f"{name}: not JSON ({error})") from error
    keys = {"format", "version", "device_kind", "jax", "entries"}
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TableError(f"{name}: no table of tuned kernels: format is not {FORMAT!r}")
    if data.get("version") != VERSION:
        raise TableError(
            f"{name}: version {data.get('version')!r}, expected {VERSION}; tune again"
        )
    if set(data) != keys or not isinstance(data["entries"], list):
        raise TableError(f"{name}: keys {sorted(data)}, expected {sorted(keys)}")
    if not isinstance(data["device_kind"], str):
        raise TableError(f"{name}: device_kind {data['device_kind']!r} is no name")
    entries = [
        _entry(item, f"{name}: entry {number}")
        for number, item in enumerate(data["entries"])
    ]
    if len({entry.key for entry in entries}) < len(entries):
        raise TableError(f"{name}: two entries of one operation, sizes and dtype")
    return Table(
        device_kind=data["device_kind"], jax=data["jax"], entries=tuple(entries)
    )


def write(table: Table, directory: Path = DIRECTORY) -> Path:
    """Writes a table whole or not at all; returns its path."""
    path = path_of(table.device_kind, directory)
    data = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(table)}
    text = json.dumps(data, indent=1) + "\n"
    parse(text, str(path))
    directory.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=directory, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.chmod(part, 0o644)
    os.replace(part, path)
    _load.cache_clear()
    return path


def _entry(item: Any, where: str) -> Entry:
    names = {field.name for field in dataclasses.fields(Entry)}
    if not isinstance(item, dict) or set(item) != names:
        got = sorted(item) if isinstance(item, dict) else item
        raise TableError(f"{where}: keys {got}, expected {sorted(names)}")
    sizes, config, time = item["sizes"], item["config"], item["microseconds"]
    whole = isinstance(sizes, dict) and all(
        type(size) is int and size > 0 for size in sizes.values()
    )
    if not whole or not sizes:
        raise TableError(f"{where}: sizes {sizes!r}, expected numbers from 1 by name")
    if config is not None and (not isinstance(config, dict) or not config):
        raise TableError(f"{where}: config {config!r}, expected values by name")
    if (config is None) != (time is None):
        raise TableError(f"{where}: a config without microseconds, or the reverse")
    if time is not None and not (isinstance(time, int | float) and 0 < time < math.inf):
        raise TableError(f"{where}: microseconds {time!r}, expected a time above 0")
    if not isinstance(item["op"], str) or not isinstance(item["dtype"], str):
        raise TableError(f"{where}: op and dtype are names")
    return Entry(**item)


def _distance(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """Doublings between two shapes; infinite where the axes differ."""
    if set(a) != set(b):
        return math.inf
    return sum(abs(math.log2(a[name] / b[name])) for name in a)
