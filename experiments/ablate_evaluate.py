"""Recall by distance and bits per byte of a trained model."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.ablate_config import EVALUATION_SEED, AblateConfig
from experiments.ablate_results import LAYOUTS, distance_bins
from hybrid_attn.model import Model, forward
from hybrid_attn.training.data import TextData, buckets


def evaluate_recall(model: Model, config: AblateConfig) -> dict[str, Any]:
    """Recall on rows of `EVALUATION_SEED`.

    Returns:
      "recall": layout -> distance class -> accuracy; "bins": `DistanceBin` fields on
      the layout "offset", with edges at the window and the reach.
    """
    graph, params = nnx.split(model)
    answer = jax.jit(
        lambda params, tokens: jnp.argmax(
            forward(nnx.merge(graph, params), tokens), axis=-1
        )
    )
    size = config.recall.evaluation_batch
    recall, bins = {}, []
    for layout in LAYOUTS:
        rows = config.recall.evaluation_task(layout).batch(
            EVALUATION_SEED, 0, config.recall.rows
        )
        answers = [
            np.asarray(answer(params, rows.tokens[first : first + size]))
            for first in range(0, config.recall.rows, size)
        ]
        correct = np.concatenate(answers) == rows.targets
        masks = buckets(
            rows.distance, config.window, config.layers, token_shift=config.token_shift
        )
        recall[layout] = {name: float(correct[m].mean()) for name, m in masks.items()}
        if layout == LAYOUTS[0]:
            edges = _edges(int(rows.distance.max()), config.window, config.reach)
            bins = [
                dataclasses.asdict(b)
                for b in distance_bins(rows.distance, correct, edges)
            ]
    return {"recall": recall, "bins": bins}


def evaluate_text(
    model: Model, data: TextData, *, length: int, windows: int, size: int
) -> dict[str, Any]:
    """Bits per byte on fixed held-out windows, each read from position 0.

    Returns:
      "bits_per_byte": mean over every predicted byte; "bytes": how many those were.
    """
    graph, params = nnx.split(model)

    def nats(params, tokens, targets):
        counted = targets >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(
            forward(nnx.merge(graph, params), tokens), jnp.where(counted, targets, 0)
        )
        return jnp.sum(jnp.where(counted, losses, 0), axis=-1)

    compiled = jax.jit(nats)
    total, count = 0.0, 0
    for batch in data.heldout(length, size=size, windows=windows):
        rows = compiled(params, batch.tokens, batch.targets)
        total += float(np.sum(np.asarray(rows), dtype=np.float64))
        count += int((batch.targets >= 0).sum())
    return {"bits_per_byte": total / count / math.log(2), "bytes": count}


def _edges(longest: int, window: int, reach: int) -> list[int]:
    """Doublings, the window and the end of the reach; no bin much narrower than that.

    Distances from 1 to `longest` fall into a bin.
    """
    marks = {1, window, reach + 1}
    doublings = {2**n for n in range(1, longest.bit_length())}
    stops = marks | {longest + 1}
    close = {n for n in doublings if any(0 < abs(n - m) < n / 4 for m in stops)}
    return sorted(n for n in marks | (doublings - close) if n <= longest)
