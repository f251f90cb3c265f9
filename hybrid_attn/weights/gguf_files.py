"""GGUF files: metadata and tensors, read by the format's description.

The header is read here, every length checked against the file: a damaged one is an
error that names the place, whatever its bytes say. The package `gguf` knows the
quantised types and turns them into float32.
"""

import dataclasses
import functools
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_attn.weights.files import DTYPES, Stored, WeightsError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
# Types that hold plain numbers, by the names of `DTYPES`.
_PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_PLAIN |= {30: "BF16"}
_MAX_AXES = 4
# Rows are unpacked in pieces of about so many numbers: the unpacking makes several
# copies of what it is given.
_PIECE = 1 << 20


def package():
    """The package `gguf`.

    Raises:
      ModuleNotFoundError: it is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "quantised .gguf files need the package gguf: "
            "pip install 'hybrid_attn[pretrained]'"
        ) from error
    return gguf


@dataclasses.dataclass(frozen=True)
class Quantized(Stored):
    """A tensor of a quantised type; `read` gives float32.

    Attributes:
      name: of the tensor, for errors.
      number: of the type, in the format's numbering.
    """

    name: str
    number: int

    def read(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """The tensor, or ``count`` rows of its first axis from ``first`` on.

        Raises:
          WeightsError: a file shorter than its header says, or scales that are not
            numbers; names the file and the tensor.
        """
        shape = list(self.shape)
        if count is not None:
            shape[0] = count
        rows, columns = math.prod(shape[:-1]), shape[-1]
        width = self.size // max(1, math.prod(self.shape[:-1]))
        begin = self.offset
        if count is not None:
            begin += first * (self.size // self.shape[0])
        out = np.empty((rows, columns), np.float32)
        step = max(1, _PIECE // columns)
        with self.file.open("rb") as file:
            file.seek(begin)
            for row in range(0, rows, step):
                n = min(step, rows - row)
                data = np.empty((n, width), np.uint8)
                if file.readinto(memoryview(data).cast("B")) != data.size:
                    raise WeightsError(f"{self.file}: {self.name} is truncated")
                out[row : row + n] = _unpack(data, self.number)
        if not np.isfinite(out).all():
            raise WeightsError(
                f"{self.file}: {self.name} ({self.dtype}) is damaged: it holds "
                "numbers that are not finite"
            )
        return out.reshape(shape)


def _unpack(data: np.ndarray, number: int) -> np.ndarray:
    gguf = package()
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(number))


@functools.cache
def _quantized_type(number: int) -> tuple[str, int, int]:
    """(name, numbers in a block, bytes of a block) of a quantised type.

    Raises:
      WeightsError: the package cannot unpack it.
    """
    gguf = package()
    try:
        kind = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        _unpack(np.zeros((1, size), np.uint8), number)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise WeightsError(
            f"type {number}, which the package gguf cannot unpack"
        ) from (error)
    return kind.name, block, size


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """The metadata and the tensors of a file; shapes are [outputs, inputs].

    Raises:
      WeightsError: not a whole GGUF file, or a tensor of an unknown type or beyond
        the file's end; names the file, and the tensor or the field.
      ModuleNotFoundError: a quantised tensor without the package `gguf`.
    """
    fields, tensors, end, size = _header(path)
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise WeightsError(f"{path}: general.alignment={alignment!r}: damaged")
    start = -(-end // alignment) * alignment
    stored: dict[str, Stored] = {}
    reached = start
    for name, shape, number, offset in sorted(tensors, key=lambda t: t[3]):
        tensor = _tensor(path, name, shape, number, start + offset)
        begin, stop = tensor.offset, tensor.offset + tensor.size
        if offset % alignment or begin < reached:
            raise WeightsError(
                f"{path}: {name} is damaged: byte {offset} of the data is not a "
                f"multiple of {alignment}, or belongs to another tensor"
            )
        if stop > size:
            raise WeightsError(
                f"{path}: {name} is truncated: it ends at byte {stop} of {size}"
            )
        stored[name] = tensor
        reached = stop
    return fields, stored


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata alone.

    Raises:
      WeightsError: as `read_gguf`, tensors aside.
    """
    return _header(path)[0]


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], number: int, offset: int
) -> Stored:
    count = math.prod(shape)
    if number in _PLAIN:
        dtype = _PLAIN[number]
        return Stored(path, dtype, shape, offset, count * DTYPES[dtype].itemsize)
    try:
        dtype, block, size = _quantized_type(number)
    except WeightsError as error:
        raise WeightsError(f"{path}: {name} has {error}") from error
    if shape[-1] % block:
        raise WeightsError(
            f"{path}: {name} {list(shape)} is damaged: {dtype} has rows of whole "
            f"blocks of {block}"
        )
    return Quantized(path, dtype, shape, offset, count // block * size, name, number)


def _header(path: Path):
    """(metadata, [(name, shape, type, offset)], end of the header, size of file)."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise WeightsError(f"{path}: not a GGUF file: {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                fields, tensors, end = _parse(_Cursor(path, data))
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error})") from error
    return fields, tensors, end, size


class _Cursor:
    """Reads forward through a header; what lies beyond the file is an error."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0
        self.what = "the header"

    def damaged(self, problem: str) -> WeightsError:
        return WeightsError(
            f"{self.path}: truncated or damaged at byte {self.at}, in {self.what}: "
            f"{problem}"
        )

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise self.damaged(f"{size} bytes where {len(self.data) - self.at} are")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.damaged("text that is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.numbers(kind, 1)[0]
        if kind != _ARRAY:
            raise self.damaged(f"a value of type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            return self.numbers(inner, count)
        # A string takes 8 bytes at least, so that a wrong count ends here.
        if inner != _STRING or count > (len(self.data) - self.at) // 8:
            raise self.damaged(f"an array of {count} values of type {inner}")
        return [self.text() for _ in range(count)]

    def numbers(self, kind: int, count: int) -> list:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def _parse(cursor: _Cursor):
    if cursor.take(4) != _MAGIC:
        raise WeightsError(f"{cursor.path}: not a GGUF file: it starts otherwise")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise WeightsError(
            f"{cursor.path}: version {version} of GGUF: expected one of {_VERSIONS}, "
            "little-endian"
        )
    tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
    fields: dict[str, Any] = {}
    for index in range(field_count):
        cursor.what = f"field {index} of {field_count}"
        name = cursor.text()
        cursor.what = f"field {name!r}"
        if name in fields:
            raise cursor.damaged("the name occurs twice")
        fields[name] = cursor.value(cursor.number("I"))
    tensors, names = [], set()
    for index in range(tensor_count):
        cursor.what = f"tensor {index} of {tensor_count}"
        name = cursor.text()
        cursor.what = f"tensor {name!r}"
        axes = cursor.number("I")
        if name in names or not 1 <= axes <= _MAX_AXES:
            raise cursor.damaged(f"{axes} axes, or a name that occurs twice")
        names.add(name)
        # The fastest axis stands first.
        shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]
        if 0 in shape:
            raise cursor.damaged(f"shape {list(shape)}")
        tensors.append((name, shape, cursor.number("I"), cursor.number("Q")))
    return fields, tensors, cursor.at
