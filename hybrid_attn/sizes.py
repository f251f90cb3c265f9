"""Parameter counts, and configurations of equal size for a fair comparison."""

from collections.abc import Mapping

import jax
from flax import nnx

from hybrid_attn.config import ModelConfig
from hybrid_attn.model import Model


def count_parameters(config: ModelConfig) -> int:
    """Trained numbers of a model; nothing is allocated.

    Raises:
      ValueError: the layer pattern names an unknown kind.
    """
    model = nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def equal_size(
    configs: Mapping[str, ModelConfig], *, multiple: int = 4
) -> dict[str, ModelConfig]:
    """Widens feed-forwards until every model has as many parameters as the largest.

    The largest keeps its width; so the width given decides the common size.

    Args:
      configs: by name; `feed_forward_size` is the least width of each.
      multiple: widths grow in steps of this many channels.

    Returns:
      The configurations with the width, by name, whose count comes nearest.
    """
    counts = {name: count_parameters(config) for name, config in configs.items()}
    most = max(counts.values(), default=0)
    sized = {}
    for name, config in configs.items():
        width = config.feed_forward_size
        wider = config.replace(feed_forward_size=width + multiple)
        # Every parameter of a feed-forward is a multiple of its width.
        step = count_parameters(wider) - counts[name]
        steps = round((most - counts[name]) / step)
        sized[name] = config.replace(feed_forward_size=width + steps * multiple)
    return sized


def spread(counts: Mapping[str, int]) -> tuple[float, str, str]:
    """(largest / smallest - 1, name of the smallest, name of the largest)."""
    least, most = (
        min(counts, key=counts.__getitem__),
        max(counts, key=counts.__getitem__),
    )
    return counts[most] / counts[least] - 1, least, most
