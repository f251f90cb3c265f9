"""What a cache costs in bytes, and a step and a prefill in time."""

import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import hybrid_attn as ha


def cache_bytes_per_token(config: ha.ModelConfig, capacity: int) -> float:
    """Allocated bytes of one row's cache by capacity; nothing is allocated for it."""
    return ha.cache_bytes(
        jax.eval_shape(lambda: ha.init_cache(config, 1, capacity))
    ).per_token


def synthetic_fill(cache: ha.Cache, length: int, key: Array) -> ha.Cache:
    """A cache that looks as if every row held `length` tokens, made without a model.

    Every array of every state (entries, windows, frontiers, index keys) is drawn from
    a normal distribution of mean 0 and variance 1, whole capacity included; the counts
    are those of a restored cache: `floor` is `length` and `sealed` the last boundary.
    A step on it does the work of a step on a real cache of that length, block loops
    and top-k included, since the work of the mixers goes with the counts. What it
    predicts means nothing.

    Args:
      cache: gives shapes, dtypes and the spec; stays valid.
      length: tokens, 0..capacity.
      key: of `jax.random`.

    Raises:
      ValueError: a length out of range.
    """
    capacity = cache.spec.capacity
    if not 0 <= length <= capacity:
        raise ValueError(f"length={length}: expected 0..{capacity}, the capacity")
    leaves, tree = jax.tree.flatten(cache.layers)
    ends = np.cumsum([leaf.size for leaf in leaves])

    # One draw, cut: a draw for each array compiles for many seconds.
    def draw(key: Array) -> list[Array]:
        pieces = jnp.split(jax.random.normal(key, (int(ends[-1]),)), ends[:-1])
        return [
            piece.reshape(leaf.shape).astype(leaf.dtype)
            for piece, leaf in zip(pieces, leaves, strict=True)
        ]

    drawn = jax.jit(draw)(key)
    return _at_length(cache.replace(layers=jax.tree.unflatten(tree, drawn)), length)


def _at_length(cache: ha.Cache, length: int) -> ha.Cache:
    """Counts of a cache restored at `length`."""
    block = cache.spec.block_tokens

    def count(value: int) -> Array:
        return jnp.full((cache.batch,), value, jnp.int32)

    return cache.replace(
        length=count(length),
        floor=count(length),
        # No open group may begin below `sealed`, or its entry would never be written.
        sealed=count(length // block * block),
        faults=jnp.zeros((cache.batch,), jnp.uint8),
    )


def decode_ms(
    model: ha.Model, contexts: Sequence[int], *, warmup: int, steps: int, seed: int = 0
) -> dict[int, float]:
    """Median milliseconds of a decoded token, batch of one, by context.

    Each context is a `synthetic_fill`; the token that a step finds likeliest is fed to
    the next, on the device. Each step is waited for.

    Args:
      contexts: tokens held before the first step; `warmup` steps are not counted.
    """
    run = ha.compile_step(model, donate=True, logits="last")
    likeliest = jax.jit(lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32)[:, None])
    # One capacity and one fill for all, so that there is one compilation: the work of
    # a step goes with the length.
    capacity = max(contexts) + warmup + steps
    cache = ha.init_cache(model.config, 1, capacity)
    cache = synthetic_fill(cache, min(contexts), jax.random.key(seed))
    medians = {}
    for context in sorted(contexts):
        cache = _at_length(cache, context)
        token = jnp.zeros((1, 1), jnp.int32)
        times = []
        for _ in range(warmup + steps):
            begin = time.perf_counter()
            logits, cache = run(cache, token)
            token = likeliest(logits)
            jax.block_until_ready((token, cache))
            times.append(time.perf_counter() - begin)
        if int(cache.faults[0]):
            raise RuntimeError(f"decoding at {context} set faults {cache.faults}")
        medians[context] = 1000 * statistics.median(times[warmup:])
    return medians


def prefill_tokens_per_s(
    model: ha.Model, tokens: np.ndarray, lengths: Sequence[int], *, repeats: int = 5
) -> dict[int, float]:
    """Tokens a second of `ha.prefill` into an empty cache, batch of one, by length.

    Args:
      tokens: int[n], at least the longest length.
      repeats: timed calls after one that compiles; the median counts.
    """
    capacity = max(lengths)
    rates = {}
    for length in lengths:
        row = np.asarray(tokens[:length], np.int32)[None]
        times = []
        for _ in range(1 + repeats):
            cache = ha.init_cache(model.config, 1, capacity)
            jax.block_until_ready(cache)
            begin = time.perf_counter()
            out = ha.prefill(model, cache, row, logits="last", donate=True)
            jax.block_until_ready(out)
            times.append(time.perf_counter() - begin)
        rates[length] = length / statistics.median(times[1:])
    return rates
