"""Decoding over chosen entries on registers, for every generation.

One warpgroup keeps the query heads of a key/value head as rows of a tile, up to 64 of
them, and folds in one entry after another: its key and value are read where they lie,
as a number per column, so nothing is gathered and nothing waits for a barrier. A list
is divided among several blocks, as one token alone would leave most of a device idle.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Target
from pallas_kernels.flash_rows import merge_splits
from pallas_kernels.launch import kernel, store
from pallas_kernels.register_tiles import (
    ROWS,
    load,
    load_columns,
    over_columns,
    over_rows,
)
from pallas_kernels.softmax import LOG2_E, MASKED, Partial, group_heads, nothing
from pallas_kernels.sparse_attention import xla

# More queries than these fill the matrix units with products of gathered entries.
_MOST_QUERIES = 16
# Sums of 64 rows of float32 beside the query fill the registers.
_MOST_CHANNELS = 128
# Entries read before any is used: enough reads in flight to cover the memory's latency.
_AT_ONCE = 4
# Fewer entries of a split would write more sums than they read.
_LEAST_ENTRIES = 64
_BLOCKS = 128


def refuses(
    target: Target,
    query: Any,
    key: Any,
    value: Any,
    chosen: Any,
    *,
    scale: float,
    mass_block: int | None = None,
) -> str | None:
    """Why a call is not served, or None."""
    del target, chosen, scale
    _, t, n, h = query.shape
    if mass_block is not None:
        return "does not return the attention mass"
    if t > _MOST_QUERIES:
        return f"decodes up to {_MOST_QUERIES} queries a row, not {t}"
    if h % 8 or h > _MOST_CHANNELS:
        return f"takes a multiple of 8 up to {_MOST_CHANNELS} channels a head, not {h}"
    if n // key.shape[2] > ROWS:
        return f"takes up to {ROWS} heads a group, not {n // key.shape[2]}"
    for x in (query, key, value):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"reads float32 or bfloat16, not {x.dtype}"
    return None


def sparse_attention(
    query: Array,
    key: Array,
    value: Array,
    chosen: Array,
    *,
    scale: float,
    mass_block: int | None = None,
) -> Partial:
    """Softmax sums over chosen entries; the gradient is XLA's."""
    assert mass_block is None
    if 0 in (*query.shape, key.shape[1], chosen.shape[2]):
        return nothing(group_heads(query, key.shape[2], scale))
    entries = (key,) if value is key else (key, value)
    return _attend(scale, query, entries, chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scale: float, query: Array, entries: tuple[Array, ...], chosen: Array
) -> Partial:
    b, t, n, h = query.shape
    _, e, k, _ = entries[0].shape
    g, c = n // k, chosen.shape[2]
    query = query.reshape(b, t, k, g, h)
    query = jnp.pad(query, [(0, 0)] * 3 + [(0, ROWS - g), (0, 0)])
    splits = max(min(_BLOCKS // (b * t * k), c // _LEAST_ENTRIES), 1)
    own = -(-c // (splits * _AT_ONCE)) * _AT_ONCE
    pad = [(0, 0)] * 2 + [(0, own * splits - c)]
    chosen = jnp.pad(chosen.astype(jnp.int32), pad, constant_values=-1)

    def body(query_ref, chosen_ref, *refs) -> None:
        sources, out = refs[: len(entries)], refs[len(entries) :]
        row, token, head, split = (
            jax.lax.axis_index(axis) for axis in ("row", "query", "head", "split")
        )
        rows = load(query_ref.at[row, token, head])
        rows = rows.astype(jnp.float32) * (scale * LOG2_E)

        def fold(step: Array, sums: _Sums) -> _Sums:
            read = []
            for i in range(_AT_ONCE):
                index = chosen_ref[row, token, split, step * _AT_ONCE + i]
                # Rows of a two-dimensional view: the offset may exceed 32 bits.
                entry = row * e + jnp.maximum(index, 0)
                read.append((index, [load_columns(x.at[entry, head]) for x in sources]))
            logits, values = [], []
            for index, numbers in read:
                seen = jnp.full((h,), index, jnp.int32)
                seen = plgpu.layout_cast(seen, plgpu.Layout.WGMMA.reduce(0)) >= 0
                numbers = [x.astype(jnp.float32) for x in numbers]
                numbers = [jnp.where(seen, x, jnp.zeros_like(x)) for x in numbers]
                logit = jnp.sum(rows * over_rows(numbers[0]), axis=1)
                bias = jnp.where(index < 0, MASKED, 0.0)
                logits.append(logit + bias)
                values.append(numbers[-1])
            maximum = functools.reduce(jnp.maximum, logits, sums.maximum)
            factor = jnp.exp2(sums.maximum - maximum)
            total = sums.total * factor
            weighted = sums.weighted * over_columns(factor, h)
            for logit, value in zip(logits, values, strict=True):
                weight = jnp.exp2(logit - maximum)
                total = total + weight
                weighted = weighted + over_columns(weight, h) * over_rows(value)
            return _Sums(weighted, total, maximum)

        by_row = plgpu.Layout.WGMMA.reduce(1)
        start = _Sums(
            plgpu.layout_cast(jnp.zeros((ROWS, h), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
            # Above `MASKED`, so that masked weights are zero while nothing was seen.
            plgpu.layout_cast(jnp.full((ROWS,), MASKED / 2, jnp.float32), by_row),
        )
        sums = jax.lax.fori_loop(0, own // _AT_ONCE, fold, start)
        for ref, x in zip(out, sums, strict=True):
            store(ref.at[split, row, head, token], x)

    lead = (splits, b, k, t, ROWS)
    pairs = b * t * n * c
    size = entries[0].dtype.itemsize
    sums = kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*lead, h), lead, lead)
        ],
        grid=(b, t, k, splits),
        grid_names=("row", "query", "head", "split"),
        kernel_name="sparse_attention_registers",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * h,
            transcendentals=pairs,
            bytes_accessed=b * t * k * c * h * size * len(entries)
            + 4 * b * k * t * ROWS * h * splits,
        ),
    )(
        query,
        chosen.reshape(b, t, splits, own),
        *(x.reshape(b * e, k, h) for x in entries),
    )
    partial = merge_splits(Partial(*sums))
    seen = partial.total > 0
    maximum = jnp.where(seen, partial.maximum, MASKED)
    return Partial(*(x[:, :, :, :g] for x in partial._replace(maximum=maximum)))


class _Sums(NamedTuple):
    weighted: Array
    total: Array
    maximum: Array


def _forward(scale, *saved):
    return _attend(scale, *saved), saved


def _backward(scale, saved, slope):
    query, entries, chosen = saved

    def differentiable(query, entries):
        return xla.sparse_attention(query, entries[0], entries[-1], chosen, scale=scale)

    return *jax.vjp(differentiable, query, entries)[1](slope), None


_attend.defvjp(_forward, _backward)
