"""Lightning-indexer scores and the choice of the best entries."""

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
    implementation: str | None = None,
) -> Float[Array, "b t e"]:
    """float32[b, t, e]: Σ_i weight_i · relu(query_i · key).

    Args:
      query: float[b, t, i, c]; weight: float[b, t, i], scale included.
      key: float[b, c, e].
      implementation: a name of ``SCORES_DISPATCH.names``; None for the best supported.
    """
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

    Raises:
      LayoutError: ``key`` is not as described.
      Unsupported: the named implementation does not serve the call.
    """
    check_stored(key_layout, KEY_AXES, key, "indexer_topk key")
    return DISPATCH(query, weight, key, visible, k=k, implementation=implementation)
