"""Partial softmax sums in base 2, and how they merge.

Every source of keys (window, entries, chosen entries) gives one `Partial`; merging
them and adding the sink is the joint softmax over their union. Logits are multiplied
by log2(e) beforehand, so that every exponential is a base-2 one.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

LOG2_E = math.log2(math.e)
# Finite, so that a row that sees nothing has no inf - inf.
MASKED = -1e30


class Partial(NamedTuple):
    """Unnormalised softmax over some keys, heads grouped by key/value head.

    Attributes:
      weighted: float32[b, k, t, g, h], Σ exp2(logit - maximum)·value.
      total: float32[b, k, t, g], Σ exp2(logit - maximum).
      maximum: float32[b, k, t, g].
    """

    weighted: Array
    total: Array
    maximum: Array


def partial_softmax(logits: Array, mask: Array) -> tuple[Array, Array, Array]:
    """(weights, total, maximum) of base-2 logits [..., s]; masked weights are 0."""
    logits = jnp.where(mask, logits, MASKED)
    # The result does not depend on the maximum, so neither does the gradient.
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    # A row that sees nothing is measured from 0: what is masked is then 0 in every row,
    # and no second mask stands between the exponentials and their two readers.
    origin = jnp.where(maximum > MASKED, maximum, 0.0)
    weights = jnp.exp2(logits - origin[..., None])
    return weights, jnp.sum(weights, axis=-1), maximum


def nothing(query: Array) -> Partial:
    """The sums over no keys, of grouped queries [b, k, t, g, h]."""
    return Partial(
        jnp.zeros(query.shape, jnp.float32),
        jnp.zeros(query.shape[:-1], jnp.float32),
        jnp.full(query.shape[:-1], MASKED, jnp.float32),
    )


def merge(a: Partial, b: Partial) -> Partial:
    """Softmax sums over the union of two disjoint sets of keys."""
    maximum = jnp.maximum(a.maximum, b.maximum)
    scale_a, scale_b = jnp.exp2(a.maximum - maximum), jnp.exp2(b.maximum - maximum)
    return Partial(
        a.weighted * scale_a[..., None] + b.weighted * scale_b[..., None],
        a.total * scale_a + b.total * scale_b,
        maximum,
    )


def finish(partial: Partial, sink: Array | None) -> Array:
    """Normalises: float32[b, t, n, h] with n = k·g.

    Args:
      sink: float[n] logits (nats) of the learned sinks, which add to the denominator
        and carry no value; None for none. A row that sees nothing gives zeros.
    """
    weighted, total, maximum = partial
    b, k, t, g, h = weighted.shape
    if sink is not None:
        logit = sink.astype(jnp.float32).reshape(k, 1, g) * LOG2_E
        highest = jax.lax.stop_gradient(jnp.maximum(maximum, logit))
        scale = jnp.exp2(maximum - highest)
        total = total * scale + jnp.exp2(logit - highest)
        weighted = weighted * scale[..., None]
    else:
        total = jnp.where(total > 0, total, 1.0)
    out = weighted / total[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(b, t, k * g, h)


def check_mass_block(mass_block: int | None) -> None:
    """Refuses blocks of no entries."""
    if mass_block is not None and mass_block < 1:
        raise ValueError(f"mass_block {mass_block}: expected at least 1, or None")


def check_groups(query: Array, key: Array) -> None:
    """Refuses key/value heads [b, s, k, h] that do not divide the query heads."""
    heads, kv_heads = query.shape[2], key.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads over {kv_heads} key/value heads: expected a multiple"
        )


def group_heads(query: Array, kv_heads: int, scale: float) -> Array:
    """[b, t, n, h] -> float32[b, k, t, g, h], times scale·log2(e)."""
    b, t, n, h = query.shape
    query = query.astype(jnp.float32) * (scale * LOG2_E)
    return query.reshape(b, t, kv_heads, n // kv_heads, h).transpose(0, 2, 1, 3, 4)
