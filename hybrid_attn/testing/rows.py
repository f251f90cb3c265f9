"""Invariant: at one compiled shape a row does not know what the others hold."""

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_attn.cache.states import Cache
from hybrid_attn.step import prefill
from hybrid_attn.testing.report import Checks
from hybrid_attn.testing.states import map_states
from hybrid_attn.testing.subject import CHUNK, Subject


def rows_keep_their_bits(subject: Subject, check: Checks) -> None:
    """Logits and cache of a row, bit by bit, whatever stands in the other rows.

    The others get other tokens, lengths and pasts, states of NaN, and faults; steps
    of one and of several tokens, and `prefill`.
    """
    row = np.arange(subject.rows)
    kept = row % 3 == 1
    base = subject.at(row)
    others = _others(subject, base, kept)
    for name, width in (("single tokens", 1), ("chunks", CHUNK)):
        counts = np.where(kept, 1 + row % width, width)
        tokens = subject.slice(row, counts, width)
        want = _twice(subject.run, base, tokens, counts)
        for case, (cache, other_tokens, other_counts) in others.items():
            got = _twice(
                subject.run,
                cache,
                np.where(kept[:, None], tokens, other_tokens[:, :width]),
                np.where(kept, counts, np.minimum(other_counts, width)),
            )
            check.same(f"{name}, {case}", got, want, kept)
    total = np.minimum(subject.time - row, CHUNK + 1 + row)
    tokens = subject.slice(row, total, subject.time)
    want = prefill(subject.model, base, tokens, total)
    for case, (cache, other_tokens, other_counts) in others.items():
        if case == "faults":
            continue  # `prefill` refuses those by an error
        other_counts = np.minimum(other_counts, subject.time - np.asarray(cache.length))
        got = prefill(
            subject.model,
            cache,
            np.where(kept[:, None], tokens, other_tokens),
            np.where(kept, total, np.maximum(other_counts, 0)),
        )
        check.same(f"prefill, {case}", got, want, kept)


def _twice(run, cache: Cache, tokens, counts):
    """Two steps, so that what the first one wrote is read."""
    counts = np.asarray(counts, np.int32)
    first, cache = run(cache, tokens, counts)
    second, cache = run(cache, tokens, counts)
    return first, second, cache


def _others(subject: Subject, base: Cache, kept: np.ndarray) -> dict:
    """What the rows that are not kept hold and get: (cache, tokens, counts) a case."""
    vocab, rows = subject.config.vocab_size, subject.rows
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, vocab, (rows, subject.time)).astype(np.int32)
    lengths = rng.permutation(rows)
    past = subject.whole(subject.cache(), tokens, lengths)[1]
    counts = rng.integers(0, subject.time + 1, rows)
    broken = map_states(base, lambda array, axis: jnp.full_like(array, jnp.nan))
    outside = np.where(rng.random(tokens.shape) < 0.5, vocab, tokens)
    # As many as fit, none at all, a few: block loops run as far as the longest row.
    return {
        "same past": (base, tokens, counts),
        "other past": (_mixed(base, past, kept), tokens, counts),
        "nothing": (_mixed(base, subject.cache(), kept), tokens, 0 * counts),
        "NaN": (_mixed(base, broken, kept), tokens, counts),
        "faults": (base, outside, np.maximum(counts, 1)),
    }


def _mixed(base: Cache, other: Cache, kept: np.ndarray) -> Cache:
    """The kept rows of one cache and the others of another."""

    def choose(a, b):
        return jnp.where(jnp.reshape(kept, (-1,) + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, base, other)
