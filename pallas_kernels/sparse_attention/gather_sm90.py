"""Attention over chosen entries for compute capability 9.0, however they are stored.

A block works on one query token and up to 64 heads of one key/value head. One warpgroup
fetches the chosen entries: a bulk copy a row, and from there into the swizzled tiles
that the matrix products read, which no copy can address row by row. The others compute,
as `flash_sm90` does. Entries that values share with keys are read once.

A list's -1 is copied from beyond the array's end, which gives zeros and reads nothing.
Fewer heads than 64 are padded: reading the entries is the bound, not the products.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import flash_parts
from pallas_kernels.flash_rows import merge_splits
from pallas_kernels.launch import divide_warpgroups, kernel, store
from pallas_kernels.register_tiles import ROWS, load_columns, over_rows
from pallas_kernels.softmax import LOG2_E, MASKED, Partial
from pallas_kernels.sparse_attention.config import Config, Sizes
from pallas_kernels.sparse_attention.xla import mass_of

# Registers of a thread that copies and makes entries ready.
_COPYING = 88


class Fetch(NamedTuple):
    """How entries come into shared memory.

    Attributes:
      arrays: of entries in device memory, keys and, where they differ, values.
      staged: type of a scratch [parts, part, ...] that one array's rows are copied to.
      copies: (array, entry, kv head, scratch [part, ...], row of it) -> the source and
        the target of the row's copy.
      ready: (scratch [part, ...], tile [warpgroups, part, c]) stores rows in the tile.
    """

    arrays: tuple[Array, ...]
    staged: Any
    copies: Callable[..., tuple[Any, Any]]
    ready: Callable[[Any, Any], None]


def attend(
    query: Array,
    chosen: Array,
    sizes: Sizes,
    fetch: Fetch,
    *,
    scale: float,
    mass_block: int | None,
    config: Config,
    name: str,
) -> Partial | tuple[Partial, Array]:
    """Softmax sums over chosen entries that ``fetch`` brings in.

    Args:
      query: bfloat16[b, t, n, h].
      chosen: int32[b, t, c].
      scale: factor on q·k.
      mass_block: also return the mass of each block of so many entries.
      name: of the kernel.
    """
    b, t, k, g = sizes.b, sizes.t, sizes.k, sizes.rows
    padded = -(-g // ROWS) * ROWS
    query = query.reshape(b, t, k, g, sizes.h)
    if padded != g:
        query = jnp.pad(query, [(0, 0)] * 3 + [(0, padded - g), (0, 0)])
    steps = -(-sizes.c // (config.block * config.splits))
    own = steps * config.block
    pad = own * config.splits - sizes.c
    lists = jnp.pad(
        chosen.astype(jnp.int32), [(0, 0)] * 2 + [(0, pad)], constant_values=-1
    ).reshape(b, t, config.splits, own)
    last = jnp.where(lists >= 0, jnp.arange(1, own + 1, dtype=jnp.int32), 0)
    used = -(-jnp.max(last, axis=3) // config.block)
    sums, weights = _call(
        query,
        lists.reshape(*lists.shape[:3], steps, config.block),
        used,
        sizes,
        fetch,
        scale,
        config,
        mass_block is not None,
        name,
    )
    partial = Partial(*(x[:, :, :, :g] for x in merge_splits(sums)))
    if mass_block is None or weights is None:
        return partial
    # Weights are relative to the maximum of their step; those of other steps are what
    # the memory held before.
    weight, maximum = (x[..., :g, :] for x in (weights[0], weights[1][..., None]))
    read = jnp.arange(steps) < used.transpose(2, 0, 1)[:, :, None, :, None]
    read = read[..., None, None]
    total = jnp.where(partial.total > 0, partial.total, 1.0)[..., None, :, None]
    factor = jnp.exp2(maximum - partial.maximum[..., None, :, None])
    share = jnp.where(read, weight * (factor / (total * (k * g))), 0.0)
    share = jnp.sum(share, axis=(2, 5)).transpose(1, 2, 0, 3, 4)
    share = share.reshape(b, t, -1)[..., : sizes.c]
    return partial, mass_of(share, chosen, sizes.e, mass_block)


def _call(
    query: Array,
    chosen: Array,
    used: Array,
    sizes: Sizes,
    fetch: Fetch,
    scale: float,
    config: Config,
    weigh: bool,
    name: str,
) -> tuple[Partial, tuple[Array, Array] | None]:
    """`Partial` [splits, b, k, t, rows of whole tiles, ...]; the weights, if asked for.

    Weights, bfloat16[splits, b, k, t, steps, rows, block], are relative to the step's
    maximum, float32[splits, b, k, t, steps, rows].
    """
    b, t, k, padded, h = query.shape
    shape = sizes.flash
    consumers, channels = shape.parts, shape.channels
    arrays, size, stages = len(fetch.arrays), config.block, config.stages
    per_step = size // config.part
    row_tiles = padded // ROWS
    outputs = 2 if weigh else 0

    def body(query_ref, chosen_ref, used_ref, *refs) -> None:
        entries, refs = refs[:arrays], refs[arrays:]
        out, kept, scratch = refs[:3], refs[3 : 3 + outputs], refs[3 + outputs :]
        rows_ref, list_ref, weights, *scratch = scratch
        staged, tiles = scratch[:arrays], scratch[arrays:][:arrays]
        query_copied, list_copied, copied, loaded, freed = scratch[2 * arrays :]
        row, head, block = (jax.lax.axis_index(x) for x in ("row", "head", "block"))
        rest, split = _divided(block, config.splits)
        token, tile = _divided(rest, row_tiles)
        member = jax.lax.axis_index("warpgroup")
        steps = used_ref[row, token, split]
        first_row = tile * ROWS

        def bring() -> None:
            plgpu.copy_gmem_to_smem(
                chosen_ref.at[row, token, split], list_ref, list_copied
            )
            for part in range(consumers):
                plgpu.copy_gmem_to_smem(
                    query_ref.at[
                        row,
                        token,
                        head,
                        pl.ds(first_row, ROWS),
                        pl.ds(part * channels, channels),
                    ],
                    rows_ref.at[part],
                    query_copied,
                )
            plgpu.barrier_wait(list_copied)
            count = steps * per_step

            def copy(part: Array) -> None:
                slot = jax.lax.rem(part, config.parts)
                step = jax.lax.div(part, per_step)
                first = jax.lax.rem(part, per_step) * config.part

                # Unrolled, so that one index is read while another row is asked for.
                @pl.loop(0, config.part, unroll=4)
                def _(i: Array) -> None:
                    index = list_ref[step, first + i]
                    # Rows from the end of the array are zeros.
                    entry = jnp.where(index < 0, b * sizes.e, row * sizes.e + index)
                    for array, target in zip(entries, staged, strict=True):
                        source, target = fetch.copies(
                            array, entry, head, target.at[slot], i
                        )
                        plgpu.copy_gmem_to_smem(source, target, copied.at[slot])

            @pl.loop(0, jnp.minimum(count, config.parts))
            def _(part: Array) -> None:
                copy(part)

            @pl.loop(0, steps)
            def _(step: Array) -> None:
                stage = jax.lax.rem(step, stages)

                @pl.when(step >= stages)
                def _() -> None:
                    plgpu.barrier_wait(freed.at[stage])

                for i in range(per_step):
                    part = step * per_step + i
                    slot = jax.lax.rem(part, config.parts)
                    plgpu.barrier_wait(copied.at[slot])
                    for source, target in zip(staged, tiles, strict=True):
                        rows = pl.ds(i * config.part, config.part)
                        fetch.ready(source.at[slot], target.at[stage, :, rows])
                    # Orders the copies to come after these reads, too.
                    plgpu.commit_smem()

                    @pl.when(part + config.parts < count)
                    def _(part=part) -> None:
                        copy(part + config.parts)

                plgpu.barrier_arrive(loaded.at[stage])

        def multiply() -> None:
            plgpu.barrier_wait(query_copied)

            def step(index: Array, sums: flash_parts.Sums) -> flash_parts.Sums:
                stage = jax.lax.rem(index, stages)
                entry = load_columns(chosen_ref.at[row, token, split, index])
                plgpu.barrier_wait(loaded.at[stage])
                keys, values = tiles[0].at[stage], tiles[-1].at[stage]
                logits = flash_parts.products(rows_ref, keys, consumers, size)
                logits = jnp.where(
                    over_rows(entry) >= 0,
                    logits * (scale * LOG2_E),
                    jnp.full_like(logits, MASKED),
                )
                sums = flash_parts.add_keys(
                    sums, logits, values.at[member], weights.at[member]
                )[0]
                plgpu.barrier_arrive(freed.at[stage])
                if kept:
                    at = (split, row, head, token, index, pl.ds(first_row, ROWS))

                    @pl.when(member == 0)
                    def _() -> None:
                        store(kept[1].at[*at], sums.maximum)
                        plgpu.copy_smem_to_gmem(weights.at[0], kept[0].at[*at])
                        # The next step writes its weights to the same place.
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                return sums

            sums = jax.lax.fori_loop(0, steps, step, flash_parts.empty(channels))
            if kept:
                plgpu.wait_smem_to_gmem(0)
            at = (split, row, head, token)
            flash_parts.store(sums, Partial(*out), at, first_row, member)

        divide_warpgroups(member, consumers, _COPYING, multiply, bring)

    def tiled(*lead: int) -> Any:
        swizzle = sizes.swizzle(config)
        transforms = (
            plgpu.TilingTransform((8, swizzle // 2)),  # pyright: ignore
            plgpu.SwizzleTransform(swizzle),  # pyright: ignore
        )
        return plgpu.SMEM(lead, jnp.bfloat16, transforms=transforms)

    lead = (config.splits, b, k, t, padded)
    by_step = (*lead[:-1], chosen.shape[3], padded)
    pairs = b * t * k * padded * sizes.c
    entry_bytes = (sizes.record or 2 * h) * arrays
    out = kernel(
        body,
        out_type=[
            *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*lead, h), lead, lead)),
            *(
                jax.ShapeDtypeStruct((*by_step, size), jnp.bfloat16),
                jax.ShapeDtypeStruct(by_step, jnp.float32),
            )[:outputs],
        ],
        scratch_types=[
            tiled(consumers, ROWS, channels),
            plgpu.SMEM(chosen.shape[3:], jnp.int32),
            tiled(consumers, ROWS, size),
            *(fetch.staged(config.parts, config.part) for _ in range(arrays)),
            *(tiled(stages, consumers, size, channels) for _ in range(arrays)),
            plgpu.Barrier(num_arrivals=consumers),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=config.part * arrays, num_barriers=config.parts),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        ],
        # Queries along the last axis, of which CUDA takes 2^31 blocks. Tiles of one
        # query stay neighbours: they read the same entries.
        grid=(b, k, t * row_tiles * config.splits),
        grid_names=("row", "head", "block"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * h,
            transcendentals=pairs,
            bytes_accessed=b
            * t
            * k
            * (sizes.c * entry_bytes + padded * h * (2 + 4 * config.splits)),
        ),
    )(query, chosen, used, *fetch.arrays)
    return Partial(*out[:3]), (out[3], out[4]) if weigh else None


def _divided(x: Array, y: int) -> tuple[Array, Array]:
    return jax.lax.div(x, y), jax.lax.rem(x, y)
