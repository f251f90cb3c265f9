"""Gated per-channel pooling of groups into entries."""

from jaxtyping import Array, Float

from pallas_kernels.array_typing import typed
from pallas_kernels.dispatch import PORTABLE, Dispatch, Implementation
from pallas_kernels.pool import mosaic_gpu, xla

DISPATCH = Dispatch(
    "pool",
    Implementation("mosaic_gpu", mosaic_gpu.pool, PORTABLE, mosaic_gpu.refuses),
    Implementation("xla", xla.pool),
)
OVERLAPPING_DISPATCH = Dispatch(
    "overlapping_pool",
    Implementation(
        "mosaic_gpu",
        mosaic_gpu.overlapping_pool,
        PORTABLE,
        mosaic_gpu.refuses_overlapping,
    ),
    Implementation("xla", xla.overlapping_pool),
)


@typed
def pool(
    content: Float[Array, "b g s c"],
    score: Float[Array, "b g s c"],
    *,
    implementation: str | None = None,
) -> Float[Array, "b g c"]:
    """Σ_s softmax_s(score) ∘ content, channel by channel, in float32.

    Args:
      content, score: float[b, g, s, c]: s slots of each of g groups.
      implementation: a name of ``DISPATCH.names``; None for the best supported.

    Returns:
      float32[b, g, c].

    Raises:
      Unsupported: the named implementation does not serve the call.

    Source: the compressor of DeepSeek-V4 (arXiv 2606.19348).
    """
    return DISPATCH(content, score, implementation=implementation)


@typed
def overlapping_pool(
    content: Float[Array, "b before_g s two_c"],
    score: Float[Array, "b before_g s two_c"],
    *,
    implementation: str | None = None,
) -> Float[Array, "b g c"]:
    """The same where each group also feeds the next entry.

    Args:
      content, score: float[b, 1 + g, s, 2c]: the group before the first, then g groups.
        The first half of a group's channels feeds the next entry, the second half its
        own. Where no group is before the first, score its slots far below all others
        (finite, such as -1e30).
      implementation: a name of ``OVERLAPPING_DISPATCH.names``; None for the best
        supported.

    Returns:
      float32[b, g, c], each a softmax over 2·s slots.

    Raises:
      ValueError: there is no group, or an odd number of channels.
      Unsupported: the named implementation does not serve the call.
    """
    _, before_g, _, two_c = content.shape
    if before_g == 0 or two_c % 2:
        raise ValueError(
            f"overlapping_pool content: {before_g} groups of {two_c} channels, "
            "expected at least one group and an even number"
        )
    return OVERLAPPING_DISPATCH(content, score, implementation=implementation)
