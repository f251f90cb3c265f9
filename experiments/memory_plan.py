"""The plan of a run's cache on the memory it has, for env.json."""

import dataclasses
from typing import Any

import jax

import hybrid_attn as ha
from hybrid_attn.cache.adapters import memory_adapter
from hybrid_attn.cache.layout import layout_of
from hybrid_attn.cache.planning import Footprint


def memory_plan(model: ha.Model, rows: int, capacity: int) -> dict[str, Any]:
    """A `hybrid_attn.cache.planning.Plan` as JSON has it.

    Args:
      rows, capacity: of the largest cache of the run, sequences and tokens.

    Raises:
      DoesNotFit: the memory of the default device does not hold such a cache.
    """
    cache = jax.eval_shape(lambda: ha.init_cache(model.config, rows, capacity))
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    plan = memory_adapter(_kind()).plan(
        cache.spec,
        parameters,
        footprint=Footprint.of_layout(layout_of(cache)),
        rows=rows,
    )
    return dataclasses.asdict(plan)


def _kind() -> str:
    platform = jax.devices()[0].platform
    if platform != "gpu":
        return platform
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version else "cuda"
