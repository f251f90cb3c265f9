"""Byte-level language modelling on text files, split by file.

By default the text is the Python standard library's own source: real, present on
every machine, and free of downloads. It differs a little between Python versions;
`TextData.describe` says exactly what was read. Files are concatenated with a zero
byte between them, which occurs in no text file.
"""

import dataclasses
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hybrid_attn.training.data.batch import IGNORE, Batch, generator

VOCAB = 256
"""Bytes."""

# Installed packages are no part of the library, and some systems ship it without its
# tests. The tables under encodings and pydoc_data are generated: near copies of each
# other, so that a held-out table would have a twin in the train split. The build's
# _sysconfigdata files name the machine that built it.
_SKIPPED_DIRECTORIES = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
_SKIPPED_PREFIX = "_sysconfigdata"
_SNIFFED = 8192


class NoTextError(FileNotFoundError):
    """No text file under the given path."""


@dataclasses.dataclass(frozen=True)
class _File:
    name: str
    path: Path

    @property
    def hash(self) -> int:
        """Stable over runs, machines and Python versions, unlike `hash(name)`."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big")


class TextData:
    """Bytes of text files, cut by file into a train and a held-out split.

    A file is held out when a stable hash of its path (relative to the given directory)
    says so, so that adding files never moves another between the splits. Where that
    leaves a split empty: among several files, the one with the lowest hash is held
    out; a single file is cut, and its end is held out.

    Attributes:
      train_bytes: uint8[n], the train split.
      heldout_bytes: uint8[m], the held-out split.
      train_files: names of the files in `train_bytes`, in their order.
      heldout_files: names of the files in `heldout_bytes`, in their order.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        heldout_percent: float = 5.0,
        max_bytes: int = 64 * 2**20,
    ) -> None:
        """Reads the files.

        Args:
          path: a file, a directory (every text file below it; hidden ones and those
            with a zero byte at their start are not text), a glob such as
            "docs/**/*.md", or None for the standard library's `*.py` files.
          heldout_percent: expected share of files held out, above 0 and below 100.
          max_bytes: the most that is read and kept in memory. Above it whole files
            are left out, in the order of their hashes, so that the rest is still a
            fair sample; a single larger file is cut.

        Raises:
          NoTextError: nothing to read there.
          ValueError: a share or a size out of range, or too little text to split.
        """
        if not 0 < heldout_percent < 100:
            raise ValueError(
                f"heldout_percent must lie between 0 and 100, got {heldout_percent}"
            )
        if max_bytes < 2:
            raise ValueError(f"max_bytes must be at least 2, got {max_bytes}")
        self._source = "standard library" if path is None else os.fspath(path)
        files = _library() if path is None else _found(os.fspath(path))
        contents = _read(files, max_bytes)
        if not contents:
            raise NoTextError(f"no text under {self._source!r}: every file is empty")
        parts = _split(contents, heldout_percent)
        train, heldout = (
            [part for part in parts if part[1] is held] for held in (False, True)
        )
        self.train_files = tuple(name for name, _, _ in train)
        self.heldout_files = tuple(name for name, _, _ in heldout)
        self.train_bytes = _join([data for _, _, data in train])
        self.heldout_bytes = _join([data for _, _, data in heldout])

    def batch(self, seed: int, step: int, size: int, length: int) -> Batch:
        """Random crops of the train split, the same for the same arguments.

        Args:
          seed: at least 0.
          step: at least 0.
          size: b, crops.
          length: t, bytes a crop.

        Returns:
          `Batch` of shape [size, length]; the target of a byte is the next one.

        Raises:
          ValueError: the train split is shorter than length + 1 bytes.
        """
        _long_enough("train", self.train_bytes, length)
        rng = generator("text", seed, step)
        start = rng.integers(0, len(self.train_bytes) - length, size)
        return _crops(self.train_bytes, start, length)

    def heldout(
        self, length: int, *, size: int = 8, windows: int | None = None
    ) -> Iterator[Batch]:
        """Fixed windows of the held-out split, each byte at most once.

        Args:
          length: t, bytes a window.
          size: b, windows a batch; the last batch is filled up with rows without
            targets, so that every batch has one shape.
          windows: how many, evenly spread over the split; None or more than there
            are takes all.

        Yields:
          `Batch` of shape [size, length].

        Raises:
          ValueError: the split is shorter than length + 1 bytes, or a count below 1.
        """
        _long_enough("held-out", self.heldout_bytes, length)
        if size < 1 or (windows is not None and windows < 1):
            raise ValueError(
                f"size and windows must be at least 1, got {size} and {windows}"
            )
        available = (len(self.heldout_bytes) - 1) // length
        count = available if windows is None else min(windows, available)
        start = np.arange(count) * available // count * length
        for first in range(0, count, size):
            crops = _crops(self.heldout_bytes, start[first : first + size], length)
            fill = ((0, size - len(crops.tokens)), (0, 0))
            yield Batch(
                np.pad(crops.tokens, fill),
                np.pad(crops.targets, fill, constant_values=IGNORE),
                np.pad(crops.distance, fill),
            )

    def describe(self) -> dict[str, int | str]:
        """What was read, without a path of this machine: for reports."""
        digest = hashlib.sha256(self.train_bytes)
        digest.update(self.heldout_bytes)
        named = self._source if os.sep not in self._source else "given path"
        return {
            "source": named,
            "python": sysconfig.get_python_version(),
            "train_files": len(self.train_files),
            "train_bytes": len(self.train_bytes),
            "heldout_files": len(self.heldout_files),
            "heldout_bytes": len(self.heldout_bytes),
            "sha256": digest.hexdigest(),
        }


def _library() -> list[_File]:
    """The standard library's sources, by sorted name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED_DIRECTORIES]
        files += [
            Path(directory, name)
            for name in names
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIX)
        ]
    if not files:
        raise NoTextError("this Python has no *.py files in its standard library")
    return _named(files, root)


def _found(path: str) -> list[_File]:
    """The text files that a path or glob means, by sorted name."""
    given = Path(path)
    if given.is_file():
        return [_File(given.name, given)]
    if given.is_dir():
        root, files = given, []
        for directory, below, names in os.walk(given):
            below[:] = [name for name in below if not name.startswith(".")]
            files += [Path(directory, n) for n in names if not n.startswith(".")]
    else:
        found = [Path(name) for name in glob.glob(path, recursive=True)]
        files = [file for file in found if file.is_file()]
        root = Path(os.path.commonpath([file.parent for file in files] or ["."]))
    files = [file for file in files if _is_text(file)]
    if not files:
        raise NoTextError(
            f"no text file under {path!r}: give a file, a directory or a glob"
        )
    return _named(files, root)


def _named(files: list[Path], root: Path) -> list[_File]:
    named = [_File(file.relative_to(root).as_posix(), file) for file in files]
    return sorted(named, key=lambda file: file.name)


def _is_text(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return b"\0" not in stream.read(_SNIFFED)


def _read(files: list[_File], max_bytes: int) -> list[tuple[_File, bytes]]:
    """Contents of the files that fit, sorted by name, empty ones left out."""
    left = max_bytes
    contents = []
    for file in sorted(files, key=lambda file: file.hash):
        size = file.path.stat().st_size
        if len(files) > 1 and size > left:
            continue
        with file.path.open("rb") as stream:
            data = stream.read(left)
        left -= len(data)
        if data:
            contents.append((file, data))
    return sorted(contents, key=lambda item: item[0].name)


def _split(
    contents: list[tuple[_File, bytes]], percent: float
) -> list[tuple[str, bool, bytes]]:
    """(name, held out, data) of every part; both splits have at least one."""
    if len(contents) == 1:
        file, data = contents[0]
        cut = len(data) - max(1, round(len(data) * percent / 100))
        if cut < 1:
            raise ValueError(f"{file.name} is too short to split: {len(data)} bytes")
        return [(file.name, False, data[:cut]), (file.name, True, data[cut:])]
    # 1/10000 is as fine as a share of files can matter.
    held = [file.hash % 10_000 < percent * 100 for file, _ in contents]
    order = sorted(range(len(contents)), key=lambda i: contents[i][0].hash)
    if not any(held):
        held[order[0]] = True
    if all(held):
        held[order[-1]] = False
    return [(f.name, h, data) for (f, data), h in zip(contents, held, strict=True)]


def _join(parts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"\0".join(parts), np.uint8)


def _long_enough(split: str, data: np.ndarray, length: int) -> None:
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if len(data) < length + 1:
        raise ValueError(
            f"the {split} split has {len(data)} bytes: windows of {length} need at "
            f"least {length + 1}"
        )


def _crops(data: np.ndarray, start: np.ndarray, length: int) -> Batch:
    crop = data[start[:, None] + np.arange(length + 1)].astype(np.int32)
    tokens = np.ascontiguousarray(crop[:, :-1])
    targets = np.ascontiguousarray(crop[:, 1:])
    return Batch(tokens, targets, np.zeros_like(tokens))
