"""Gated per-channel pooling of groups into entries."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Dispatch, Implementation
from pallas_kernels.pool import xla

DISPATCH = Dispatch("pool", Implementation("xla", xla.pool))


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
