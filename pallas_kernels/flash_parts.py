"""What attention kernels of compute capability 9.0 do with a block of keys.

A warpgroup keeps the sums of 64 rows in registers, their channels in pieces: a product
is awaited piece by piece and added to scaled sums, which is one instruction an element
and takes no more registers than a piece.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.softmax import MASKED

ROWS = 64
# Swizzled tiles that matrix products read from shared memory.
TILING = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
# A row's maximum starts between every logit and `MASKED`, so that masked weights are
# zero even while nothing was seen.
_NOTHING = MASKED / 2


def _accumulator(columns: int) -> Any:
    """float32[64, columns] of zeros that products are added to."""
    return plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32)


class Sums(NamedTuple):
    """Softmax sums of 64 rows, in the layout of the matrix products.

    Attributes:
      weighted: float32[64, c] for each piece of channels.
      total, maximum: float32[64].
    """

    weighted: tuple[Array, ...]
    total: Array
    maximum: Array


def empty(pieces: int, channels: int) -> Sums:
    """The sums over no keys: ``pieces`` pieces of ``channels``."""
    by_row = plgpu.Layout.WGMMA.reduce(1)
    weighted = jnp.zeros((ROWS, channels), jnp.float32)
    return Sums(
        (plgpu.layout_cast(weighted, plgpu.Layout.WGMMA),) * pieces,
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
        plgpu.layout_cast(jnp.full((ROWS,), _NOTHING, jnp.float32), by_row),
    )


def products(rows: Any, keys: Any, pieces: int, size: int) -> Array:
    """rows · keysᵀ, float32[64, size], in shared memory and awaited.

    Args:
      rows: bfloat16[pieces, 64, c]; keys: bfloat16[pieces, size, c].
    """

    def multiply(sums_ref: Any) -> Array:
        for piece in range(pieces):
            plgpu.wgmma(sums_ref, rows.at[piece], keys.at[piece].transpose((1, 0)))
        return sums_ref[...]

    return pl.run_scoped(multiply, _accumulator(size))


def add_keys(
    sums: Sums, logits: Array, values: Sequence[Any], weight_ref: Any
) -> tuple[Sums, Array]:
    """(the sums with one more block of keys, the block's share of the total).

    Args:
      logits: float32[64, keys] in base 2; `MASKED` where a key is not seen.
      values: for each piece bfloat16[keys, c] in shared memory, finite.
      weight_ref: bfloat16[64, keys] of shared memory, this warpgroup's own.

    The share, float32[64], is relative to the new maximum, as the sums are.
    """
    maximum = jnp.maximum(sums.maximum, jnp.max(logits, axis=1))
    weights = jnp.exp2(logits - over_columns(maximum, logits.shape[1]))
    factor = jnp.exp2(sums.maximum - maximum)
    share = jnp.sum(weights, axis=1)
    weight_ref[...] = weights.astype(jnp.bfloat16)
    plgpu.commit_smem()

    def add(weighted: Array, value: Any) -> Array:
        def multiply(product_ref: Any) -> Array:
            plgpu.wgmma(product_ref, weight_ref, value)
            return product_ref[...]

        product = pl.run_scoped(multiply, _accumulator(weighted.shape[1]))
        return weighted * over_columns(factor, weighted.shape[1]) + product

    weighted = tuple(map(add, sums.weighted, values))
    return Sums(weighted, sums.total * factor + share, maximum), share


def over_columns(x: Array, columns: int) -> Array:
    """A number per row, [64], at every column: [64, columns]."""
    return jax.lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def over_rows(x: Array) -> Array:
    """A number per column, [columns], at every row: [64, columns]."""
    return jax.lax.broadcast_in_dim(x, (ROWS, x.shape[0]), (1,))


def columns(size: int) -> Array:
    """int32[64, size], the index of the column."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, size), 1, layout=plgpu.Layout.WGMMA)


def load_rows(ref: Any) -> Array:
    """A number per row of device memory, [64]."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def load_columns(ref: Any) -> Array:
    """A number per column of device memory, [columns]."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def clear(ref: Any, seen: Array, pieces: int, size: int, channels: int) -> None:
    """Zeros in the keys from ``seen`` of bfloat16[pieces, size, channels].

    A weight of zero does not keep NaN out of a product.
    """

    @pl.loop(0, pieces)
    def _(piece: Array) -> None:
        for row in range(0, size, ROWS):
            for column in range(0, channels, 64):
                block = ref.at[piece, pl.ds(row, ROWS), pl.ds(column, 64)]
                x = plgpu.load(block, layout=plgpu.Layout.WGMMA)
                index = plgpu.broadcasted_iota(
                    jnp.int32, (ROWS, 64), 0, layout=plgpu.Layout.WGMMA
                )
                block[...] = jnp.where(index + row < seen, x, jnp.zeros_like(x))

    plgpu.commit_smem()


def store(sums: Sums, refs: Any, at: tuple[Any, ...], row: Any, part: Any) -> None:
    """Writes the sums of 64 rows.

    Args:
      refs: `Partial` of references in device memory, float32[..., rows, h] and
        [..., rows].
      at: index of the axes before the rows.
      row: the first row.
      part: which of the warpgroups that divide the channels this is.
    """
    rows = pl.ds(row, ROWS)
    pieces, channels = len(sums.weighted), sums.weighted[0].shape[1]
    for i, weighted in enumerate(sums.weighted):
        lanes = pl.ds((part * pieces + i) * channels, channels)
        plgpu.store(refs.weighted.at[*at, rows, lanes], weighted, optimized=False)

    @pl.when(part == 0)
    def _() -> None:
        seen = sums.total > 0
        maximum = jnp.where(seen, sums.maximum, jnp.full_like(sums.maximum, MASKED))
        plgpu.store(refs.total.at[*at, rows], sums.total, optimized=False)
        plgpu.store(refs.maximum.at[*at, rows], maximum, optimized=False)
