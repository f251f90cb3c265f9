"""The training loss: next-token cross-entropy plus the indexers' KL."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from hybrid_attn.model import Model, forward_with_aux


class LossMetrics(NamedTuple):
    """Scalars float32[]: nats a target, share right, mean indexer KL in nats."""

    cross_entropy: Array
    accuracy: Array
    indexer_loss: Array


def token_loss(logits: Array, targets: Array) -> tuple[Array, Array]:
    """(mean cross-entropy in nats, accuracy) over targets >= 0, float32[] each.

    Args:
      logits: float32[b, t, v]; targets: int32[b, t], negative = ignored.
    """
    counted = targets >= 0
    safe = jnp.where(counted, targets, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, safe)
    total = jnp.maximum(jnp.sum(counted), 1)
    right = (jnp.argmax(logits, axis=-1) == safe) & counted
    return jnp.sum(jnp.where(counted, losses, 0)) / total, jnp.sum(right) / total


def model_loss(
    model: Model,
    tokens: Array,
    targets: Array,
    segment_ids: ArrayLike | None = None,
    *,
    dense: Array | None = None,
    indexer_weight: float = 1.0,
    remat: bool = False,
) -> tuple[Array, LossMetrics]:
    """The loss to minimise, and its parts.

    ``dense`` bool[]: sparse layers read all entries and the indexer learns from the
    mass over all of them (warm-up); otherwise over the chosen set. ``segment_ids``
    as for `forward`: targets must not cross from one packed document to the next.
    """
    logits, auxiliaries = forward_with_aux(
        model, tokens, segment_ids, dense=dense, remat=remat
    )
    loss, accuracy = token_loss(logits, targets)
    indexer = [aux["indexer_loss"] for aux in auxiliaries if "indexer_loss" in aux]
    mean = sum(indexer) / len(indexer) if indexer else jnp.zeros(())
    metrics = LossMetrics(loss, accuracy, jnp.asarray(mean))
    return loss + indexer_weight * metrics.indexer_loss, metrics
