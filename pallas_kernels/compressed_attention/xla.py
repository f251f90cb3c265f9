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
    attend = functools.partial(_attend, run=run)
    if size <= block:
        partial, sums = attend(q, key, value, visible, visible_from, 0)
        if mass_block is None or sums is None:
            return partial
        sums = jax.tree.map(lambda x: x[None], sums)
        return partial, _mass(partial, sums, mass_block, size, run)
    blocks = -(-size // block)

    def body(index: Array, partial: Partial) -> tuple[Partial, _Sums | None]:
        # The last block starts early enough to be whole; what it re-reads is masked.
        first = jnp.minimum(index * block, size - block)
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=block, axis=1
        )
        k_block = cut(key)
        v_block = k_block if value is key else cut(value)
        least = index * block if size % block else None
        part, sums = attend(q, k_block, v_block, visible, visible_from, first, least)
        return merge(partial, part), sums

    if static:
        step = jax.checkpoint(lambda carry, index: body(index, carry))
        partial, sums = jax.lax.scan(
            step, nothing(q), jnp.arange(blocks, dtype=jnp.int32)
        )
    else:
        used = jnp.minimum(blocks, -(-jnp.max(visible) // block))
        if run is None:
            return jax.lax.fori_loop(0, used, lambda i, c: body(i, c)[0], nothing(q))

        def keep(index: Array, carry: tuple[Partial, _Sums]) -> tuple[Partial, _Sums]:
            partial, sums = body(index, carry[0])
            return partial, jax.tree.map(
                lambda kept, new: kept.at[index].set(new), carry[1], sums
            )

        shape = (blocks, *q.shape[:-1])
        none = _Sums(
            jnp.zeros((*shape, block // run), jnp.float32),
            jnp.full(shape, MASKED, jnp.float32),
        )
        partial, sums = jax.lax.fori_loop(0, used, keep, (nothing(q), none))
    if mass_block is None or sums is None:
        return partial
    return partial, _mass(partial, sums, mass_block, size, run)


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


def _mass(
    partial: Partial, sums: _Sums, mass_block: int, size: int, run: int | None
) -> Array:
    """float32[b, t, ceil(size / mass_block)] of the blocks' sums [blocks, ...]."""
    assert run is not None
    total = jnp.where(partial.total > 0, partial.total, 1.0)
    heads = total.shape[1] * total.shape[3]
    share = jnp.exp2(sums.maximum - partial.maximum) / (total * heads)
    mass = jnp.einsum("nbktgr,nbktg->btnr", sums.sums, share)
    b, t = mass.shape[:2]
    mass = mass.reshape(b, t, -1)[..., : -(-size // run)]
    return run_sums(mass, mass_block // run)


def run_sums(x: Array, run: int) -> Array:
    """Sums over each ``run`` neighbours of the last axis; the last may be short."""
    *leading, size = x.shape
    runs = -(-size // run)
    if size % run:
        x = jnp.pad(x, [(0, 0)] * len(leading) + [(0, runs * run - size)])
    return jnp.sum(x.reshape(*leading, runs, run), axis=-1)


def _attend(
    q, key, value, visible, visible_from, first, least=None, *, run
) -> tuple[Partial, _Sums | None]:
    entry = first + jnp.arange(key.shape[1], dtype=jnp.int32)
    shared = value is key
    # 0 x NaN is NaN: entries that no query sees are replaced, not only masked.
    seen = (entry < jnp.max(visible, axis=1)[:, None])[:, :, None, None]
    key = jnp.where(seen, key, 0).astype(jnp.float32)
    value = key if shared else jnp.where(seen, value, 0).astype(jnp.float32)
    mask = entry < visible[..., None]
    if least is not None:
        mask = mask & (entry >= least)
    if visible_from is not None:
        mask = mask & (entry >= visible_from[..., None])
    logits = jnp.einsum("bktgh,bskh->bktgs", q, key)
    weights, total, maximum = partial_softmax(logits, mask[:, None, :, None, :])
    weighted = jnp.einsum("bktgs,bskh->bktgh", weights, value)
    if run is None:
        return Partial(weighted, total, maximum), None
    if least is None:
        sums = run_sums(weights, run)
    else:
        # The sums start at `least`; the weights before it are zero.
        sums = jax.lax.cond(
            least == first,
            lambda w: run_sums(w, run),
            lambda w: run_sums(jnp.roll(w, first - least, axis=-1), run),
            weights,
        )
    return Partial(weighted, jnp.sum(sums, axis=-1), maximum), _Sums(sums, maximum)
