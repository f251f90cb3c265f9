"""Spans of packed rows against a walk over their tokens."""

import itertools

import numpy as np
import pytest

from hybrid_attn.cache.packing import document_starts
from hybrid_attn.cache.span import Span


def _rows(time: int):
    """Documents by length: fixed edges, then random ones."""
    rng = np.random.default_rng(0)
    rows = [[time], [1] * time, [1, time - 1], [time - 1, 1], [4] * 5 + [3]]
    for _ in range(20):
        cuts = np.sort(rng.integers(0, time + 1, rng.integers(1, 9)))
        rows.append([int(n) for n in np.diff([0, *cuts, time]) if n])
    return rows


@pytest.mark.parametrize("ratio", [1, 2, 4, 7, 40])
def test_packed_span(ratio):
    time = 23
    rows = _rows(time)
    ids = [np.repeat(np.arange(len(row)) % 2, row) for row in rows]
    starts = document_starts(np.stack(ids), (len(rows), time))
    span = Span.training(len(rows), time, starts)
    last, real = (np.asarray(x) for x in span.closings(ratio))
    assert last.shape == real.shape == (len(rows), time // ratio)
    assert ((last >= 0) & (last < time)).all()
    visible, first = span.visible(ratio), span.visible_from(ratio)
    assert first is not None
    for r, row in enumerate(rows):
        entries, column = [], 0
        for length in row:
            before = len(entries)
            for p in range(length):
                if (p + 1) % ratio == 0:
                    entries.append(column)
                assert span.positions[r, column] == p
                assert (int(first[r, column]), int(visible[r, column])) == (
                    before,
                    len(entries),
                )
                for distance in (0, 1, 5):
                    assert span.reaches(distance)[r, column] == (p >= distance)
                column += 1
        assert last[r][real[r]].tolist() == entries
        # Padding comes last.
        assert real[r].tolist() == sorted(real[r].tolist(), reverse=True)


def test_starts():
    ids = [[5, 5, 0, 0, 5], [0, 0, 0, 0, 0]]
    got = document_starts(np.asarray(ids), (2, 5))
    assert got.tolist() == [[0, 0, 2, 2, 4], [0] * 5]
    assert got.dtype == np.int32
    # Ids are names: order, repeats, sign and width do not count. In int32, 2^32 is 0.
    runs = np.repeat(np.arange(4), [2, 1, 4, 2])[None]
    for names in ([3, 0, 2, 1], [0, 1, 0, 1], [-5, 2, 0, 9], [0, 1 << 32, 0, 7]):
        got = document_starts(np.asarray(names, np.int64)[runs], (1, 9))
        assert got.tolist() == [[0, 0, 2, 3, 3, 3, 3, 7, 7]]
    assert document_starts(runs.astype(np.uint8), (1, 9)).tolist() == got.tolist()


def test_plain_span_is_one_document():
    plain = Span.training(2, 9)
    packed = Span.training(2, 9, document_starts(np.zeros((2, 9), int), (2, 9)))
    for ratio in (1, 4):
        assert plain.visible_from(ratio) is None
        assert not np.asarray(packed.visible_from(ratio)).any()
        np.testing.assert_array_equal(plain.visible(ratio), packed.visible(ratio))
        for one, other in zip(
            plain.closings(ratio), packed.closings(ratio), strict=True
        ):
            np.testing.assert_array_equal(one, other)
    for distance, p in itertools.product((0, 1, 5), range(9)):
        assert plain.reaches(distance)[0, p] == (p >= distance)
