"""Invariants of what leaves the cache: boundaries, stores, memories."""

import itertools

import numpy as np

from hybrid_attn import transforms
from hybrid_attn.diff import diff
from hybrid_attn.step import prefill
from hybrid_attn.store import open as open_store
from hybrid_attn.store.identity import model_id
from hybrid_attn.testing.report import Checks
from hybrid_attn.testing.subject import Subject

_NUMBER = itertools.count()


def _store(subject: Subject):
    # Memory urls are shared in a process.
    url = f"memory://conformance{next(_NUMBER)}/"
    return open_store(url, model_id=model_id(subject.model))


def _back(subject: Subject, store, lengths, **kwargs):
    return transforms.restore(
        store,
        subject.config,
        subject.tokens,
        lengths,
        capacity=subject.capacity,
        undo=subject.undo,
        dtypes=subject.stored,
        **kwargs,
    )


def _rest(subject: Subject, cache, lengths) -> tuple[np.ndarray, np.ndarray]:
    """(tokens right-padded to one width, their counts) from where each row stands."""
    begin = np.asarray(cache.length)
    counts = np.asarray(lengths) - begin
    return subject.slice(begin, counts, subject.time), counts


def restored_equals_cold(subject: Subject, check: Checks) -> None:
    """Offloaded after a prefill and restored, a row goes on with the same bits."""
    lengths = subject.time - np.arange(subject.rows) % subject.time
    _, cache = prefill(
        subject.model, subject.cache(), subject.tokens, lengths, logits="none"
    )
    store = _store(subject)
    transforms.offload(cache, store, subject.tokens)
    back = _back(subject, store, lengths)
    boundary = lengths // subject.block * subject.block
    check.true("boundary", np.asarray(back.length) == boundary)
    check.true("floor", np.asarray(back.floor) == boundary)
    want, _ = prefill(subject.model, subject.cache(), subject.tokens)
    got, _ = prefill(
        subject.model, back, *_rest(subject, back, [subject.time] * len(lengths))
    )
    for row, begin in enumerate(boundary):
        check.same(
            f"row {row} from {begin}",
            np.asarray(got)[row, : subject.time - begin],
            np.asarray(want)[row, begin:],
        )


def decoded_boundaries(subject: Subject, check: Checks) -> None:
    """What short steps leave at a boundary is what stands there, within tolerance."""
    block = subject.block
    cache = subject.at(block - 1 - np.arange(subject.rows) % 4)
    counts = 1 + np.arange(subject.rows) % 8
    _, cache = subject.advance(cache, counts, 9)
    crossed = np.asarray(cache.length) >= block
    check.true("cut", (np.asarray(cache.cut) == block) == crossed)
    store = _store(subject)
    transforms.offload(cache, store, subject.tokens)
    back = _back(subject, store, np.asarray(cache.length))
    check.true("boundary", np.asarray(back.length) == np.where(crossed, block, 0))
    check.true("made by steps", np.asarray(back.on_grid) == 0)
    for turn in range(2):
        counts = np.minimum(9, subject.time - np.asarray(back.length))
        (logits, want, where), back = subject.advance(back, counts, 9)
        check.close(f"going on, turn {turn}", logits, want, where)


def replayed_equals_cold(subject: Subject, check: Checks) -> None:
    """Without stored recent states, replaying enough tokens makes them again."""
    _, cache = prefill(subject.model, subject.cache(), subject.tokens, logits="none")
    store = _store(subject)
    report = transforms.offload(cache, store, subject.tokens, recent=0)
    check.true("nothing recent", report.recent == 0)
    back = _back(subject, store, None)
    sealed = np.asarray(back.sealed)
    begin = np.asarray(back.length)
    # A boundary that is no farther than a replay reads back is a miss.
    boundary = subject.time // subject.block * subject.block
    check.true("sealed", sealed == np.where(begin > 0, boundary, 0))
    logits, after = prefill(
        subject.model, back, *_rest(subject, back, [subject.time] * subject.rows)
    )
    column = np.minimum(begin[:, None] + np.arange(subject.time), subject.time - 1)
    want = np.take_along_axis(subject.full, column[..., None], axis=1)
    position = begin[:, None] + np.arange(subject.time)
    exact = np.where(begin > 0, sealed, 0)[:, None]
    where = (position >= exact) & (position < subject.time)
    if where.any():
        check.close("from the boundary on", logits, want, where)
    check.true("length", np.asarray(after.length) == subject.time)


def tiers(subject: Subject, check: Checks) -> None:
    """To host memory and back, nothing changes and nothing is consumed."""
    cache = subject.at(np.arange(subject.rows))
    host = transforms.to_tier(cache, "host")
    check.same("on the host", host, cache)
    back = transforms.to_tier(host, "device")
    check.same("back", back, cache)
    check.true("diff", diff(back, cache) is None)
    (logits, want, where), _ = subject.advance(back, np.full(subject.rows, 9), 9)
    check.close("going on", logits, want, where)
