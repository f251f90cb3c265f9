"""Attention over all visible entries in XLA, in blocks up to the longest row."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.array_typing import Entries, Mass, Queries, Visible, typed
from pallas_kernels.softmax import (
    MASKED,
    Partial,
    group_heads,
    merge,
    nothing,
    partial_softmax,
)

# Entries read at a time: large enough for the matrix product, small enough that a
# block of logits stays in cache.
BLOCK = 512


class _Sums(NamedTuple):
    """Sums of a block's weights over runs of entries, each relative to its maximum.

    Attributes:
      sums: float32[..., b, k, t, g, runs].
      maximum: float32[..., b, k, t, g].
    """

    sums: Array
    maximum: Array


@typed
def compressed_attention(
    query: Queries,
    key: Entries,
    value: Entries,
    visible: Visible,
    *,
    scale: float,
    static: bool,
    visible_from: Visible | None = None,
    mass_block: int | None = None,
) -> Partial | tuple[Partial, Mass]:
    """Softmax sums over entries visible_from..visible-1 of each query.

    Args:
      query: [b, t, n, h]; key, value: [b, e, k, h]; visible: int32[b, t].
      static: read every block (differentiable) instead of the blocks in use.
      visible_from: int32[b, t], the first entry that each query may read (of its
        packed document); None for 0.
      mass_block: also return the mass of each block of so many entries; see ``api``.

    Entries beyond the last that any query of a row sees never enter a product,
    whatever they hold.
    """
    q = group_heads(query, key.shape[2], scale)
    size = key.shape[1]
    block, run = BLOCK, None
    if mass_block is not None:
        block, run = _blocks_for(mass_block)
    if size == 0:
        partial = nothing(q)
        mass = jnp.zeros((*visible.shape, 0), jnp.float32)
        return partial if mass_block is None else (partial, mass)

    def read(first: Array | int, count: int) -> tuple[Partial, _Sums | None]:
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count, axis=1
        )
        k_block = cut(key)
        v_block = k_block if value is key else cut(value)
        return _attend(q, k_block, v_block, visible, visible_from, first, run=run)

    def joined(partial: Partial, first: Array | int, count: int):
        part, sums = read(first, count)
        return merge(partial, part), sums

    # Whole blocks in a loop, and what is left after them as a smaller one.
    whole, rest = divmod(size, block) if size > block else (0, size)
    partial, kept = nothing(q), []
    if whole:

        def step(partial: Partial, index: Array):
            return joined(partial, index * block, block)

        if static:
            blocks = jnp.arange(whole, dtype=jnp.int32)
            partial, sums = jax.lax.scan(jax.checkpoint(step), partial, blocks)
        else:
            used = jnp.minimum(whole, -(-jnp.max(visible) // block))
            none = _no_sums(q, block, run)
            partial, sums = _read_used(step, used, partial, none, whole)
        kept.append(sums)
    if rest:
        last = functools.partial(joined, first=whole * block, count=rest)
        if not whole:
            partial, sums = read(0, rest)
        elif static:
            partial, sums = jax.checkpoint(last)(partial)
        else:
            partial, sums = jax.lax.cond(
                jnp.max(visible) > whole * block,
                last,
                lambda partial: (partial, _no_sums(q, rest, run)),
                partial,
            )
        kept.append(jax.tree.map(lambda x: x[None], sums))
    if mass_block is None or run is None:
        return partial
    mass = jnp.concatenate([_mass(partial, sums) for sums in kept], axis=-1)
    return partial, run_sums(mass, mass_block // run)


def _read_used(step, used: Array, partial: Partial, none: _Sums | None, whole: int):
    """(softmax sums over ``used`` of the blocks, sums of weights of all ``whole``)."""

    def keep(index: Array, carry):
        partial, sums = step(carry[0], index)
        return partial, jax.tree.map(
            lambda kept, new: kept.at[index].set(new), carry[1], sums
        )

    none = jax.tree.map(lambda x: jnp.broadcast_to(x, (whole, *x.shape)), none)
    return jax.lax.fori_loop(0, used, keep, (partial, none))


def _blocks_for(mass_block: int) -> tuple[int, int]:
    """(entries read at a time, entries whose weights are summed before they are kept).

    Such that no sum crosses the blocks of the mass.
    """
    if mass_block <= BLOCK:
        return BLOCK // mass_block * mass_block, mass_block
    for parts in range(-(-mass_block // BLOCK), 4 * mass_block // BLOCK):
        if mass_block % parts == 0:
            return mass_block // parts, mass_block // parts
    return mass_block, mass_block


def _no_sums(q: Array, count: int, run: int | None) -> _Sums | None:
    """The sums of ``count`` entries that nobody reads."""
    if run is None:
        return None
    return _Sums(
        jnp.zeros((*q.shape[:-1], -(-count // run)), jnp.float32),
        jnp.full(q.shape[:-1], MASKED, jnp.float32),
    )


def _mass(partial: Partial, sums: _Sums) -> Array:
    """float32[b, t, blocks·runs], the share of each run of entries."""
    total = jnp.where(partial.total > 0, partial.total, 1.0)
    heads = total.shape[1] * total.shape[3]
    share = jnp.exp2(sums.maximum - partial.maximum) / (total * heads)
    # Not a product: a batch of tiny ones is slower than to multiply and add.
    mass = jnp.sum(sums.sums * share[..., None], axis=(2, 4)).transpose(1, 2, 0, 3)
    return mass.reshape(*mass.shape[:2], -1)


def run_sums(x: Array, run: int) -> Array:
    """Sums over each ``run`` neighbours of the last axis; the last may be short."""
    *leading, size = x.shape
    runs = -(-size // run)
    if size % run:
        x = jnp.pad(x, [(0, 0)] * len(leading) + [(0, runs * run - size)])
    return jnp.sum(x.reshape(*leading, runs, run), axis=-1)


def _attend(
    q, key, value, visible, visible_from, first, *, run
) -> tuple[Partial, _Sums | None]:
    entry = first + jnp.arange(key.shape[1], dtype=jnp.int32)
    shared = value is key
    # 0 x NaN is NaN: entries that no query sees are replaced, not only masked.
    seen = (entry < jnp.max(visible, axis=1)[:, None])[:, :, None, None]

    def readable(x: Array) -> Array:
        # Once: fused into both products it is done, and then transposed, for each.
        x = jnp.where(seen, x, 0).astype(jnp.float32)
        return jax.lax.optimization_barrier(x)

    key = readable(key)
    value = key if shared else readable(value)
    mask = entry < visible[..., None]
    if visible_from is not None:
        mask = mask & (entry >= visible_from[..., None])
    logits = jnp.einsum("bktgh,bskh->bktgs", q, key)
    weights, total, maximum = partial_softmax(logits, mask[:, None, :, None, :])
    weighted = jnp.einsum("bktgs,bskh->bktgh", weights, value)
    if run is None:
        return Partial(weighted, total, maximum), None
    # XLA would make one sum of two and read the weights a second time.
    sums = jax.lax.optimization_barrier(run_sums(weights, run))
    return Partial(weighted, jnp.sum(sums, axis=-1), maximum), _Sums(sums, maximum)
