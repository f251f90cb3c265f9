"""Multi-query associative recall with controlled distances.

A row is filler (token 0), a block of key-value pairs, and queries. A query is a key
token of the block; its target is the value that the key was last written with.
Everything that is not a query has no target.

    layout "offset"    0 0 0 k1 v1 k2 v2 [k1] k3 v3 [k3] ... kN vN 0 0 q 0 q 0 0 0 q 0
    layout "aligned"   k1 v1 k2 v2 ... kN vN q 0 0 0 q 0 ...

Decisions, and why:

- *The answer is not written into the input after a query; filler stands there*, as in
  zoology. So a value stands in the row once a write, the distance of a query has one
  meaning, and a second query of a key cannot be answered from the first.
- *Filler is token 0*, not random tokens: a random token after a query would be a
  second "value" of its key and would make last-write-wins ambiguous.
- *The block starts at a random offset of any parity.* The textbook layout puts the
  pairs exactly on the grid of groups of 2, 4 and 16 tokens, which flatters compressed
  attention. "aligned" keeps it for comparison.
- *Near queries stand inside the block* (brackets above), each for one of the pairs
  whose value lies fewer than `near_window` tokens back. There the window is full of
  other pairs, so that copying whatever value is in sight is wrong about two times in
  three; a query behind the block, where filler pushes pairs out of sight, would let a
  window model score without matching keys. They also break the regular spacing of the
  pairs.
- *Far queries* follow the block at gaps from a power law (p ~ g^(a - 1), a = 0.01, as
  in MQAR), each pair once before any is asked again.

Source: Arora et al. 2023, "Zoology" (arXiv 2312.04927), HazyResearch/zoology
`zoology/data/multiquery_ar.py`; `forgetting` follows its `forgetting_mqar.py` in
spirit: the last write wins.
"""

import dataclasses
from typing import Literal

import numpy as np

from hybrid_attn.training.data.batch import IGNORE, Batch, generator

BUCKETS = ("in_window", "beyond_window", "beyond_reach")
"""Names of the distance classes that `buckets` tells apart."""


def buckets(
    distance: np.ndarray, window: int, layers: int, *, token_shift: int = 0
) -> dict[str, np.ndarray]:
    """Sorts queries by what a stack of sliding windows can see of their answer.

    A window of W reads distances 0..W-1, so `layers` of them carry information over
    at most layers * (W - 1) tokens. A key that also looks at the token before it adds
    one token a layer (`token_shift=1`).

    Args:
      distance: int[...], as in `Batch.distance`.
      window: W, in tokens, at least 1.
      layers: number of window layers, at least 1.
      token_shift: tokens that a key looks back by itself.

    Returns:
      bool[...] masks by the names in `BUCKETS`; disjoint, and together every
      distance above 0.

    Raises:
      ValueError: a window or number of layers below 1, or a negative shift.
    """
    if window < 1 or layers < 1 or token_shift < 0:
        raise ValueError(
            "window and layers must be at least 1 and token_shift at least 0, got "
            f"window {window}, layers {layers}, token_shift {token_shift}"
        )
    distance = np.asarray(distance)
    reach = layers * (window - 1 + token_shift)
    sight = min(window - 1, reach)
    return {
        "in_window": (distance > 0) & (distance <= sight),
        "beyond_window": (distance > sight) & (distance <= reach),
        "beyond_reach": (distance > 0) & (distance > reach),
    }


@dataclasses.dataclass(frozen=True)
class RecallTask:
    """Multi-query associative recall; see the module's text for the layout.

    Attributes:
      vocab: V; 0 is filler, keys are 1..V/2-1, values V/2..V-1.
      pairs: N, key-value pairs written in the block.
      queries: far queries a row, behind the block.
      near_queries: queries a row inside the block, at most N - 1, each at most
        `near_window - 1` tokens from its answer. The layout "aligned" has none, as
        the textbook has none.
      near_window: W of the windows that the near queries are meant for, in tokens.
      length: t, tokens a row.
      layout: "offset" or "aligned".
      max_offset: the block starts at 0..max_offset-1 in the layout "offset".
      power: a of the power law of the far gaps.
      forgetting: N // 2 of the N writes overwrite a key that stands before them.
    """

    vocab: int = 64
    pairs: int = 8
    queries: int = 8
    near_queries: int = 6
    near_window: int = 8
    length: int = 128
    layout: Literal["offset", "aligned"] = "offset"
    max_offset: int = 32
    power: float = 0.01
    forgetting: bool = False

    def __post_init__(self) -> None:
        """Raises: ValueError where a row of this form cannot exist."""
        if self.layout not in ("offset", "aligned"):
            raise ValueError(f"layout is {self.layout!r}, not 'offset' or 'aligned'")
        if self.vocab < 4 or self.vocab % 2:
            raise ValueError(f"vocab must be even and at least 4, got {self.vocab}")
        if not 1 <= self.pairs <= self.vocab // 2 - 1:
            raise ValueError(
                f"vocab {self.vocab} has {self.vocab // 2 - 1} keys: pairs must be "
                f"1..{self.vocab // 2 - 1}, got {self.pairs}"
            )
        if not 0 <= self.near_queries <= self.pairs - 1:
            raise ValueError(
                f"near_queries must be 0..pairs-1 = 0..{self.pairs - 1}, got "
                f"{self.near_queries}"
            )
        if self.near_window < 2 or self.max_offset < 1 or self.queries < 1:
            raise ValueError(
                "near_window must be at least 2, max_offset and queries at least 1, "
                f"got {self.near_window}, {self.max_offset} and {self.queries}"
            )
        if self.power <= 0:
            raise ValueError(f"power must be above 0, got {self.power}")
        if self.length < self.shortest_length:
            raise ValueError(
                f"length {self.length} is too short: {self.pairs} pairs and "
                f"{self.queries} queries in the layout {self.layout!r} need "
                f"{self.shortest_length}"
            )

    @property
    def block(self) -> int:
        """Tokens of the block: the pairs and the near queries among them."""
        near = self.near_queries if self.layout == "offset" else 0
        return 2 * self.pairs + near

    @property
    def shortest_length(self) -> int:
        """The least `length` in which every row has a place for every query."""
        # An offset row may shift its queries by one token, to reach both parities.
        before = self.max_offset if self.layout == "offset" else 0
        return before + self.block + 2 * self.queries

    def batch(self, seed: int, step: int, size: int) -> Batch:
        """One batch, the same for the same task, seed, step and size.

        For a test set take another seed (zoology: train + 10).

        Args:
          seed: at least 0.
          step: at least 0.
          size: b, rows.

        Returns:
          `Batch` of shape [size, length]. `distance` counts from a query to the value
          token of the last write of its key.

        Raises:
          ValueError: a negative seed or step.
        """
        rng = generator(f"recall/{self.layout}", seed, step)
        tokens = np.zeros((size, self.length), np.int32)
        targets = np.full((size, self.length), IGNORE, np.int32)
        distance = np.zeros((size, self.length), np.int32)
        rows = np.arange(size)[:, None]

        which, keys = self._writes(rng, size)
        values = _distinct(rng, size, self.vocab // 2, self.pairs) + self.vocab // 2
        near = np.zeros((size, self.pairs), np.int64)
        offset = np.zeros((size, 1), np.int64)
        shift = np.zeros((size, 1), np.int64)
        if self.layout == "offset":
            offset = rng.integers(0, self.max_offset, (size, 1))
            shift = rng.integers(0, 2, (size, 1))
            # A query after the first pair would have one candidate: none there.
            chosen = 1 + _distinct(rng, size, self.pairs - 1, self.near_queries)
            np.put_along_axis(near, chosen, 1, axis=1)
        before = np.cumsum(near, axis=1) - near
        start = offset + 2 * np.arange(self.pairs) + before
        answer = start + 1
        tokens[rows, start] = keys
        tokens[rows, answer] = values

        def ask(row: np.ndarray, position: np.ndarray, write: np.ndarray) -> None:
            tokens[row, position] = keys[row, write]
            targets[row, position] = values[row, write]
            distance[row, position] = position - answer[row, write]

        for pair in range(1, self.pairs):
            row = np.flatnonzero(near[:, pair])
            position = answer[row, pair] + 1
            gap = position[:, None] - answer[row, : pair + 1]
            live = ~_rewritten(which[row, : pair + 1])
            candidate = live & (gap <= self.near_window - 1)
            ask(row, position, _pick(rng, candidate))

        begin = offset + self.block + shift
        slots = self._slots(rng, (self.length - begin) // 2)
        last = ~_rewritten(which)
        ask(rows, begin + 2 * slots, self._asked(rng, last))
        return Batch(tokens, targets, distance)

    def _writes(
        self, rng: np.random.Generator, size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which key each write goes to: index [b, N] into the row's keys, and token."""
        distinct = self.pairs - (self.pairs // 2 if self.forgetting else 0)
        drawn = 1 + _distinct(rng, size, self.vocab // 2 - 1, distinct)
        which = np.tile(np.arange(self.pairs) % distinct, (size, 1))
        if self.forgetting:
            which = rng.permuted(which, axis=1)
        return which, np.take_along_axis(drawn, which, axis=1)

    def _slots(self, rng: np.random.Generator, space: np.ndarray) -> np.ndarray:
        """Draws `queries` slots [b, q] below `space` [b, 1] without replacement."""
        gap = np.arange(1, int(space.max()) + 1, dtype=np.float64)
        weight = (self.power - 1) * np.log(gap)
        # The largest of weight + Gumbel noise are a weighted draw without replacement.
        noise = rng.gumbel(size=(len(space), len(gap)))
        score = np.where(gap <= space, weight + noise, -np.inf)
        return np.argsort(-score, axis=1, kind="stable")[:, : self.queries]

    def _asked(self, rng: np.random.Generator, last: np.ndarray) -> np.ndarray:
        """The write [b, q] that each far query asks for, among `last` bool[b, N]."""
        each = int(last[0].sum())
        rounds = -(-self.queries // each)
        draws = []
        for _ in range(rounds):
            score = np.where(last, rng.random(last.shape), np.inf)
            draws.append(np.argsort(score, axis=1)[:, :each])
        return np.concatenate(draws, axis=1)[:, : self.queries]


def _distinct(
    rng: np.random.Generator, size: int, below: int, count: int
) -> np.ndarray:
    """int[size, count], in each row different numbers 0..below-1."""
    return np.argsort(rng.random((size, below)), axis=1)[:, :count]


def _rewritten(which: np.ndarray) -> np.ndarray:
    """bool[b, n]: a later write of the n goes to the same key."""
    same = which[:, :, None] == which[:, None, :]
    return np.triu(same, k=1).any(axis=2)


def _pick(rng: np.random.Generator, candidate: np.ndarray) -> np.ndarray:
    """int[b]: one of the candidates of each row, each as likely."""
    return np.argmax(np.where(candidate, rng.random(candidate.shape), -1.0), axis=1)
