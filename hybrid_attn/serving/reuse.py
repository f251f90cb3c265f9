"""Prefill through a store: takes what is there, leaves what is new for others."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from hybrid_attn.cache.states import Cache
from hybrid_attn.model import Model
from hybrid_attn.step import prefill
from hybrid_attn.store.store import Store
from hybrid_attn.transforms.offload import FULL, check_tokens, offload
from hybrid_attn.transforms.restore import restore


@dataclasses.dataclass(frozen=True)
class Reuse:
    """What a prefill found and left.

    Attributes:
      restored: int[b], tokens of each row that were not computed.
      blocks, bytes: newly stored.
    """

    restored: np.ndarray
    blocks: int
    bytes: int


def prefill_through(
    store: Store,
    model: Model,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    capacity: int,
    undo: int = 16,
    dtypes=None,
    recent: int = FULL,
) -> tuple[Array, Cache, Reuse]:
    """The logits and the cache of prompts, computing only what the store has not.

    Each block is stored as soon as it is full, with the recent states of every
    ``recent``-th boundary, so that prompts which part anywhere later find the deepest
    boundary that they share. EXACT with recent states, ROUNDING where they are
    replayed.

    Args:
      store: an open store of this model's id.
      tokens: int[b, t]; lengths: int[b] in 1..t, None for t.
      capacity, undo, dtypes: as `init_cache`.
      recent: as `offload`.

    Returns:
      (logits float32[b, v] of each row's last token, cache, `Reuse`).

    Raises:
      ValueError: as `prefill` and `offload`; a row without a token.
    """
    ids = check_tokens(tokens)
    counts = np.full((ids.shape[0],), ids.shape[1])
    counts = counts if lengths is None else np.asarray(lengths)
    if counts.shape != (ids.shape[0],) or (counts < 1).any():
        raise ValueError(f"lengths {counts.tolist()}: expected at least 1 in every row")
    # The last token is always computed: its logits are what is asked for.
    cache = restore(
        store,
        model.config,
        ids,
        counts - 1,
        capacity=capacity,
        undo=undo,
        dtypes=dtypes,
    )
    restored = np.asarray(cache.length)
    size = cache.spec.block_tokens
    logits = jnp.zeros((ids.shape[0], model.config.vocab_size), jnp.float32)
    blocks = stored = 0
    while True:
        begin = np.asarray(cache.length)
        end = np.minimum(counts, (begin // size + 1) * size)
        width = int((end - begin).max())
        if width <= 0:
            break
        column = np.minimum(begin[:, None] + np.arange(width), ids.shape[1] - 1)
        piece = np.take_along_axis(ids, column, axis=1)
        out, cache = prefill(
            model, cache, piece, end - begin, logits="last", donate=True
        )
        assert out is not None  # "last" always gives some
        logits = jnp.where(jnp.asarray(end > begin)[:, None], out, logits)
        # A boundary's recent states are only there until the next one.
        if (recent and (end % (size * recent) == 0).any()) or (end == counts).all():
            report = offload(cache, store, ids, recent=recent)
            blocks, stored = blocks + report.blocks, stored + report.bytes
    return logits, cache, Reuse(restored, blocks, stored)
