"""`plgpu.kernel` for every JAX that the project allows."""

import inspect
from collections.abc import Callable
from typing import Any

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
