"""Block sizes of the attention kernels of compute capability 9.0."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.launch import PROCESSORS
from pallas_kernels.register_tiles import ROWS

# Of shared memory per block, less what barriers and reductions take.
_SHARED_BYTES = 224 * 1024
# Most channels of 64 float32 sums that one warpgroup's registers hold.
_MOST_CHANNELS = 256
# Fewer steps would write more sums than they read keys.
_LEAST_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes that can be tuned.

    Attributes:
      block_k: keys per step.
      stages: blocks of keys in shared memory.
      row_blocks: tiles of 64 rows that share the keys of a block.
      splits: parts that the keys are divided into, each computed on its own.
    """

    block_k: int
    stages: int
    row_blocks: int = 1
    splits: int = 1


class Shape(NamedTuple):
    """What a configuration depends on.

    Attributes:
      b, k: batch and key/value heads.
      rows: of one key/value head, tokens times the heads of its group.
      s: keys.
      h: channels.
      shared: values are the keys.
    """

    b: int
    k: int
    rows: int
    s: int
    h: int
    shared: bool

    @property
    def arrays(self) -> int:
        """Arrays of keys and values."""
        return 1 if self.shared else 2

    @property
    def parts(self) -> int:
        """Warpgroups that divide the channels of one tile."""
        return -(-self.h // _MOST_CHANNELS)

    @property
    def channels(self) -> int:
        """Channels of each part."""
        return self.h // self.parts

    def shared_bytes(self, config: Config) -> int:
        """Bytes of shared memory that a block of the kernel takes."""
        row = 2 * self.h
        query = config.row_blocks * ROWS * row
        keys = config.stages * config.block_k * row * self.arrays
        weights = config.row_blocks * self.parts * ROWS * config.block_k * 2
        return query + keys + weights

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name, as tables of tuned configurations have them."""
        return {
            "b": self.b,
            "k": self.k,
            "rows": self.rows,
            "s": self.s,
            "h": self.h,
            "arrays": self.arrays,
        }

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return 0 in (self.b, self.k, self.rows, self.s)

    def bytes_moved(self, splits: int) -> int:
        """Bytes read and written in device memory if each key is read once."""
        rows = self.rows * (2 + 4 * splits)
        return self.b * self.k * self.h * (rows + 2 * self.arrays * self.s)


def shape_of(query: Any, key: Any, value: Any) -> Shape:
    """The `Shape` of query [b, t, n, h], key [b, s, k, h] and value (None: the key)."""
    b, t, n, h = query.shape
    _, s, k, _ = key.shape
    return Shape(b, k, t * (n // k), s, h, value is None or value is key)


def refuses(query: Any, key: Any, value: Any) -> str | None:
    """Why arrays are not served, or None."""
    for x in (query, key, value):
        if x.dtype != jnp.bfloat16:
            return f"multiplies bfloat16, not {x.dtype}"
    b, _, n, h = query.shape
    parts = -(-h // _MOST_CHANNELS)
    if not 0 < parts <= 2 or h % (64 * parts):
        return f"takes 64, 128, 192, 256, 384 or 512 channels a head, not {h}"
    _, s, k, _ = key.shape
    for x in (key, value):
        if x.shape != (b, s, k, h) or n % k:
            return f"takes keys and values of queries {query.shape}, not {x.shape}"
    return None


def legal(shape: Shape, splits: tuple[int, ...] = (1,)) -> tuple[Config, ...]:
    """The configurations that a shape can be computed with.

    With one stage nothing is copied while anything is multiplied: only where no more
    fit.
    """
    blocks = (1, 2) if shape.parts == 1 and shape.rows > ROWS else (1,)
    for least in (2, 1):
        every = (
            Config(block_k, stages, row_blocks, split)
            for block_k in (64, 128)
            for stages in range(least, 4)
            for row_blocks in blocks
            for split in splits
        )
        fitting = [c for c in every if shape.shared_bytes(c) <= _SHARED_BYTES]
        if fitting:
            return tuple(fitting)
    raise ValueError(f"{shape}: no configuration fits shared memory")


def best(configs: Sequence[Config]) -> Config:
    """The one that is expected to be fastest.

    A second stage hides the copies; then the more rows share a block of keys and the
    larger it is, the better.
    """
    return max(
        configs,
        key=lambda c: (min(c.stages, 2), c.row_blocks, c.block_k, min(c.stages, 3)),
    )


def usual_splits(shape: Shape, block_k: int = 64) -> int:
    """Splits that fill the device without more output than input; a power of two."""
    blocks = max(shape.b * shape.k * -(-shape.rows // ROWS), 1)
    most = min(PROCESSORS // blocks, shape.s // (block_k * _LEAST_STEPS))
    return 1 << max(most, 1).bit_length() - 1
