"""Needle recall: one key-value pair in a haystack, asked for at the end of the row.

    x x x x k v x x x x x x x x k        the target at the last token is v
             `---- distance ---'

The haystack is noise over every other key and every value, so that neither a token's
class nor its rarity gives the needle away: it has to be found by its key. Source:
RULER niah_single (hsiehjackson/RULER) reduced to single tokens.
"""

import dataclasses
from typing import Literal

import numpy as np

from hybrid_attn.training.data.batch import IGNORE, Batch, generator


@dataclasses.dataclass(frozen=True)
class NeedleTask:
    """Recall of one needle at a controlled distance.

    Attributes:
      vocab: V; 0 is filler, keys are 1..V/2-1, values V/2..V-1.
      length: t, tokens a row.
      haystack: "noise" (random keys and values) or "filler" (token 0 only).
    """

    vocab: int = 64
    length: int = 128
    haystack: Literal["noise", "filler"] = "noise"

    def __post_init__(self) -> None:
        """Raises: ValueError where a row of this form cannot exist."""
        if self.haystack not in ("noise", "filler"):
            raise ValueError(f"haystack is {self.haystack!r}, not 'noise' or 'filler'")
        if self.vocab < 6 or self.vocab % 2:
            raise ValueError(f"vocab must be even and at least 6, got {self.vocab}")
        if self.length < 3:
            raise ValueError(f"length must be at least 3, got {self.length}")

    @property
    def max_distance(self) -> int:
        """The largest distance: the needle stands at the start of the row."""
        return self.length - 2

    def batch(
        self, seed: int, step: int, size: int, distance: int | None = None
    ) -> Batch:
        """One batch, the same for the same arguments.

        Args:
          seed: at least 0.
          step: at least 0.
          size: b, rows.
          distance: tokens from the query back to the value, 1..`max_distance`; None
            draws one a row, each as likely.

        Returns:
          `Batch` of shape [size, length] with one target a row, at its last token.

        Raises:
          ValueError: a distance that does not fit, a negative seed or step.
        """
        if distance is not None and not 1 <= distance <= self.max_distance:
            raise ValueError(
                f"distance must be 1..{self.max_distance} at length {self.length}, "
                f"got {distance}"
            )
        rng = generator("needle", seed, step)
        half = self.vocab // 2
        rows = np.arange(size)
        key = rng.integers(1, half, size)
        value = rng.integers(half, self.vocab, size)
        drawn = rng.integers(1, self.max_distance + 1, size)
        back = drawn if distance is None else np.full(size, distance)
        shape = (size, self.length)
        tokens = np.zeros(shape, np.int32)
        if self.haystack == "noise":
            # Numbers 1..V-2 with those from the key on moved up by one: never the key.
            noise = rng.integers(1, self.vocab - 1, shape)
            tokens[:] = noise + (noise >= key[:, None])
        end = self.length - 1
        tokens[rows, end - back - 1] = key
        tokens[rows, end - back] = value
        tokens[rows, end] = key
        targets = np.full(shape, IGNORE, np.int32)
        targets[:, end] = value
        where = np.zeros(shape, np.int32)
        where[:, end] = back
        return Batch(tokens, targets, where)
