"""Block sizes of the kernel for chosen entries."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels.flash_config import Shape, usual_splits
from pallas_kernels.register_tiles import ROWS

# Of shared memory per block, less what barriers and reductions take.
_SHARED_BYTES = 225 * 1024
# The bandwidth of one multiprocessor's share of the memory times its latency, twice.
_BYTES_COMING = 40 * 1024
# Most rows and columns that one bulk copy moves.
_MOST_COPIED = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes that can be tuned.

    Attributes:
      block: entries per step.
      stages: blocks of entries that are ready for the matrix products.
      part: entries that are made ready at a time.
      parts: of entries on their way.
      splits: parts that a list is divided into, each computed on its own.
    """

    block: int
    stages: int
    part: int
    parts: int
    splits: int = 1


class Sizes(NamedTuple):
    """What a configuration depends on.

    Attributes:
      b, t, k: batch, queries and key/value heads.
      rows: query heads of one key/value head.
      e: entries.
      h: channels.
      c: entries that a query may choose.
      arrays: 1 where values are the keys, otherwise 2.
      record: bytes of one packed entry, 0 for bfloat16 entries.
    """

    b: int
    t: int
    k: int
    rows: int
    e: int
    h: int
    c: int
    arrays: int
    record: int = 0

    @property
    def names(self) -> dict[str, int]:
        """The sizes by name, as tables of tuned configurations have them."""
        return {
            "queries": self.b * self.t * self.k,
            "rows": self.rows,
            "h": self.h,
            "c": self.c,
            "arrays": self.arrays,
        }

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return 0 in self[:7]

    @property
    def flash(self) -> Shape:
        """How warpgroups divide the channels."""
        return Shape(self.b, self.k, self.rows, self.e, self.h, self.arrays == 1)

    def swizzle(self, config: Config) -> int:
        """Bytes of a row in a tile of shared memory that the products read."""
        return 32 if self.record else min(128, 2 * config.block)

    @property
    def staged(self) -> int:
        """Bytes of one entry on its way; copies write at multiples of 128."""
        return -(-self.record // 128) * 128 if self.record else 2 * self.h

    def shared_bytes(self, config: Config) -> int:
        """Bytes of shared memory that a block of the kernel takes."""
        ready = config.stages * config.block * 2 * self.h * self.arrays
        coming = config.parts * config.part * self.staged * self.arrays
        weights = self.flash.parts * ROWS * config.block * 2
        steps = -(-self.c // (config.block * config.splits))
        chosen = 4 * steps * config.block
        return ROWS * 2 * self.h + ready + coming + weights + chosen


def legal(sizes: Sizes) -> tuple[Config, ...]:
    """The configurations that sizes can be computed with."""
    # Narrow tiles, and an odd number of them side by side, fill a warpgroup's lanes 32
    # rows at a time.
    wide = sizes.record == 0 and sizes.flash.channels % 128 == 0
    every = (
        Config(block, stages, part, parts, splits)
        for block in (32, 64)
        for stages in (1, 2)
        for part in (16, 32, 64)
        for parts in (2, 4)
        for splits in sorted({1, _splits(sizes, block)})
        if (16 if wide and block >= 64 else 32) <= part <= block
    )
    return tuple(
        c
        for c in every
        if sizes.shared_bytes(c) <= _SHARED_BYTES
        and -(-sizes.c // (c.block * c.splits)) <= _MOST_COPIED
    )


def _splits(sizes: Sizes, block: int) -> int:
    """`usual_splits` where every query has a list of its own."""
    lists = sizes.flash._replace(b=sizes.b * sizes.t, s=sizes.c)
    return usual_splits(lists, block)


def best(configs: Sequence[Config], sizes: Sizes) -> Config:
    """The one that is expected to be fastest.

    Splits fill the device, a second ready block hides how entries are made ready, and
    enough bytes on their way hide the memory's latency; then the less shared memory,
    the more blocks run beside each other.
    """

    def rank(config: Config) -> tuple[int, ...]:
        coming = config.parts * config.part * sizes.staged * sizes.arrays
        return (
            config.splits,
            config.stages,
            min(coming, _BYTES_COMING),
            -sizes.shared_bytes(config),
        )

    return max(configs, key=rank)
