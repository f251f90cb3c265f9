"""Invariants: however the tokens are cut, the numbers are the same."""

import jax
import numpy as np

from hybrid_attn.initial import init_cache
from hybrid_attn.step import compile_step, prefill, step
from hybrid_attn.testing.report import Checks
from hybrid_attn.testing.subject import CHUNK, EDGES, UNDO, Subject


def _chunk_plan(subject: Subject, seed: int = 0):
    """Row i takes chunks of i + 1 tokens up to 9; the others random ones, 0 too."""
    rng = np.random.default_rng(seed)

    def plan(begin):
        fixed = np.arange(1, subject.rows + 1)
        return np.where(fixed <= CHUNK, fixed, rng.integers(0, CHUNK + 1, fixed.shape))

    return plan


def _ones(begin):
    return np.ones_like(begin)


def training_equals_step(subject: Subject, check: Checks) -> None:
    """`forward` gives the logits of one step from an empty cache."""
    check.close("whole", subject.forward(subject.tokens), subject.full)
    # Shorter than any group, and not a multiple of one.
    for t in (3, 13):
        check.close(
            f"t={t}", subject.forward(subject.tokens[:, :t]), subject.full[:, :t]
        )


def full_equals_chunked(subject: Subject, check: Checks) -> None:
    """Chunks 1..9 and random ones (0 included), as rows of one ragged batch."""
    logits, cache = subject.replay(subject.cache(), _chunk_plan(subject), CHUNK)
    check.close("chunks", logits, subject.full)
    check.true("length", np.asarray(cache.length) == subject.time)
    check.true("no faults", np.asarray(cache.faults) == 0)


def full_equals_stepwise(subject: Subject, check: Checks) -> None:
    """Token by token from an empty cache."""
    logits, _ = subject.replay(subject.cache(), _ones, 1)
    check.close("t=1", logits, subject.full)


def exact_shapes(subject: Subject, check: Checks) -> None:
    """Unpadded compiled shapes of 5 and 9 tokens, and of the rest."""
    for t in (5, CHUNK):
        cache, begin = subject.cache(), 0
        while begin + t <= subject.time:
            tokens = subject.tokens[:, begin : begin + t]
            logits, cache = subject.run(cache, tokens)
            want = subject.full[:, begin : begin + t]
            check.close(f"t={t} from {begin}", logits, want)
            begin += t


def rows_at_phases(subject: Subject, check: Checks) -> None:
    """Rows of lengths 0..15 in one batch go on together, by ones and by chunks."""
    lengths = np.arange(subject.rows)
    column = np.arange(subject.time)[None] >= lengths[:, None]
    for name, plan, width in (
        ("by ones", _ones, 1),
        ("by chunks", _chunk_plan(subject, 1), CHUNK),
    ):
        logits, _ = subject.replay(subject.at(lengths), plan, width)
        check.close(name, logits, subject.full, column)


def right_padding(subject: Subject, check: Checks) -> None:
    """Lengths 0..9 in one padded shape equal the same tokens without padding."""
    base = subject.at(3)
    counts = np.arange(subject.rows) % (CHUNK + 1)
    (logits, want, where), cache = subject.advance(base, counts, CHUNK)
    check.close("real tokens", logits, want, where)
    check.finite("padding", logits)
    check.true("length", np.asarray(cache.length) == 3 + counts)
    idle = counts == 0
    check.same("rows of 0 tokens", cache, base, idle)
    # What stands in the padding changes no bit of the state or of a real logit.
    tokens = subject.slice(np.full(subject.rows, 3), counts, CHUNK)
    tokens = np.where(where, tokens, (tokens + 11) % subject.config.vocab_size)
    other, other_cache = subject.step(base, tokens, counts)
    check.same("state, other padding", other_cache, cache)
    check.same("logits, other padding", np.asarray(other)[where], logits[where])


def batch_of_one(subject: Subject, check: Checks) -> None:
    """A row alone gives what it gives in a batch at mixed phases."""
    for row in (1, 6):
        cache = subject.cache(rows=1)
        out = []
        for begin in range(0, subject.time, CHUNK):
            tokens = subject.tokens[row : row + 1, begin : begin + CHUNK]
            logits, cache = subject.step(cache, tokens)
            out.append(np.asarray(logits))
        check.close(f"row {row}", np.concatenate(out, 1), subject.full[row : row + 1])


def boundaries(subject: Subject, check: Checks) -> None:
    """Ratio and window 128: lengths 124..132 and 252..260, then on from each."""
    long = subject.long
    lengths = np.asarray(EDGES)
    logits, _, _ = long.whole(long.cache(), long.tokens, lengths)
    where = np.arange(long.time) < lengths[:, None]
    check.close("prefixes", logits, long.full, where)
    cache = long.at(lengths)
    counts = 1 + np.arange(long.rows) % CHUNK
    for turn in range(2):
        (logits, want, where), cache = long.advance(cache, counts, CHUNK)
        check.close(f"chunk {turn} from the edge", logits, want, where)
    cache = long.at(lengths - 3)
    for turn in range(6):
        (logits, want, where), cache = long.advance(cache, np.ones_like(counts), 1)
        check.close(f"token {turn} across the edge", logits, want, where)


def prefill_any_split(subject: Subject, check: Checks) -> None:
    """`prefill` gives the same bits, logits and whole cache, for every split."""
    model, total = subject.model, subject.time - np.arange(subject.rows) % 5
    want, whole = prefill(model, subject.cache(), subject.tokens, total)
    where = np.arange(subject.time) < total[:, None]
    check.close("against step", want, subject.full, where)
    rng = np.random.default_rng(3)
    want = np.asarray(want)
    for pieces in (2, 3, 5):
        cuts = np.sort(rng.integers(0, total[:, None] + 1, (subject.rows, pieces - 1)))
        edges = np.concatenate(
            [np.zeros((subject.rows, 1), int), cuts, total[:, None]], axis=1
        )
        cache, got = subject.cache(), np.zeros_like(want)
        for piece in range(pieces):
            begin, counts = edges[:, piece], np.diff(edges)[:, piece]
            tokens = subject.slice(begin, counts, max(1, counts.max()))
            logits, cache = prefill(model, cache, tokens, counts)
            for row in range(subject.rows):
                n = counts[row]
                got[row, begin[row] : begin[row] + n] = np.asarray(logits)[row, :n]
        check.same(f"logits, {pieces} pieces", got[where], want[where])
        check.same(f"cache, {pieces} pieces", cache, whole)


def stored_bfloat16(subject: Subject, check: Checks) -> None:
    """With bfloat16 storage, full = chunked = stepwise within the bfloat16 row."""
    coarse = subject.bfloat16
    logits, _ = coarse.replay(coarse.cache(), _chunk_plan(coarse), CHUNK)
    check.close("chunks", logits, coarse.full, table=coarse.table)
    logits, _ = coarse.replay(coarse.cache(), _ones, 1)
    check.close("t=1", logits, coarse.full, table=coarse.table)
    stored = {str(x.dtype) for x in jax.tree.leaves(coarse.cache().layers)}
    check.true("stores bfloat16", "bfloat16" in stored)


def compile_counts(subject: Subject, check: Checks) -> None:
    """Decoding 1..N compiles once; lengths of a bucket share one compiled shape."""
    counted: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "jaxpr_to_mlir" in event and "run" in str(kwargs.get("fun_name", "")):
            counted.append(event)

    # A capacity that nothing else uses, so that the first call must compile.
    cache = init_cache(
        subject.config, 2, subject.capacity + 3 * subject.block, undo=UNDO
    )
    tokens = subject.tokens[:2]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for t in range(20):
            cache = step(subject.model, cache, tokens[:, t : t + 1])[1]
        check.true("decoding 1..20", len(counted) == 1, f"{len(counted)} compilations")
        run = compile_step(subject.model, donate=False)
        for t in range(3):
            _, cache = run(cache, tokens[:, t : t + 1])
        check.true("compile_step too", len(counted) <= 2, f"{len(counted)} in all")
        before = len(counted)
        empty = init_cache(subject.config, subject.rows, subject.capacity, undo=UNDO)
        for t in range(9, 17):
            step(subject.model, empty, subject.tokens[:, :t])
        added = len(counted) - before
        check.true("lengths 9..16", added <= 1, f"{added} compilations")
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
