"""What attention kernels of compute capability 9.0 do with a block of keys.

A warpgroup keeps the sums of 64 rows in registers, where products are added to them. Of
more channels than fit, several warpgroups keep a part each.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launch
from pallas_kernels.device import current_target
from pallas_kernels.register_tiles import ROWS, over_columns
from pallas_kernels.softmax import MASKED

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
      weighted: float32[64, c].
      total, maximum: float32[64].
    """

    weighted: Array
    total: Array
    maximum: Array


def empty(channels: int) -> Sums:
    """The sums over no keys."""
    by_row = plgpu.Layout.WGMMA.reduce(1)
    weighted = jnp.zeros((ROWS, channels), jnp.float32)
    return Sums(
        plgpu.layout_cast(weighted, plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
        plgpu.layout_cast(jnp.full((ROWS,), _NOTHING, jnp.float32), by_row),
    )


def products(rows: Any, keys: Any, parts: int, size: int) -> Array:
    """rows · keysᵀ, float32[64, size], in shared memory and awaited.

    Args:
      rows: bfloat16[parts, 64, c]; keys: bfloat16[parts, size, c].
    """

    def multiply(sums_ref: Any) -> Array:
        for part in range(parts):
            plgpu.wgmma(sums_ref, rows.at[part], keys.at[part].transpose((1, 0)))
        return sums_ref[...]

    return pl.run_scoped(multiply, _accumulator(size))


def add_keys(
    sums: Sums, logits: Array, values: Any, weight_ref: Any
) -> tuple[Sums, Array]:
    """(the sums with one more block of keys, the block's share of the total).

    Args:
      logits: float32[64, keys] in base 2; `MASKED` where a key is not seen.
      values: bfloat16[keys, c] in shared memory, finite.
      weight_ref: bfloat16[64, keys] of shared memory, this warpgroup's own.

    The share, float32[64], is relative to the new maximum, as the sums are.
    """
    maximum = jnp.maximum(sums.maximum, jnp.max(logits, axis=1))
    weights = jnp.exp2(logits - over_columns(maximum, logits.shape[1]))
    factor = jnp.exp2(sums.maximum - maximum)
    share = jnp.sum(weights, axis=1)
    weight_ref[...] = weights.astype(jnp.bfloat16)
    plgpu.commit_smem()

    weighted = sums.weighted * over_columns(factor, sums.weighted.shape[1])
    weighted = _accumulate(weighted, weight_ref, values)
    return Sums(weighted, sums.total * factor + share, maximum), share


def _accumulate(sums: Array, a: Any, b: Any) -> Array:
    """sums + a·b, of a and b in shared memory, in the registers of the sums."""

    def multiply(sums_ref: Any) -> None:
        plgpu.wgmma(sums_ref, a, b)

    if not current_target().interpreted:
        initial: Any = plgpu.WGMMAAccumulatorRef.init(sums)
        return pl.run_state(multiply)(initial)

    # Interpretation knows no sums that start with a value. On a device the product's
    # own registers would not fit beside those of the sums.
    def product(sums_ref: Any) -> Array:
        multiply(sums_ref)
        return sums_ref[...]

    return sums + pl.run_scoped(product, _accumulator(sums.shape[1]))


def clear(ref: Any, seen: Array, parts: int, size: int, channels: int) -> None:
    """Zeros in the keys from ``seen`` of bfloat16[parts, size, channels].

    A weight of zero does not keep NaN out of a product.
    """

    @pl.loop(0, parts)
    def _(part: Array) -> None:
        for row in range(0, size, ROWS):
            for column in range(0, channels, 64):
                block = ref.at[part, pl.ds(row, ROWS), pl.ds(column, 64)]
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
    channels = sums.weighted.shape[1]
    lanes = pl.ds(part * channels, channels)
    launch.store(refs.weighted.at[*at, rows, lanes], sums.weighted)

    @pl.when(part == 0)
    def _() -> None:
        seen = sums.total > 0
        maximum = jnp.where(seen, sums.maximum, jnp.full_like(sums.maximum, MASKED))
        launch.store(refs.total.at[*at, rows], sums.total)
        launch.store(refs.maximum.at[*at, rows], maximum)
