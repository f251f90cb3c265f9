"""Ragged reads and writes against a dict of position -> row."""

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_attn.cache.rings import (
    any_closes,
    entry_write,
    ring_positions,
    ring_write,
    span_rows,
)
from hybrid_attn.cache.span import Span

BATCH = 6


def _span(start, length, end, width, sealed=None) -> Span:
    arrays = [jnp.asarray(x, jnp.int32) for x in (start, length, end)]
    sealed = jnp.zeros(len(start), jnp.int32) if sealed is None else jnp.asarray(sealed)
    return Span(*arrays, sealed, width)


def _row(row: int, position: int) -> np.ndarray:
    """What stands at a position: a number no other place has."""
    return np.array([1000 * row + position, -position], np.float32)


class Model:
    """The dict model: each row's newest value by position, and a ring beside it."""

    def __init__(self, size: int):
        self.size = size
        self.length = np.zeros(BATCH, int)
        self.ring = jnp.full((BATCH, size, 2), jnp.nan)
        self.held = [{} for _ in range(BATCH)]
        self.version = 0

    def append(self, counts, width: int, before: int):
        start = np.maximum(self.length - before, 0)
        counts = np.minimum(counts, width - (self.length - start))
        end = self.length + counts
        self.version += 1
        columns = np.stack(
            [
                [
                    _row(r, start[r] + i) + 0.25 * (self.version % 3)
                    for i in range(width)
                ]
                for r in range(BATCH)
            ]
        )
        span = _span(start, self.length, end, width)
        for r in range(BATCH):
            for p in range(self.length[r], end[r]):
                self.held[r][p] = columns[r, p - start[r]]
        return span, jnp.asarray(columns), end

    def rewind(self, back):
        self.length = np.maximum(self.length - back, 0)
        for r in range(BATCH):
            self.held[r] = {p: v for p, v in self.held[r].items() if p < self.length[r]}


@pytest.mark.parametrize("size", [5, 12])
@pytest.mark.parametrize(
    ("width", "before"), [(1, 0), (3, 0), (6, 0), (16, 0), (3, 2), (6, 2), (16, 2)]
)
def test_ring_against_dict(size, width, before):
    rng = np.random.default_rng(size * 100 + width * 10 + before)
    model, undo = Model(size), 2
    for _ in range(12):
        if rng.random() < 0.3:
            model.rewind(rng.integers(0, undo + 1, BATCH) * (model.length > undo))
        counts = rng.integers(0, width + 1, BATCH)
        span, columns, end = model.append(counts, width, before)
        # Reading: the ring's past, then the new columns.
        reach = size - undo
        first = np.asarray(span.start) - reach
        got = span_rows(model.ring, columns, span, jnp.asarray(first), reach + width)
        got = np.asarray(got)
        for r in range(BATCH):
            for i in range(reach + width):
                p = first[r] + i
                if p < 0:
                    assert (got[r, i] == 0).all()
                elif model.length[r] - reach <= p < end[r]:
                    np.testing.assert_array_equal(got[r, i], model.held[r][p])
        # Out of the given reach nothing is read.
        short = span_rows(model.ring, columns, span, jnp.asarray(first), reach, 1)
        for r in range(BATCH):
            dead = first[r] + np.arange(reach) < model.length[r] - 1
            assert (np.asarray(short)[r][dead] == 0).all()
        # Writing: each slot holds the newest position that falls on it.
        model.ring = ring_write(model.ring, columns, span)
        model.length = end
        positions = np.asarray(ring_positions(size, jnp.asarray(end, jnp.int32)))
        assert (positions % size == np.arange(size)).all()
        assert (positions < end[:, None]).all()
        assert (positions >= end[:, None] - size).all()
        for r in range(BATCH):
            for slot in range(size):
                p = positions[r, slot]
                if p >= max(0, end[r] - reach):
                    np.testing.assert_array_equal(
                        np.asarray(model.ring)[r, slot], model.held[r][p]
                    )


def test_nothing_new_changes_no_bit():
    ring = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 3)), jnp.float32)
    for width in (1, 3, 9):
        span = _span([4, 11], [4, 11], [4, 11], width)
        written = ring_write(ring, jnp.full((2, width, 3), jnp.nan), span)
        np.testing.assert_array_equal(np.asarray(written), np.asarray(ring))


def test_stored_dtype_is_kept():
    span = _span([0], [0], [2], 2)
    ring = ring_write(
        jnp.zeros((1, 8, 1), jnp.bfloat16), jnp.full((1, 2, 1), 1.001), span
    )
    assert ring.dtype == jnp.bfloat16
    assert float(ring[0, 0, 0]) == 1.0


def test_training_rows():
    rows = jnp.arange(1.0, 6.0).reshape(1, 5, 1)
    span = Span.training(1, 5)
    got = span_rows(None, rows, span, -3, 8)
    assert got[0, :, 0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert span_rows(None, rows, span, -1, 5)[0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert span_rows(None, rows, span, 0, 7)[0, :, 0].tolist() == [1, 2, 3, 4, 5, 0, 0]


@pytest.mark.parametrize("ratio", [1, 4])
def test_entries_against_dict(ratio):
    """Closed groups are written, once and at their place; the end does not clamp."""
    capacity, width = 8, 9
    rng = np.random.default_rng(ratio)
    sealed = np.array([0, 8, 0, 4, 12, 0])
    for _ in range(20):
        length = rng.integers(0, capacity * ratio, BATCH)
        end = np.minimum(length + rng.integers(0, width + 1, BATCH), capacity * ratio)
        groups = (width + ratio - 1) // ratio
        first = length // ratio
        new = first[:, None] + np.arange(groups) + 0.5
        old = np.arange(BATCH * capacity, dtype=np.float32).reshape(BATCH, capacity)
        got = entry_write(
            jnp.asarray(old)[..., None],
            jnp.asarray(new, jnp.float32)[..., None],
            jnp.asarray(first, jnp.int32),
            _span(length, length, end, width, sealed),
            ratio,
        )
        want = old.copy()
        for r in range(BATCH):
            for e in range(length[r] // ratio, end[r] // ratio):
                if e * ratio >= sealed[r]:
                    want[r, e] = e + 0.5
        np.testing.assert_array_equal(np.asarray(got)[..., 0], want)


def test_entries_beyond_the_end_are_dropped():
    old = jnp.arange(4.0).reshape(1, 4, 1)
    span = _span([14], [14], [24], 10)
    got = entry_write(old, jnp.full((1, 3, 1), 9.0), jnp.array([3]), span, 4)
    assert got[0, :, 0].tolist() == [0, 1, 2, 9]


def test_visible_and_closed():
    """V4: query i reads entry j iff i >= m·j + m - 1."""
    span = _span([4, 4, 8], [6, 4, 8], [9, 12, 8], 8)
    for ratio in (1, 4):
        visible = np.asarray(span.visible(ratio))
        for r in range(3):
            for i in range(8):
                p = int(span.start[r]) + i
                new = int(span.length[r]) <= p < int(span.end[r])
                want = sum(p >= ratio * j + ratio - 1 for j in range(20)) if new else 0
                assert visible[r, i] == want
    assert span.closed(4).tolist() == [2, 3, 2]
    assert bool(any_closes(span, 4))
    assert not bool(any_closes(_span([4], [4], [7], 4), 4))
    assert bool(any_closes(_span([4], [4], [8], 4), 4))
