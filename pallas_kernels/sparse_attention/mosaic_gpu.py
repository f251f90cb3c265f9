"""Attention over chosen entries for compute capability 9.0.

A block works on one query token and up to 64 heads of one key/value head. One warpgroup
fetches the chosen entries: a bulk copy a row, and from there into the swizzled tiles
that the matrix products read, which no copy can address row by row. The others compute,
as `flash_sm90` does. Entries that values share with keys are read once.

A list's -1 is copied from beyond the array's end, which gives zeros and reads nothing.
Fewer heads than 64 are padded: reading the entries is the bound, not the products.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import flash_config, flash_parts, tuned
from pallas_kernels.device import Target
from pallas_kernels.flash_parts import ROWS
from pallas_kernels.softmax import LOG2_E, MASKED, Partial, group_heads, nothing
from pallas_kernels.sparse_attention import xla
from pallas_kernels.sparse_attention.config import Config, Sizes, best, legal


class Fetch(NamedTuple):
    """How entries come into shared memory.

    Attributes:
      arrays: of entries in device memory, keys and, where they differ, values.
      staged: type of a scratch [parts, part, ...] that one array's rows are copied to.
      copies: (array, entry, kv head, scratch [part, ...], row of it) -> the source and
        the target of the row's copy.
      ready: (scratch [part, ...], tile [pieces, part, c]) stores the rows in the tile.
    """

    arrays: tuple[Array, ...]
    staged: Any
    copies: Callable[..., tuple[Any, Any]]
    ready: Callable[[Any, Any], None]


def sizes_of(query: Any, key: Any, value: Any, chosen: Any) -> Sizes:
    """The `Sizes` of a call."""
    b, t, n, h = query.shape
    _, e, k, _ = key.shape
    return Sizes(b, t, k, n // k, e, h, chosen.shape[2], 1 if value is key else 2)


def configurations(query: Any, key: Any, value: Any, chosen: Any) -> tuple[Config, ...]:
    """The configurations of a call; arrays may be abstract."""
    return legal(sizes_of(query, key, value, chosen))


def default(query: Any, key: Any, value: Any, chosen: Any) -> Config:
    """The configuration of a call that no table knows."""
    return best(
        configurations(query, key, value, chosen),
        sizes_of(query, key, value, chosen),
    )


def refuses(
    target: Target,
    query: Any,
    key: Any,
    value: Any,
    chosen: Any,
    *,
    scale: float,
    mass_block: int | None = None,
    config: Config | None = None,
) -> str | None:
    """Why a call is not served, or None."""
    del target, scale, config
    if mass_block is not None:
        return "does not return the attention mass"
    reason = flash_config.refuses(query, key, value)
    if reason is None and not legal(sizes_of(query, key, value, chosen)):
        reason = f"keeps lists in shared memory, not {chosen.shape[2]} entries each"
    return reason


def sparse_attention(
    query: Array,
    key: Array,
    value: Array,
    chosen: Array,
    *,
    scale: float,
    mass_block: int | None = None,
    config: Config | None = None,
) -> Partial:
    """Softmax sums over chosen entries; the gradient is XLA's.

    Args:
      query, key, value: bfloat16; the others as ``api.sparse_attention``.
      mass_block: None.
      config: of `configurations`; None for the tuned or the default one.
    """
    assert mass_block is None
    sizes = sizes_of(query, key, value, chosen)
    if sizes.empty:
        return nothing(group_heads(query, sizes.k, scale))
    config = config or choose("sparse_attention", sizes)
    entries = (key,) if value is key else (key, value)
    return _attend(scale, config, query, entries, chosen)


def choose(op: str, sizes: Sizes) -> Config:
    """The tuned configuration, or the default one."""
    configs = legal(sizes)
    return tuned.choose(op, sizes.names, jnp.bfloat16, configs) or best(configs, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    scale: float,
    config: Config,
    query: Array,
    entries: tuple[Array, ...],
    chosen: Array,
) -> Partial:
    key, value = entries[0], entries[-1]
    sizes = sizes_of(query, key, value, chosen)
    shape, swizzle = sizes.flash, sizes.swizzle(config)

    def copies(array: Any, entry: Any, head: Any, staged: Any, row: Any) -> Any:
        return array.at[entry, head], staged.at[row]

    def ready(staged: Any, tile: Any) -> None:
        for piece in range(shape.pieces):
            rows = staged.at[:, piece]
            layout = plgpu.Layout.SMEM_GMEM_COPY(rows.shape, rows.dtype, swizzle)
            tile.at[piece][...] = plgpu.load(rows, layout=layout)

    fetch = Fetch(
        tuple(
            x.reshape(sizes.b * sizes.e, sizes.k, shape.pieces, shape.channels)
            for x in entries
        ),
        lambda *lead: plgpu.SMEM(
            (*lead, shape.pieces, shape.channels), entries[0].dtype
        ),
        copies,
        ready,
    )
    return attend(query, chosen, sizes, fetch, scale, config, "sparse_attention")


def _forward(scale, config, query, entries, chosen):
    return _attend(scale, config, query, entries, chosen), (query, entries, chosen)


def _backward(scale, config, saved, slope):
    del config
    query, entries, chosen = saved

    def differentiable(query, entries):
        return xla.sparse_attention(query, entries[0], entries[-1], chosen, scale=scale)

    return *jax.vjp(differentiable, query, entries)[1](slope), None


_attend.defvjp(_forward, _backward)


def attend(
    query: Array,
    chosen: Array,
    sizes: Sizes,
    fetch: Fetch,
    scale: float,
    config: Config,
    name: str,
) -> Partial:
    """Softmax sums over chosen entries that ``fetch`` brings in.

    Args:
      query: bfloat16[b, t, n, h].
      chosen: int32[b, t, c].
      name: of the kernel.
    """
    b, t, k, g = sizes.b, sizes.t, sizes.k, sizes.rows
    padded = -(-g // ROWS) * ROWS
    query = query.reshape(b, t, k, g, sizes.h)
    if padded != g:
        query = jnp.pad(query, [(0, 0)] * 3 + [(0, padded - g), (0, 0)])
    steps = -(-sizes.c // config.block)
    pad = steps * config.block - sizes.c
    chosen = jnp.pad(
        chosen.astype(jnp.int32),
        [(0, 0)] * 2 + [(0, pad)],
        "constant",
        constant_values=-1,
    )
    last = jnp.where(
        chosen >= 0, jnp.arange(1, chosen.shape[2] + 1, dtype=jnp.int32), 0
    )
    used = -(-jnp.max(last, axis=2) // config.block)
    partial = _call(
        query,
        chosen.reshape(b, t, steps, config.block),
        used,
        sizes,
        fetch,
        scale,
        config,
        name,
    )
    return Partial(*(x[:, :, :, :g] for x in partial))


def _call(
    query: Array,
    chosen: Array,
    used: Array,
    sizes: Sizes,
    fetch: Fetch,
    scale: float,
    config: Config,
    name: str,
) -> Partial:
    b, t, k, padded, h = query.shape
    shape = sizes.flash
    consumers, pieces, channels = shape.parts, shape.pieces, shape.channels
    own_pieces = pieces // consumers
    arrays, size, stages = len(fetch.arrays), config.block, config.stages
    per_step = size // config.part

    def body(query_ref, chosen_ref, used_ref, *refs) -> None:
        entries, out, scratch = refs[:arrays], refs[arrays:][:3], refs[arrays + 3 :]
        rows_ref, list_ref, weights, *scratch = scratch
        staged, tiles = scratch[:arrays], scratch[arrays:][:arrays]
        query_copied, list_copied, copied, loaded, freed = scratch[2 * arrays :]
        row, token, head, tile = (
            jax.lax.axis_index(axis) for axis in ("row", "query", "head", "tile")
        )
        member = jax.lax.axis_index("warpgroup")
        steps = used_ref[row, token]
        first_row = tile * ROWS

        def bring() -> None:
            plgpu.copy_gmem_to_smem(chosen_ref.at[row, token], list_ref, list_copied)
            for piece in range(pieces):
                plgpu.copy_gmem_to_smem(
                    query_ref.at[
                        row,
                        token,
                        head,
                        pl.ds(first_row, ROWS),
                        pl.ds(piece * channels, channels),
                    ],
                    rows_ref.at[piece],
                    query_copied,
                )
            plgpu.barrier_wait(list_copied)
            count = steps * per_step

            def copy(part: Array) -> None:
                slot = jax.lax.rem(part, config.parts)
                step = jax.lax.div(part, per_step)
                first = jax.lax.rem(part, per_step) * config.part

                @pl.loop(0, config.part)
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
                entry = flash_parts.load_columns(chosen_ref.at[row, token, index])
                plgpu.barrier_wait(loaded.at[stage])
                keys, values = tiles[0].at[stage], tiles[-1].at[stage]
                logits = flash_parts.products(rows_ref, keys, pieces, size)
                logits = jnp.where(
                    flash_parts.over_rows(entry) >= 0,
                    logits * (scale * LOG2_E),
                    jnp.full_like(logits, MASKED),
                )
                own = [values.at[member * own_pieces + i] for i in range(own_pieces)]
                sums, _ = flash_parts.add_keys(sums, logits, own, weights.at[member])
                plgpu.barrier_arrive(freed.at[stage])
                return sums

            sums = jax.lax.fori_loop(
                0, steps, step, flash_parts.empty(own_pieces, channels)
            )
            at = (row, head, token)
            flash_parts.store(sums, Partial(*out), at, first_row, member)

        @pl.when(member < consumers)
        def _() -> None:
            if consumers > 1:
                plgpu.set_max_registers(208, action="increase")
            multiply()

        @pl.when(member == consumers)
        def _() -> None:
            if consumers > 1:
                plgpu.set_max_registers(96, action="decrease")
            bring()

    def tiled(*lead: int) -> Any:
        swizzle = sizes.swizzle(config)
        transforms = (
            plgpu.TilingTransform((8, swizzle // 2)),  # pyright: ignore
            plgpu.SwizzleTransform(swizzle),  # pyright: ignore
        )
        return plgpu.SMEM(lead, jnp.bfloat16, transforms=transforms)

    lead = (b, k, t, padded)
    pairs = b * t * k * padded * sizes.c
    entry_bytes = (sizes.record or 2 * h) * arrays
    out = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*lead, h), lead, lead)
        ],
        scratch_types=[
            tiled(pieces, ROWS, channels),
            plgpu.SMEM(chosen.shape[2:], jnp.int32),
            tiled(consumers, ROWS, size),
            *(fetch.staged(config.parts, config.part) for _ in range(arrays)),
            *(tiled(stages, pieces, size, channels) for _ in range(arrays)),
            plgpu.Barrier(num_arrivals=pieces),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=config.part * arrays, num_barriers=config.parts),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        ],
        grid=(b, t, k, padded // ROWS),
        grid_names=("row", "query", "head", "tile"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * h,
            transcendentals=pairs,
            bytes_accessed=b * t * k * (sizes.c * entry_bytes + padded * h * 6),
        ),
    )(query, chosen, used, *fetch.arrays)
    return Partial(*out)
