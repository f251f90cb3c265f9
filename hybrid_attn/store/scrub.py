"""CRCs of what is resident: sealed arrays in host or device memory, and a scrubber."""

import dataclasses
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hybrid_attn.store.blocks import as_bytes, crc32c


@dataclasses.dataclass(frozen=True)
class Sealed:
    """Arrays of a sealed block, and the CRC32C that each of them had then.

    Attributes:
      name: of the block, for reports.
      arrays: by name; anything that `np.asarray` takes, in any memory.
      crcs: CRC32C of each array's bytes in C order.
    """

    name: str
    arrays: Mapping[str, Any]
    crcs: Mapping[str, int]

    @classmethod
    def of(cls, name: str, arrays: Mapping[str, Any]) -> "Sealed":
        """Seals arrays as they are now; from here on nothing may write to them."""
        return cls(name, arrays, {k: _crc(array) for k, array in arrays.items()})

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def damaged(self) -> list[str]:
        """Names of the arrays that are not as they were sealed."""
        return [k for k, array in self.arrays.items() if _crc(array) != self.crcs[k]]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A resident array that changed: the block's name and the array's."""

    block: str
    array: str


class Scrubber:
    """Checks resident blocks a few at a time, each once a round in a random order.

    A block is checked at the latest after two rounds, however often it is added.
    Safe for threads; reading an array from a device is the caller's cost.
    """

    def __init__(
        self, *, seed: int = 0, report: Callable[[Finding], None] | None = None
    ):
        """``report`` is called for every damaged array, in the thread that found it."""
        self._random = random.Random(seed)
        self._report = report
        self._blocks: dict[str, Sealed] = {}
        self._ahead: list[str] = []
        self._guard = threading.Lock()
        self.checked_bytes = 0

    def add(self, block: Sealed) -> None:
        """Watches a block; one of the same name is replaced."""
        with self._guard:
            self._blocks[block.name] = block

    def remove(self, name: str) -> None:
        """Stops watching; a name that is not watched is no error."""
        with self._guard:
            self._blocks.pop(name, None)

    def scrub(self, sample: int | None = None) -> list[Finding]:
        """Checks the next ``sample`` blocks, or all; returns what changed.

        A damaged block is not watched any more: whoever holds it fetches it again and
        adds it anew.

        Raises:
          ValueError: a sample below 0.
        """
        if sample is not None and sample < 0:
            raise ValueError(f"sample={sample}: expected a number of blocks")
        found = []
        for block in self._next(sample):
            bad = block.damaged()
            with self._guard:
                self.checked_bytes += block.nbytes
                if bad and self._blocks.get(block.name) is block:
                    del self._blocks[block.name]
            found += [Finding(block.name, array) for array in bad]
        if self._report is not None:
            for finding in found:
                self._report(finding)
        return found

    def _next(self, sample: int | None) -> list[Sealed]:
        with self._guard:
            if sample is None:
                return list(self._blocks.values())
            chosen: dict[str, Sealed] = {}
            while len(chosen) < min(sample, len(self._blocks)):
                if not self._ahead:
                    self._ahead = list(self._blocks)
                    self._random.shuffle(self._ahead)
                name = self._ahead.pop()
                if name in self._blocks:
                    chosen[name] = self._blocks[name]
            return list(chosen.values())


def _crc(array: Any) -> int:
    return crc32c(as_bytes(np.asarray(array)))
