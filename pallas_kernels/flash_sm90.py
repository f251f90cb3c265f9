"""Attention over intervals of keys for compute capability 9.0, and its parts.

A row is one query head of one token. A block of the grid works on tiles of 64 rows, and
the heads of a key/value head's group lie beside each other, so that they share the keys
that are read. A row sees the keys low..high-1, by index or by a position per key, and a
logit may fall by a slope per position of distance. One warpgroup copies keys and values
into shared memory, `Config.stages` blocks ahead; the others multiply.

The sums of 64 rows by 512 channels do not fit a warpgroup's registers. Above 256
channels two warpgroups therefore keep half of the channels each, and both compute all
logits: exchanging them would take as long, because products that are half as wide are
bound by reading shared memory. Where values are the keys, each block is read once.

General, for kernels that fetch keys in another way: `flash_parts` (the softmax over one
more block of keys, the output) and `flash_rows`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import flash_parts
from pallas_kernels.flash_config import Config, Shape
from pallas_kernels.flash_parts import TILING, Sums, add_keys, empty, products
from pallas_kernels.flash_rows import Rows, merge_splits
from pallas_kernels.launch import divide_warpgroups, kernel, store
from pallas_kernels.register_tiles import (
    ROWS,
    columns,
    load_columns,
    load_rows,
    over_columns,
    over_rows,
)
from pallas_kernels.softmax import LOG2_E, MASKED, Partial

# Rows of an array that the copies see as one tile.
_COPIED_ROWS = 8
# Registers of a thread of the warpgroup that copies.
_COPYING = 40


def attend(
    rows: Rows,
    key: Array,
    value: Array | None,
    *,
    scale: float,
    config: Config,
    key_position: Array | None = None,
    poisoned: bool = False,
    mass_block: int | None = None,
    name: str,
) -> tuple[Partial, Array | None]:
    """Softmax sums of rows over the keys that each sees.

    Args:
      rows: of r rows.
      key, value: bfloat16[b, s, k, h]; value None where it is the key.
      scale: factor on q·k.
      config: of `legal`.
      key_position: int32[b, s], which low and high are compared with; None for the
        index. By index, blocks that no row of a tile sees are not read.
      poisoned: keys from the highest that a tile sees may hold NaN.
      mass_block: keys per block whose share of a row's weights is returned too, a
        multiple of ``config.block_k``; not with ``key_position``.
      name: of the kernel.

    Returns:
      (`Partial` with its rows not split into tokens and heads, float32[b, k, r, ...];
      shares float32[b, k, r, ceil(s / mass_block)] or None).
    """
    b, k, r, h = rows.query.shape
    s = key.shape[1]
    shape = Shape(b, k, r, s, h, value is None)
    if shape.empty:
        blocks = 0 if mass_block is None else -(-s // mass_block)
        return Partial(
            jnp.zeros((b, k, r, h), jnp.float32),
            jnp.zeros((b, k, r), jnp.float32),
            jnp.full((b, k, r), MASKED, jnp.float32),
        ), None if mass_block is None else jnp.zeros((b, k, r, blocks), jnp.float32)
    tile = config.row_blocks * ROWS
    low, high = (_pad(x, 1, -(-r // tile) * tile) for x in (rows.low, rows.high))
    steps = -(-s // config.block_k)
    if key_position is None:
        high = jnp.minimum(high, s)
        bounds = _bounds(low, high, s, config)
    else:
        every = jnp.array([0, 0, 0, steps, s], jnp.int32)
        bounds = jnp.broadcast_to(every, (b, low.shape[1] // tile, 5))
        # A padding's position is below every low.
        key_position = jnp.pad(
            key_position,
            [(0, 0), (0, steps * config.block_k - s)],
            constant_values=jnp.iinfo(jnp.int32).min,
        )
    inputs = {
        "query": _copyable(rows.query, 2, ROWS),
        "key": _copyable(key, 1, config.block_k),
        "value": None if value is None else _copyable(value, 1, config.block_k),
        "low": low,
        "high": high,
        "bounds": bounds,
        "slope": None if rows.slope is None else _pad(rows.slope, 1, low.shape[1]),
        "position": key_position,
    }
    given = {name: x for name, x in inputs.items() if x is not None}
    out, shares = _call(given, shape, scale, config, poisoned, mass_block, name)
    partial = merge_splits(Partial(*(x[:, :, :, :r] for x in out)))
    if shares is None or mass_block is None:
        return partial, None
    # Steps that a tile did not read hold whatever memory held.
    step = jnp.arange(steps, dtype=jnp.int32)
    read = (step >= bounds[:, :, :1]) & (step < bounds[:, :, 3:4])
    read = jnp.repeat(read, tile, axis=1)[:, None, :r]
    share, maximum = (x[..., :r].swapaxes(2, 3) for x in shares)
    # Only a row that sees nothing ends below a step's maximum.
    lead = jnp.minimum(maximum - partial.maximum[..., None], 0.0)
    share = share * jnp.exp2(lead)
    total = jnp.where(partial.total > 0, partial.total, 1.0)
    share = jnp.where(read, share, 0.0) / total[..., None]
    per = mass_block // config.block_k
    share = jnp.pad(share, [(0, 0)] * 3 + [(0, -steps % per)])
    return partial, jnp.sum(share.reshape(b, k, r, -1, per), axis=4)


def _pad(x: Array, axis: int, size: int) -> Array:
    """The array with its last element repeated up to a size."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pad, mode="edge") if pad[axis][1] else x


def _copyable(x: Array, axis: int, least: int) -> Array:
    """The array as the copies take it: whole tiles of 8 rows, one block at least.

    Beyond its end they write zeros, so that no block has to be whole.
    """
    size = x.shape[axis]
    return _pad(x, axis, max(-(-size // _COPIED_ROWS) * _COPIED_ROWS, least))


def _bounds(low: Array, high: Array, s: int, config: Config) -> Array:
    """int32[b, tiles, 5]: steps of a tile, those without a mask, and its last key.

    First step, first step that all rows see whole, first after those, first after all,
    and the key after the last that any row sees.
    """
    tile, size = config.row_blocks * ROWS, config.block_k
    low, high = (x.reshape(x.shape[0], -1, tile) for x in (low, high))
    sees = low < high
    first = jnp.min(jnp.where(sees, jnp.maximum(low, 0), s), axis=2)
    limit = jnp.max(jnp.where(sees, high, 0), axis=2)
    begin, end = first // size, -(-limit // size)
    end = jnp.maximum(begin, end)
    whole_begin = jnp.clip(-(-jnp.max(low, axis=2) // size), begin, end)
    whole_end = jnp.clip(jnp.min(high, axis=2) // size, whole_begin, end)
    return jnp.stack([begin, whole_begin, whole_end, end, limit], axis=2).astype(
        jnp.int32
    )


def _call(
    inputs: dict[str, Array],
    shape: Shape,
    scale: float,
    config: Config,
    poisoned: bool,
    mass_block: int | None,
    name: str,
) -> tuple[Partial, tuple[Array, Array] | None]:
    """Partial[splits, b, k, rows of whole tiles, ...]; shares and maximum of steps.

    The latter two, float32[b, k, steps, rows], are relative to the maximum beside them.
    """
    size, stages, splits = config.block_k, config.stages, config.splits
    parts, channels = shape.parts, shape.channels
    consumers = config.row_blocks * parts
    stored = ("key",) if shape.shared else ("key", "value")
    copies = parts * len(stored)
    padded = inputs["low"].shape[1]
    names = tuple(inputs)
    step_outputs = 0 if mass_block is None else 2

    def body(*refs: Any) -> None:
        read = dict(zip(names, refs, strict=False))
        out, shares = refs[len(names) :][:3], refs[len(names) + 3 :][:step_outputs]
        query, *blocks, weights, loaded, freed, query_loaded, last_loaded = refs[
            len(names) + 3 + step_outputs :
        ]
        keys, values = blocks[0], blocks[-1]
        row, head, tile, split = (
            jax.lax.axis_index(axis) for axis in ("row", "head", "tile", "split")
        )
        first_row = tile * (config.row_blocks * ROWS)
        begin, whole_begin, whole_end, end, limit = (
            read["bounds"][row, tile, i] for i in range(5)
        )
        if splits > 1:
            share = (end - begin + (splits - 1)) // splits
            begin = jnp.minimum(begin + split * share, end)
            end = jnp.minimum(begin + share, end)
        member = jax.lax.axis_index("warpgroup")

        def fetch(step: Array, barrier: Callable[[Array], Any]) -> Array:
            """Copies the keys and values of a step; returns their stage."""
            stage = jax.lax.rem(step - begin, stages)

            @pl.when(step - begin >= stages)
            def _() -> None:
                plgpu.barrier_wait(freed.at[stage])

            for array, target in zip(stored, blocks, strict=True):
                for part in range(parts):
                    source = read[array].at[
                        row,
                        pl.ds(step * size, size),
                        head,
                        pl.ds(part * channels, channels),
                    ]
                    plgpu.copy_gmem_to_smem(
                        source, target.at[stage, part], barrier(stage)
                    )
            return stage

        def copy() -> None:
            for block in range(config.row_blocks):
                rows = pl.ds(first_row + block * ROWS, ROWS)
                for part in range(parts):
                    plgpu.copy_gmem_to_smem(
                        read["query"].at[
                            row, head, rows, pl.ds(part * channels, channels)
                        ],
                        query.at[block, part],
                        query_loaded.at[block],
                    )

            @pl.loop(begin, end - 1 if poisoned else end)
            def _(step: Array) -> None:
                fetch(step, lambda stage: loaded.at[stage])

            if not poisoned:
                return

            # The last block is cleared before it is handed on.
            @pl.when(begin < end)
            def _() -> None:
                stage = fetch(end - 1, lambda stage: last_loaded)
                plgpu.barrier_wait(last_loaded)
                seen = limit - (end - 1) * size

                @pl.when(seen < size)
                def _() -> None:
                    flash_parts.clear(values.at[stage], seen, parts, size, channels)

                for _copy in range(copies):
                    plgpu.barrier_arrive(loaded.at[stage])

        def multiply() -> None:
            block, part = jax.lax.div(member, parts), jax.lax.rem(member, parts)
            own_row = first_row + block * ROWS
            own = pl.ds(own_row, ROWS)
            low = load_rows(read["low"].at[row, own])
            high = load_rows(read["high"].at[row, own])
            slope = None
            if "slope" in read:
                slope = load_rows(read["slope"].at[head, own])
            plgpu.barrier_wait(query_loaded.at[block])

            def step(index: Array, sums: Sums) -> Sums:
                stage = jax.lax.rem(index - begin, stages)
                first = index * size
                if "position" in read:
                    position = over_rows(
                        load_columns(read["position"].at[row, pl.ds(first, size)])
                    )
                else:
                    position = columns(size) + first
                plgpu.barrier_wait(loaded.at[stage])
                logits = products(query.at[block], keys.at[stage], parts, size)
                logits = logits * (scale * LOG2_E)
                if slope is not None:
                    distance = over_columns(high - 1, size) - position
                    fall = over_columns(slope, size)
                    logits = logits - fall * distance.astype(jnp.float32)

                def masked(logits: Array) -> Array:
                    seen = (position >= over_columns(low, size)) & (
                        position < over_columns(high, size)
                    )
                    return jnp.where(seen, logits, jnp.full_like(logits, MASKED))

                if "position" in read:
                    logits = masked(logits)
                else:
                    whole = (index >= whole_begin) & (index < whole_end)
                    logits = jax.lax.cond(whole, lambda x: x, masked, logits)
                sums, share = add_keys(
                    sums, logits, values.at[stage, part], weights.at[member]
                )
                plgpu.barrier_arrive(freed.at[stage])
                if shares:
                    at = (row, head, index, own)

                    @pl.when(part == 0)
                    def _() -> None:
                        for ref, x in zip(shares, (share, sums.maximum), strict=True):
                            store(ref.at[*at], x)

                return sums

            sums = jax.lax.fori_loop(begin, end, step, empty(channels))
            flash_parts.store(sums, Partial(*out), (split, row, head), own_row, part)

        divide_warpgroups(member, consumers, _COPYING, multiply, copy)

    def shared(*sizes: int) -> Any:
        return plgpu.SMEM(sizes, jnp.bfloat16, transforms=TILING)

    lead = (splits, shape.b, shape.k, padded)
    by_step = (shape.b, shape.k, -(-shape.s // size), padded)
    pairs = shape.b * shape.k * shape.rows * shape.s
    out = kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(sizes, jnp.float32)
            for sizes in ((*lead, shape.h), lead, lead, *(by_step,) * step_outputs)
        ],
        scratch_types=[
            shared(config.row_blocks, parts, ROWS, channels),
            *(shared(stages, parts, size, channels) for _ in stored),
            shared(consumers, ROWS, size),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=parts, num_barriers=config.row_blocks),
            plgpu.Barrier(num_arrivals=copies),
        ],
        # Tiles last: CUDA takes 2^31 blocks along that axis, 2^16 along the one before
        # it and along the product of the others.
        grid=(shape.b, shape.k, splits, padded // (config.row_blocks * ROWS)),
        grid_names=("row", "head", "split", "tile"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * shape.h,
            transcendentals=pairs,
            bytes_accessed=shape.bytes_moved(splits),
        ),
    )(*inputs.values())
    return Partial(*out[:3]), (out[3], out[4]) if step_outputs else None
