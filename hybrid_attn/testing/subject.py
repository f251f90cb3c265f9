"""A small model under test, with the compiled functions that invariants share."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybrid_attn.cache.states import Cache
from hybrid_attn.config import ModelConfig
from hybrid_attn.initial import init_cache
from hybrid_attn.mixers import kinds
from hybrid_attn.model import Model, forward
from hybrid_attn.step import compile_step, step
from hybrid_attn.testing.tolerances import tolerance

# Rows of every batch: rows 0..8 take chunks of 1..9, the others random ones.
ROWS = 16
TOKENS = 32
CHUNK = 9
UNDO = 8
# The longest draft; what a cache can take back by default.
DRAFT = 16
# Lengths around the edges of long groups and windows, as rows of one ragged batch.
EDGES = (*range(124, 133), *range(252, 261))
SEEDS = 40


def small_config(pattern: str, **changes) -> ModelConfig:
    """Everything on and everything small; ratios 4 (overlapping) and 8, window 8."""
    fields = dict(
        name=f"conformance {pattern}",
        vocab_size=31,
        hidden_size=32,
        pattern=pattern,
        feed_forward_size=32,
        heads=4,
        head_dim=8,
        kv_heads=1,
        dense_kv_heads=2,
        token_shift=True,
        window=8,
        decay="learned",
        decay_kinds=tuple(kind for kind in kinds() if kind != "dense"),
        csa_ratio=4,
        hca_ratio=8,
        top_k=3,
        index_heads=2,
        index_dim=8,
        rope_dims=4,
        block_multiple=1,
    )
    config = ModelConfig(**{**fields, **changes})
    common = math.lcm(*(max(1, layer.ratio) for layer in config.layers))
    return config.replace(block_multiple=-(-16 // common))


def randomise(model: Model, seed: int = 1) -> Model:
    """A copy whose norms, sinks, slot scores, shifts and slopes are not trivial."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    rng = np.random.default_rng(seed)
    new = []
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        if "slopes" in name:
            leaf = jnp.asarray(np.abs(0.2 * noise))
        elif "slot_score" in name or "sink" in name:
            leaf = jnp.asarray(noise)
        elif leaf.ndim == 1:
            leaf = leaf + 0.3 * noise
        new.append(leaf)
    return nnx.merge(graph, jax.tree.unflatten(tree, new))


def as_config(subject: str | ModelConfig, **changes) -> ModelConfig:
    """From a registered kind (two layers of it), a layer pattern or a config."""
    if isinstance(subject, ModelConfig):
        return subject.replace(**changes) if changes else subject
    pattern = f"{subject}*2" if subject in kinds() else subject
    return small_config(pattern, **changes)


class Subject:
    """A model, its tokens, the logits of one whole step, and ways to cut them.

    Attributes:
      tokens: int32[rows, time].
      full: float32[rows, time, v], the logits of one step over everything.
      gap: the smallest non-zero distance at the edge of a top-k choice in ``full``.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        *,
        stored: str = "float32",
        rows: int = ROWS,
        time: int = TOKENS,
        sequences: int = 4,
        undo: int = UNDO,
    ):
        self.name, self.config, self.stored, self.undo = name, config, stored, undo
        self.rows, self.time = rows, time
        self.model = randomise(Model(config, rngs=nnx.Rngs(0)))
        self.table = tolerance(stored)
        self.block = self.cache(1).spec.block_tokens
        self.capacity = -(-(time + self.block) // self.block) * self.block
        # Choices that hang on rounding prove nothing: take tokens that have none.
        for seed in range(SEEDS):
            self.tokens = self.draw(seed, sequences)
            logits, _, self.aux = self.whole(self.cache(), self.tokens)
            self.full = np.asarray(logits)
            self.gap = smallest_gap(self.aux)
            if self.gap > self.table.score_gap:
                break
        if not self.gap > self.table.score_gap:
            raise AssertionError(
                f"{name}: no tokens of seeds 0..{SEEDS - 1} have a score gap of 0 or "
                f"above {self.table.score_gap} at every top-k edge; got {self.gap:.3g}"
            )

    def draw(self, seed: int, sequences: int) -> np.ndarray:
        """int32[rows, time]: random tokens, ``sequences`` different rows of them."""
        rng = np.random.default_rng(seed)
        drawn = rng.integers(0, self.config.vocab_size, (sequences, self.time))
        return drawn[np.arange(self.rows) % sequences].astype(np.int32)

    def cache(self, rows: int | None = None, capacity: int | None = None):
        """An empty cache of this subject's stored dtype."""
        return init_cache(
            self.config,
            self.rows if rows is None else rows,
            capacity or getattr(self, "capacity", 1),
            undo=self.undo,
            dtypes=self.stored,
        )

    def at(self, lengths, *, keep: bool = True):
        """A cache that holds the first lengths[i] tokens of row i, by one step.

        With ``keep`` the next call for the same lengths gives the same cache.
        """
        key = tuple(np.broadcast_to(lengths, (self.rows,)).tolist())
        if key in self._made:
            return self._made[key]
        counts = np.asarray(key, np.int32)
        cache = self.whole(self.cache(), self.tokens, counts)[1]
        if keep:
            self._made[key] = cache
        return cache

    @functools.cached_property
    def _made(self) -> dict:
        return {}

    @functools.cached_property
    def whole(self):
        """`ha.step` under `jax.jit`, with auxiliaries: the step that makes ``full``."""
        graph, state = nnx.split(self.model)

        def traced(state, cache, tokens, lengths):
            return step(nnx.merge(graph, state), cache, tokens, lengths, aux=True)

        jitted = jax.jit(traced)

        def run(cache, tokens, lengths=None):
            counts = np.full(np.shape(tokens)[:1], np.shape(tokens)[1])
            counts = counts if lengths is None else np.asarray(lengths)
            return jitted(state, cache, jnp.asarray(tokens), counts.astype(np.int32))

        return run

    def step(self, cache, tokens, lengths=None) -> tuple[Any, Cache]:
        """`ha.step`: (logits, cache)."""
        out = step(self.model, cache, tokens, lengths)
        return out[0], out[1]

    def slice(self, begin, counts, width: int) -> np.ndarray:
        """int32[rows, width]: tokens begin_i .. of each row, junk after counts_i."""
        column = np.asarray(begin)[:, None] + np.arange(width)
        column = np.minimum(column, self.time - 1)
        tokens = np.take_along_axis(self.tokens, column, axis=1)
        junk = np.arange(width) >= np.asarray(counts)[:, None]
        return np.where(junk, (tokens + 7) % self.config.vocab_size, tokens)

    def advance(self, cache, counts, width: int, run=None):
        """One step of counts_i tokens; (want, got, where) of its logits, the cache."""
        counts = np.asarray(counts, np.int32)
        begin = np.asarray(cache.length)
        tokens = self.slice(begin, counts, width)
        logits, cache = (run or self.step)(cache, tokens, counts)
        column = np.minimum(begin[:, None] + np.arange(width), self.time - 1)
        want = np.take_along_axis(self.full, column[..., None], axis=1)
        where = np.arange(width) < counts[:, None]
        return (np.asarray(logits), want, where), cache

    def replay(self, cache, plan, width: int, run=None):
        """Steps by ``plan(lengths) -> counts`` to the end; all logits, the cache."""
        out = np.full(self.full.shape, np.nan, np.float32)
        while (np.asarray(cache.length) < self.time).any():
            begin = np.asarray(cache.length)
            counts = np.clip(np.minimum(plan(begin), self.time - begin), 0, width)
            (logits, _, where), cache = self.advance(cache, counts, width, run)
            for row, column in np.argwhere(where):
                out[row, begin[row] + column] = logits[row, column]
        return out, cache

    @functools.cached_property
    def run(self):
        """`ha.compile_step` without donation: exact shapes, faults, no errors."""
        return compile_step(self.model, donate=False)

    @functools.cached_property
    def forward(self):
        """The jitted training form: logits of (tokens, segment_ids=None)."""
        graph, state = nnx.split(self.model)
        jitted = jax.jit(lambda state, t, ids: forward(nnx.merge(graph, state), t, ids))

        def run(tokens, segment_ids=None):
            return np.asarray(jitted(state, jnp.asarray(tokens), segment_ids))

        return run

    # -- relatives -------------------------------------------------------------------

    @functools.cached_property
    def bfloat16(self) -> "Subject":
        """The same model over a cache that stores bfloat16."""
        return Subject(self.name + " bfloat16", self.config, stored="bfloat16")

    @functools.cached_property
    def long(self) -> "Subject":
        """Ratio and window 128, a row for each length of `EDGES`."""
        config = dataclasses.replace(
            self.config, window=128, hca_ratio=128, block_multiple=1
        )
        return Subject(
            self.name + " long",
            config,
            rows=len(EDGES),
            time=max(EDGES) + 2 * CHUNK,
            sequences=1,
        )

    def drafting(self, rows: int, time: int) -> "Subject":
        """The same model with room to take back drafts of `DRAFT` tokens."""
        return Subject(
            self.name + " drafting", self.config, rows=rows, time=time, undo=DRAFT
        )


def smallest_gap(aux, where=None) -> float:
    """The smallest non-zero score gap of the choices (where bool[b, t] holds)."""
    gaps = [np.asarray(layer["gap"]) for layer in aux if "gap" in layer]
    gaps = [gap.ravel() if where is None else gap[where] for gap in gaps]
    values = np.concatenate(gaps) if gaps else np.zeros(0)
    positive = values[values > 0]
    return float(positive.min()) if positive.size else float("inf")
