"""Scores on tensor cores, and the best entries without storing the scores.

Of every slot, a residue class of the entries, the kernel keeps the few best. Where a
query is divided among many blocks, a second kernel does the same with their candidates;
XLA sorts what remains, some thousands whatever the number of entries. A slot could only
have lost one of the k best if all that it kept are among the k best. That is tested and
answered by scoring in XLA: the result is always exact, and `_enough` makes this rare
(entries that score best every splits · block would cause it).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import tuned
from pallas_kernels.abi import MEMORY_RULES
from pallas_kernels.device import Target
from pallas_kernels.indexer_topk import stream_sm90, xla
from pallas_kernels.indexer_topk.stream_sm90 import LANES, Config
from pallas_kernels.launch import PROCESSORS

_CAPABILITY = (9, 0)
_MOST_HEADS = 128
_MOST_CHANNELS = 256
# Splits whose candidates are merged by one block.
_MERGED = 8
# For XLA's part of the scores: by default it rounds float32 on tensor cores, and would
# rank the last entries otherwise than the kernel ranks those before.
_EXACT = "highest"
# Expected number of slots of a query that keep too few, if scores are independent.
_RARE = 1e-4


def refuses_topk(
    target: Target, query: Any, weight: Any, key: Any, visible: Any, *, k: int
) -> str | None:
    """Why a call is not served, or None; arguments as `indexer_topk`."""
    reason = refuses_scores(target, query, weight, key)
    b, t = query.shape[:2]
    size = key.shape[2]
    if reason or b * t == 0 or size < LANES:
        return reason
    k = min(k, size)
    if not configurations(query, weight, key, visible, k=k):
        return f"cannot keep {k} of {size} entries in registers"
    return None


def refuses_scores(target: Target, query: Any, weight: Any, key: Any) -> str | None:
    """Why a call is not served, or None; arguments as `indexer_scores`."""
    del target, weight
    heads, channels = query.shape[2:]
    for x in (query, key):
        if x.dtype != jnp.bfloat16:
            return f"scores bfloat16, not {x.dtype}"
    if channels % 16 or not 0 < channels <= _MOST_CHANNELS:
        return f"takes a multiple of 16 up to {_MOST_CHANNELS} channels, not {channels}"
    if not 0 < heads <= _MOST_HEADS:
        return f"takes 1 to {_MOST_HEADS} indexer heads, not {heads}"
    tile = stream_sm90.tile(channels)
    if key.shape[2] % tile:
        return f"copies a multiple of {tile} entries, not {key.shape[2]}"
    return None


def configurations(
    query: Any, weight: Any, key: Any, visible: Any = None, *, k: int | None = None
) -> tuple[Config, ...]:
    """The configurations of a call; arrays may be abstract.

    Args:
      query, weight, key, visible, k: as `indexer_topk`; without k, `indexer_scores`.
    """
    del weight, visible
    b, t, heads, channels = query.shape
    heads = _padded(heads)
    legal = []
    for block in (LANES, 2 * LANES):
        blocks = key.shape[2] // block
        for queries in (1, 2, 4):
            if not blocks or not b * t or t % queries:
                continue
            usual = _usual_splits(b * t // queries, blocks)
            for splits in sorted({usual, min(2 * usual, blocks) if t == 1 else usual}):
                for stages in (2, 4):
                    config = Config(
                        block=block, queries=queries, splits=splits, stages=stages
                    )
                    if _fits(config, heads, channels, blocks, k):
                        legal.append(config)
    return tuple(legal)


def default(
    query: Any, weight: Any, key: Any, visible: Any = None, *, k: int | None = None
) -> Config:
    """The configuration of a call that no table knows: most sharing, then stages."""
    legal = configurations(query, weight, key, visible, k=k)
    b, t = query.shape[:2]

    def rank(config: Config) -> tuple[int, ...]:
        usual = _usual_splits(b * t // config.queries, key.shape[2] // config.block)
        return (
            config.splits == usual,
            config.queries,
            -config.block,
            -abs(config.stages - 4),
        )

    return max(legal, key=rank)


def indexer_scores(
    query: Array, weight: Array, key: Array, *, config: Config | None = None
) -> Array:
    """float32[b, t, e] as ``api.indexer_scores``; the gradient is XLA's.

    Args:
      query, key: bfloat16.
      config: of `configurations`; None for the tuned or the default one.
    """
    if not query.shape[0] * query.shape[1] or key.shape[2] < LANES:
        return xla.indexer_scores(query, weight, key)
    if config is None:
        config = _choose("indexer_scores", query, weight, key)
    return _scores(config, query, weight, key)


def indexer_topk(
    query: Array,
    weight: Array,
    key: Array,
    visible: Array,
    *,
    k: int,
    config: Config | None = None,
) -> tuple[Array, Array]:
    """(index, scores) as ``api.indexer_topk``, which differentiates it.

    Args:
      query, key: bfloat16.
      config: of `configurations`; None for the tuned or the default one.

    XLA scores the entries that fill no block, fewer than one block.
    """
    b, t = query.shape[:2]
    size = key.shape[2]
    k = min(k, size)
    if not b * t * k or size < LANES:
        return xla.indexer_topk(query, weight, key, visible, k=k)
    if config is None:
        config = _choose("indexer_topk", query, weight, key, visible, k=k)
    blocks = size // config.block
    kept = _kept_at_most(config, blocks)
    depth = _depth(k, config, blocks)
    scores, index = stream_sm90.candidates(
        *_rows(query, weight),
        key,
        visible.astype(jnp.int32).reshape(b * t),
        depth=depth,
        config=config,
    )
    # The worst that a full slot kept: if it is chosen, a better one may be lost.
    worst = [] if depth == kept else [(scores[:, :, -1], index[:, :, -1])]
    if config.splits > _MERGED:
        groups = -(-config.splits // _MERGED)
        kept = min(_MERGED, config.splits) * depth
        depth = _enough(k, groups * config.block, kept)
        scores, index = stream_sm90.merge(scores, index, groups=groups, depth=depth)
        if depth < kept:
            worst.append((scores[:, :, -1], index[:, :, -1]))
    shape = (b, t, -1)
    whole = blocks * config.block
    with jax.default_matmul_precision(_EXACT):
        tail = xla.masked_scores(query, weight, key[:, :, whole:], visible, whole, 0)
    entry = jnp.broadcast_to(jnp.arange(whole, size, dtype=jnp.int32), tail.shape)
    chosen = _best(
        jnp.concatenate([scores.reshape(shape), tail], axis=-1),
        jnp.concatenate([index.reshape(shape), entry], axis=-1),
        k,
    )
    if not worst:
        return chosen
    score, at = (
        jnp.concatenate([x.reshape(shape) for x in parts], axis=-1)
        for parts in zip(*worst, strict=True)
    )
    least, last = chosen[1][..., -1:], chosen[0][..., -1:]
    full = (score > least) | ((score == least) & (at <= last) & (at >= 0))
    with jax.default_matmul_precision(_EXACT):
        return jax.lax.cond(
            jnp.any(full),
            lambda: xla.indexer_topk(query, weight, key, visible, k=k),
            lambda: chosen,
        )


def _choose(op: str, query: Any, weight: Any, key: Any, *args: Any, **sizes: int):
    legal = configurations(query, weight, key, *args, **sizes)
    known = dict(zip("btic", query.shape, strict=True)) | sizes
    config = tuned.choose(op, known | {"e": key.shape[2]}, query.dtype, legal)
    return config or default(query, weight, key, *args, **sizes)


def _usual_splits(groups: int, blocks: int) -> int:
    """As many as give each processor a block."""
    return min(blocks, -(-PROCESSORS // groups))


def _fits(
    config: Config, heads: int, channels: int, blocks: int, k: int | None
) -> bool:
    shared = stream_sm90.shared_bytes(config, heads, channels)
    # Barriers, and what the compiler keeps for itself.
    if shared + 4096 > MEMORY_RULES[_CAPABILITY].shared_memory:
        return False
    # A product's tile, the weights, what is kept, and addresses.
    registers = heads // 2 + heads // 4 + 40
    if k is not None:
        registers += 2 * _depth(k, config, blocks) * config.block // LANES
    return registers <= stream_sm90.COMPUTING[config.queries]


def _kept_at_most(config: Config, blocks: int) -> int:
    return -(-blocks // config.splits)


def _depth(k: int, config: Config, blocks: int) -> int:
    """Entries to keep of each slot."""
    slots = config.splits * config.block
    return _enough(k, slots, _kept_at_most(config, blocks))


def _enough(k: int, slots: int, most: int) -> int:
    """How many of a slot's entries to keep, so that it is rare that these are too few.

    The k best fall into the slots like independent throws: Poisson.
    """
    mean = k / slots
    depth = 0
    term = tail = math.exp(-mean)
    while depth < mean or slots * (1 - tail) > _RARE:
        depth += 1
        term *= mean / depth
        tail += term
    return min(depth + 1, most)


def _padded(heads: int) -> int:
    return -(-heads // 8) * 8


def _rows(query: Array, weight: Array) -> tuple[Array, Array]:
    """[r, i, c] and float32[r, i], heads without weight up to a multiple of 8."""
    b, t, heads, channels = query.shape
    more = _padded(heads) - heads
    query = jnp.pad(query.reshape(b * t, heads, channels), ((0, 0), (0, more), (0, 0)))
    weight = weight.astype(jnp.float32).reshape(b * t, heads)
    return query, jnp.pad(weight, ((0, 0), (0, more)))


def _best(scores: Array, index: Array, k: int) -> tuple[Array, Array]:
    # In order of the entries: of equal scores top_k takes the first.
    index, scores = jax.lax.sort((index, scores), num_keys=1)
    best, at = jax.lax.top_k(scores, k)
    index = jnp.take_along_axis(index, at, axis=-1)
    return jnp.where(best > -jnp.inf, index, -1), best


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(config: Config, query: Array, weight: Array, key: Array) -> Array:
    b, t = query.shape[:2]
    whole = key.shape[2] // config.block * config.block
    out = stream_sm90.scores(*_rows(query, weight), key, config=config)
    out = out.reshape(b, t, key.shape[2])
    if whole == key.shape[2]:
        return out
    with jax.default_matmul_precision(_EXACT):
        rest = xla.indexer_scores(query, weight, key[:, :, whole:])
    return out.at[:, :, whole:].set(rest)


def _scores_forward(config: Config, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return _scores(config, *arrays), arrays


def _scores_backward(config: Config, saved: tuple[Array, ...], slope: Array) -> Any:
    del config
    return jax.vjp(xla.indexer_scores, *saved)[1](slope)


_scores.defvjp(_scores_forward, _scores_backward)
