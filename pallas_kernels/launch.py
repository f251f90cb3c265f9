"""What Mosaic GPU kernels need, for every JAX that the project allows."""

import inspect
from collections.abc import Callable
from typing import Any

from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# JAX 0.11 takes no cost estimate.
_ESTIMATES = "cost_estimate" in inspect.signature(plgpu.kernel).parameters


def kernel(
    body: Callable[..., Any], *, cost_estimate: pl.CostEstimate, **kwargs: Any
) -> Callable[..., Any]:
    """``plgpu.kernel(body, cost_estimate=cost_estimate, **kwargs)``."""
    if _ESTIMATES:
        kwargs["cost_estimate"] = cost_estimate
    return plgpu.kernel(body, **kwargs)


def store(ref: Any, value: Array) -> None:
    """Writes registers to global memory, in whatever layout they are."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # JAX 0.11
        ref[...] = value
