"""The batch that every data source yields."""

from typing import NamedTuple

import numpy as np

IGNORE = -100
"""Target of a position that takes no part in the loss."""


class Batch(NamedTuple):
    """Tokens and what to predict at each of them.

    Attributes:
      tokens: int32[b, t], the input.
      targets: int32[b, t]; `targets[i, j]` is to be predicted from
        `tokens[i, : j + 1]`, or `IGNORE`.
      distance: int32[b, t]; tokens from a query back to the token that answers it
        (1 = the token just before the query), 0 where nothing is queried.
      segment_ids: int32[b, t] of rows that pack documents, as for
        `hybrid_attn.forward`; the targets at the ends of documents are `IGNORE`. None:
        every row is one document.
    """

    tokens: np.ndarray
    targets: np.ndarray
    distance: np.ndarray
    segment_ids: np.ndarray | None = None


def generator(task: str, seed: int, step: int) -> np.random.Generator:
    """Random numbers of one batch, independent between tasks, seeds and steps.

    Args:
      task: name of the data source; its bytes enter the seed, so that two tasks
        with the same seed and step share nothing.
      seed: at least 0.
      step: at least 0.

    Raises:
      ValueError: a negative seed or step.
    """
    if seed < 0 or step < 0:
        raise ValueError(
            f"seed and step must be at least 0, got seed {seed} and step {step}"
        )
    return np.random.default_rng([*task.encode(), seed, step])
