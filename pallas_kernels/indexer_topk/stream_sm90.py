"""Keys streamed once past the tensor cores; what is kept of the scores is chosen.

A block serves some queries of a row, one warpgroup each, and shares the keys between
them. The entries are the rows of the product and the indexer heads its columns, so that
ReLU, weights and the sum over heads stay within the row's four lanes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.launch import computing_registers, divide_warpgroups, kernel, store
from pallas_kernels.register_tiles import ROWS, load_columns, over_rows

LANES = 128
# Registers of a thread of the warpgroup that only copies, by queries of a block, and of
# those that compute.
_COPYING = {1: 40, 2: 40, 4: 32}
COMPUTING = {n: computing_registers(n, copying) for n, copying in _COPYING.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a call is divided.

    Attributes:
      block: entries copied and scored at a time, a multiple of 128.
      queries: of a block, that share its keys.
      splits: blocks that share the entries of a query.
      stages: blocks of keys in shared memory.
    """

    block: int = 128
    queries: int = 1
    splits: int = 1
    stages: int = 4


def shared_bytes(config: Config, heads: int, channels: int) -> int:
    """Shared memory of a block, barriers aside."""
    keys = 2 * config.stages * channels * config.block
    return keys + config.queries * (2 * heads * channels + 4 * config.block)


def candidates(
    query: Array, weight: Array, key: Array, visible: Array, *, depth: int, config: Any
) -> tuple[Array, Array]:
    """The best entries of each slot.

    Args:
      query: bfloat16[r, i, c], r = b·t rows, i a multiple of 8.
      weight: float32[r, i].
      key: bfloat16[b, c, e].
      visible: int32[r].
      depth: entries kept of each slot.
      config: slot p of split s holds the entries p + block·(s + splits·n), n = 0, 1, …
        Entries that fill no block are left out.

    Returns:
      (scores float32[r, splits, depth, block], best first and -inf where none is;
      their index int32 of the same shape, -1 there). Of equal scores the lowest index
      is kept, first.
    """
    rows = query.shape[0]
    shape = (rows, config.splits, depth, config.block)
    out = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)]
    return _stream(query, weight, key, visible, out, depth, config)


def scores(query: Array, weight: Array, key: Array, *, config: Config) -> Array:
    """float32[r, e] of the entries that fill a block; the others are not written."""
    rows, entries = query.shape[0], key.shape[2]
    visible = jnp.full((rows,), entries, jnp.int32)
    out = [jax.ShapeDtypeStruct((rows, entries), jnp.float32)]
    return _stream(query, weight, key, visible, out, None, config)[0]


def _stream(
    query: Array,
    weight: Array,
    key: Array,
    visible: Array,
    out_type: Any,
    depth: int | None,
    config: Config,
) -> Any:
    (rows, heads, channels), (b, _, entries) = query.shape, key.shape
    block, queries = config.block, config.queries
    splits, stages = config.splits, config.stages
    columns, blocks = rows // b, entries // block
    # Scores pass through shared memory to lie one a lane: 128 lanes then share what
    # four lanes of each row would each do.
    lanes = _lanes(block)

    def body(query_ref, weight_ref, key_ref, visible_ref, *refs):
        out_refs, scratch = refs[: len(out_type)], refs[len(out_type) :]
        query_smem, key_smem, score_smem, query_barrier, key_barrier, done = scratch
        row, split = jax.lax.axis_index("row"), jax.lax.axis_index("split")
        first = row * columns + jax.lax.axis_index("group") * queries
        worker = jax.lax.axis_index("worker")
        most = visible_ref[first]
        for i in range(1, queries):
            most = jnp.maximum(most, visible_ref[first + i])
        used = jnp.minimum((most + (block - 1)) // block, blocks)
        steps = (used - split + (splits - 1)) // splits

        def compute() -> None:
            mine = first + worker
            plgpu.copy_gmem_to_smem(
                query_ref.at[mine], query_smem.at[worker], query_barrier.at[worker]
            )
            plgpu.barrier_wait(query_barrier.at[worker])
            weights = over_rows(load_columns(weight_ref.at[mine]))

            def products(slot, at):
                def multiply(acc):
                    plgpu.wgmma(
                        acc,
                        key_smem.at[slot, :, pl.ds(at, ROWS)].transpose((1, 0)),
                        query_smem.at[worker].transpose((1, 0)),
                    )
                    return acc[...]

                out = pl.run_scoped(
                    multiply, plgpu.WGMMAAccumulatorRef((ROWS, heads), jnp.float32)
                )
                return jnp.sum(jnp.maximum(out, 0.0) * weights, axis=1)

            def step(i, carry):
                slot = jax.lax.rem(i, stages)
                start = (i * splits + split) * block
                plgpu.barrier_wait(key_barrier.at[slot])
                for at in range(0, block, ROWS):
                    score = products(slot, at)
                    if depth is None:
                        target = out_refs[0].at[mine, pl.ds(start + at, ROWS)]
                        store(target, score)
                    else:
                        score_smem[worker, pl.ds(at, ROWS)] = score
                plgpu.barrier_arrive(done.at[slot])
                if depth is None:
                    return carry
                score = plgpu.load(score_smem.at[worker], layout=lanes)
                entry = plgpu.layout_cast(jax.lax.iota(jnp.int32, block), lanes) + start
                # -0.0 is no less than +0.0; what is not visible is as good as nothing.
                score = jnp.where(score == 0.0, jnp.zeros_like(score), score)
                nothing = jnp.full_like(score, -jnp.inf)
                score = jnp.where(entry < visible_ref[mine], score, nothing)
                # Strictly: of equal scores the earlier entry stays before the later.
                better = [score > other for other in carry[0]]
                return _insert(carry, score, entry, better)

            if depth is None:
                jax.lax.fori_loop(0, steps, step, None)
                return
            kept = jax.lax.fori_loop(0, steps, step, _nothing(depth, block))
            _store(kept, [out_ref.at[mine, split] for out_ref in out_refs])

        def copy() -> None:
            @pl.loop(0, steps)
            def _step(i):
                slot = jax.lax.rem(i, stages)

                @pl.when(i >= stages)
                def _wait():
                    plgpu.barrier_wait(done.at[slot])

                start = (i * splits + split) * block
                plgpu.copy_gmem_to_smem(
                    key_ref.at[row, :, pl.ds(start, block)],
                    key_smem.at[slot],
                    key_barrier.at[slot],
                )

        divide_warpgroups(worker, queries, _COPYING[queries], compute, copy)

    products = rows * heads * blocks * block
    return kernel(
        body,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM(
                (queries, heads, channels), query.dtype, transforms=_swizzled(channels)
            ),
            plgpu.SMEM(
                (stages, channels, block), key.dtype, transforms=_swizzled(channels)
            ),
            plgpu.SMEM((queries, block), jnp.float32),
            plgpu.Barrier(num_barriers=queries),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=queries, num_barriers=stages),
        ],
        # Groups last: CUDA takes 2^31 blocks along that axis and 2^16 along others.
        grid=(b, splits, columns // queries),
        grid_names=("row", "split", "group"),
        num_threads=queries + 1,
        thread_name="worker",
        kernel_name="indexer_scores" if depth is None else "indexer_topk",
        cost_estimate=pl.CostEstimate(
            flops=products * (2 * channels + 3),
            transcendentals=0,
            bytes_accessed=2 * b * columns // queries * blocks * block * channels
            + sum(4 * out.size for out in out_type),
        ),
    )(query, weight, key, visible)


Kept = tuple[list[Array], list[Array]]


def merge(scores: Array, index: Array, *, groups: int, depth: int) -> tuple[Array, ...]:
    """The best entries of each slot of several splits together.

    Args:
      scores, index: [r, splits, d, block] of `candidates`.
      groups: into which the splits are divided.
      depth: entries kept of each slot of a group.

    Returns:
      (scores, index) [r, groups, depth, block], ordered as those given.
    """
    rows, splits, before, block = scores.shape
    each = -(-splits // groups)

    def body(score_ref, index_ref, *out_refs):
        row, group = jax.lax.axis_index("row"), jax.lax.axis_index("group")
        first = group * each

        def step(i, kept):
            lanes = _lanes(block)
            for place in range(before):
                at = (row, first + i, place)
                score = plgpu.load(score_ref.at[at], layout=lanes)
                entry = plgpu.load(index_ref.at[at], layout=lanes)
                better = [
                    (score > other) | ((score == other) & (entry < known))
                    for other, known in zip(*kept, strict=True)
                ]
                kept = _insert(kept, score, entry, better)
            return kept

        many = jnp.minimum(each, splits - first)
        kept = jax.lax.fori_loop(0, many, step, _nothing(depth, block))
        _store(kept, [out_ref.at[row, group] for out_ref in out_refs])

    shape = (rows, groups, depth, block)
    return kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, x.dtype) for x in (scores, index)],
        grid=(rows, groups),
        grid_names=("row", "group"),
        kernel_name="indexer_topk_merge",
        cost_estimate=pl.CostEstimate(
            flops=5 * depth * scores.size,
            transcendentals=0,
            bytes_accessed=8 * (scores.size + rows * groups * depth * block),
        ),
    )(scores, index)


def _lanes(block: int) -> Any:
    return plgpu.Layout.WG_STRIDED((block,), vec_size=1)


def _nothing(depth: int, block: int) -> Kept:
    lanes = _lanes(block)
    empty = plgpu.layout_cast(jnp.full((block,), -jnp.inf, jnp.float32), lanes)
    none = plgpu.layout_cast(jnp.full((block,), -1, jnp.int32), lanes)
    return [empty] * depth, [none] * depth


def _insert(kept: Kept, score: Array, entry: Array, better: list[Array]) -> Kept:
    """The kept of each lane, best first, with one more entry; the worst falls out.

    Args:
      better: for each kept whether the new entry goes before it.
    """

    def place(new: Array, old: list[Array]) -> list[Array]:
        out = []
        for i, other in enumerate(old):
            above = new if i == 0 else jnp.where(better[i - 1], old[i - 1], new)
            out.append(jnp.where(better[i], above, other))
        return out

    return place(score, kept[0]), place(entry, kept[1])


def _store(kept: Kept, refs: Any) -> None:
    for ref, values in zip(refs, kept, strict=True):
        for i, value in enumerate(values):
            ref[i] = value


def tile(channels: int) -> int:
    """Entries that the copies take as one, and channels of a query."""
    # Both operands of a product need the same swizzle; queries end in channels.
    return next(width for width in (64, 32, 16) if channels % width == 0)


def _swizzled(channels: int) -> tuple[Any, Any]:
    width = tile(channels)
    swizzle = plgpu.find_swizzle(16 * width)
    return (
        plgpu.TilingTransform((8, width)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
