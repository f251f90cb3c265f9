"""A small model of all mixers, and a session that feeds and records its cache."""

import dataclasses
import functools

import jax
import numpy as np
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.checkpoint import Checkpointer
from hybrid_attn.testing import small_config
from hybrid_attn.testing.subject import randomise

CONFIG = small_config("dense,swa,hca,csa")
MODEL_ID = "a" * 64
CAPACITY = 96


@functools.cache
def model() -> ha.Model:
    return randomise(ha.Model(CONFIG, rngs=nnx.Rngs(0)))


@functools.cache
def _run(donate: bool):
    return ha.compile_step(model(), donate=donate)


class Session:
    """Two rows of random tokens, read in the caller's cuts.

    Attributes:
      cache: as it stands.
      rows: int32[n], what each row was fed.
      sequence: of the last record, as `observe` gave it.
    """

    def __init__(self, seed: int = 0, dtypes=None, donate: bool = False):
        self.all = np.random.default_rng(seed).integers(0, 31, (2, CAPACITY), np.int32)
        self.cache = ha.init_cache(CONFIG, 2, CAPACITY, 8, dtypes)
        self.rows = [row[:0] for row in self.all]
        self.sequence = 0
        self._donate = donate

    @property
    def caches(self) -> dict[str, ha.Cache]:
        return {"main": self.cache}

    @property
    def tokens(self) -> dict[str, list[np.ndarray]]:
        return {"main": self.rows}

    @property
    def held(self) -> int:
        return sum(row.size for row in self.rows)

    def read(self, *counts: int) -> None:
        """One call for so many further tokens of each row, padded to a few widths."""
        width = 1 if max(counts) <= 1 else 8 if max(counts) <= 8 else 48
        chunk = np.zeros((2, width), np.int32)
        for row, count in enumerate(counts):
            at = self.rows[row].size
            chunk[row, :count] = self.all[row, at : at + count]
            self.rows[row] = self.all[row, : at + count].copy()
        _, self.cache = _run(self._donate)(
            self.cache, chunk, np.array(counts, np.int32)
        )

    def rewind(self, count: int) -> None:
        """Takes ``count`` tokens of each row back; what follows are others."""
        self.rows = [row[: row.size - count] for row in self.rows]
        lengths = np.array([row.size for row in self.rows], np.int32)
        self.cache = ha.transforms.rewind(self.cache, lengths)
        self.all = (self.all + 1) % 31
        for row, ids in enumerate(self.rows):
            self.all[row, : ids.size] = ids

    def replace_row(self, row: int, seed: int, length: int) -> None:
        """Another sequence in a row, or the same tokens in one call."""
        other = Session(seed)
        counts = [0, 0]
        counts[row] = length
        other.read(*counts)
        self.cache = jax.tree.map(
            lambda ours, theirs: ours.at[row].set(theirs[row]), self.cache, other.cache
        )
        self.rows[row] = other.rows[row]
        self.all[row] = other.all[row]

    def observe(self, writer: Checkpointer, info=None) -> int:
        self.sequence = writer.observe(self.caches, self.tokens, info)
        return self.sequence

    def checkpointer(self, path, **options) -> Checkpointer:
        return Checkpointer(path, model_id=MODEL_ID, **options)

    def continue_from(self, restored) -> None:
        self.cache = restored.caches["main"]
        self.rows = list(restored.tokens["main"])

    def copy(self) -> "Session":
        other = Session.__new__(Session)
        other.__dict__.update(self.__dict__)
        other.rows = list(self.rows)
        return other


def same(ours: ha.Cache, theirs: ha.Cache) -> None:
    """Equal in all that is valid, in cuts, and in every count."""
    assert ha.diff(ours, theirs) is None
    for name in ("cut", "on_grid", "faults"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert dataclasses.asdict(ours.spec) == dataclasses.asdict(theirs.spec)
    for one, other in zip(ours.cuts, theirs.cuts, strict=True):
        for name in one:
            a, b = (np.asarray(x[name]) for x in (one, other))
            assert (a.view(np.uint8) == b.view(np.uint8)).all(), name
