"""Lightning-indexer scores and the choice of the best entries."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.abi import Layout, check_stored
from pallas_kernels.array_typing import Visible, typed
from pallas_kernels.dispatch import SM90, Dispatch, Implementation
from pallas_kernels.indexer_topk import mosaic_gpu, xla

DISPATCH = Dispatch(
    "indexer_topk",
    Implementation(
        "mosaic_gpu", mosaic_gpu.indexer_topk, SM90, mosaic_gpu.refuses_topk
    ),
    Implementation("xla", xla.indexer_topk),
)
SCORES_DISPATCH = Dispatch(
    "indexer_scores",
    Implementation(
        "mosaic_gpu", mosaic_gpu.indexer_scores, SM90, mosaic_gpu.refuses_scores
    ),
    Implementation("xla", xla.indexer_scores),
)
# Keys lie along the last axis: products over [channels, entries] score faster than
# over [entries, channels].
KEY_AXES = ("b", "c", "e")


@typed
def indexer_scores(
    query: Float[Array, "b t i c"],
    weight: Float[Array, "b t i"],
    key: Float[Array, "b c e"],
    *,
    key_layout: Layout | None = None,
    implementation: str | None = None,
) -> Float[Array, "b t e"]:
    """float32[b, t, e]: Σ_i weight_i · relu(query_i · key).

    Args:
      query: float[b, t, i, c]; weight: float[b, t, i], scale included.
      key: float[b, c, e].
      key_layout: the owner's description of ``key``, checked if given.
      implementation: a name of ``SCORES_DISPATCH.names``; None for the best supported.

    Raises:
      LayoutError: ``key`` is not as described.
      Unsupported: the named implementation does not serve the call.
    """
    check_stored(key_layout, KEY_AXES, key, "indexer_scores key")
    return SCORES_DISPATCH(query, weight, key, implementation=implementation)


@typed
def indexer_topk(
    query: Float[Array, "b t i c"],
    weight: Float[Array, "b t i"],
    key: Float[Array, "b c e"],
    visible: Visible,
    *,
    k: int,
    key_layout: Layout | None = None,
    implementation: str | None = None,
) -> tuple[Int[Array, "b t chosen"], Float[Array, "b t chosen"]]:
    """The k best visible entries of each query; ties go to the lowest index.

    Args:
      query, weight, key: as `indexer_scores`.
      visible: int32[b, t].
      k: entries to choose.
      key_layout: the owner's description of ``key``, checked if given.
      implementation: a name of ``DISPATCH.names``; None for the best supported.

    Returns:
      (index int32[b, t, min(k, e)], -1 where fewer are visible; scores float32 of
      the same shape, -inf there).

    The scores have the gradient of `indexer_scores` at the chosen entries, which takes
    their keys query by query, b·t·k·c numbers; the choice itself has none.

    Raises:
      LayoutError: ``key`` is not as described.
      Unsupported: the named implementation does not serve the call.
    """
    check_stored(key_layout, KEY_AXES, key, "indexer_topk key")
    return _choose(k, implementation, query, weight, key, visible)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _choose(
    k: int, implementation: str | None, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return DISPATCH(*arrays, k=k, implementation=implementation)


@_choose.defjvp
def _choose_jvp(k: int, implementation: str | None, primals: Any, tangents: Any):
    index, best = _choose(k, implementation, *primals)

    def scores_of_chosen(query: jax.Array, weight: jax.Array, key: jax.Array):
        at = jnp.maximum(index, 0)[:, :, None]
        keys = jnp.take_along_axis(key[:, None], at, axis=3).astype(jnp.float32)
        products = jnp.einsum("btic,btck->btik", query.astype(jnp.float32), keys)
        weight = weight.astype(jnp.float32)
        scores = jnp.einsum("bti,btik->btk", weight, jax.nn.relu(products))
        return jnp.where(index >= 0, scores, 0.0)

    slope = jax.jvp(scores_of_chosen, primals[:3], tangents[:3])[1]
    return (index, best), (np.zeros(index.shape, jax.dtypes.float0), slope)
