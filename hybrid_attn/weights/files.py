"""Safetensors files: headers first, then one tensor at a time.

The `safetensors` package checks a file's header; the bytes are read and written here,
because its numpy form holds no bfloat16, float8 or float4 and maps whole files, which
would count every page touched against the memory of a large model.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARDS = "model-*.safetensors"

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    # Two numbers a byte; the shape in the header counts numbers.
    "F4": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "F4"}


class WeightsError(ValueError):
    """A file or tensor is not what a model needs; the text names it."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies: bytes ``offset``..``offset + size`` of a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def read(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """The tensor, or ``count`` rows of its first axis from ``first`` on.

        Raises:
          WeightsError: the file is shorter than its header says.
        """
        shape = list(self.shape)
        if self.dtype == "F4":
            shape[-1] //= 2
        start, size = self.offset, self.size
        if count is not None:
            row = size // shape[0]
            start, size, shape[0] = start + first * row, count * row, count
        data = np.empty((size,), np.uint8)
        with self.file.open("rb") as file:
            file.seek(start)
            if file.readinto(memoryview(data)) != size:
                raise WeightsError(f"{self.file}: truncated at byte {start}")
        return data.view(DTYPES[self.dtype]).reshape(shape)


def read_headers(directory: Path) -> dict[str, Stored]:
    """All tensors of a directory by name, from its index or its files.

    Raises:
      WeightsError: no files, an index that disagrees with them, or a damaged file.
    """
    index = directory / INDEX
    if not index.exists():
        # Other safetensors may lie beside the model's.
        single = directory / SINGLE
        files = [single] if single.exists() else sorted(directory.glob(_SHARDS))
        if not files:
            raise WeightsError(f"{directory}: no {SINGLE}, {INDEX} or {_SHARDS}")
        return _joined(files)
    try:
        where = json.loads(index.read_text())["weight_map"]
        files = sorted({directory / file for file in where.values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index}: not an index of weights ({error!r})") from error
    absent = [str(file) for file in files if not file.exists()]
    if absent:
        raise WeightsError(f"{index} names files that are not there: {absent}")
    stored = _joined(files)
    wrong = sorted(
        name
        for name, file in where.items()
        if name not in stored or stored[name].file.name != file
    )
    if wrong or len(stored) != len(where):
        wrong += sorted(set(stored) - set(where))
        raise WeightsError(f"{index} and the files disagree about {listed(wrong)}")
    return stored


def _joined(files: list[Path]) -> dict[str, Stored]:
    joined: dict[str, Stored] = {}
    for file in files:
        header = read_header(file)
        twice = sorted(set(header) & set(joined))
        if twice:
            raise WeightsError(f"{file}: tensors of another file too: {listed(twice)}")
        joined.update(header)
    return joined


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file.

    Raises:
      WeightsError: names the file: truncated, a bad header, an unknown dtype.
    """
    try:
        # Checks the header, and that the tensors fill the file without a gap.
        with safetensors.safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (safetensors.SafetensorError, OSError, ValueError, struct.error) as error:
        raise WeightsError(f"{path}: not a whole safetensors file ({error})") from error
    header.pop("__metadata__", None)
    stored = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise WeightsError(
                f"{path}: {name} has dtype {entry['dtype']}; expected one of "
                f"{', '.join(DTYPES)}"
            )
        begin, end = entry["data_offsets"]
        stored[name] = Stored(
            path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin
        )
    return stored


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A tensor to be written; ``make`` gives its value when its turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_files(
    directory: Path, tensors: Iterable[Outgoing], shard_bytes: int
) -> list[Path]:
    """Writes one file, or shards of about ``shard_bytes`` with an index.

    Each file is complete under another name before it gets its own.
    """
    shards: list[list[Outgoing]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    if len(shards) == 1:
        path = directory / SINGLE
        _write(path, shards[0])
        return [path]
    paths, where = [], {}
    for number, shard in enumerate(shards, 1):
        path = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(path, shard)
        paths.append(path)
        where.update({tensor.name: path.name for tensor in shard})
    total = sum(tensor.size for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    return paths


def _write(path: Path, tensors: list[Outgoing]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            value = np.ascontiguousarray(tensor.make())
            if value.dtype != tensor.dtype or value.shape != tensor.shape:
                raise WeightsError(
                    f"{tensor.name}: {value.dtype}{list(value.shape)} to write where "
                    f"{tensor.dtype}{list(tensor.shape)} was declared"
                )
            file.write(value.reshape(-1).view(np.uint8).data)
    partial.rename(path)


def listed(names: Iterable[str], limit: int = 40) -> str:
    """Names for an error text, the first ``limit`` of them."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
