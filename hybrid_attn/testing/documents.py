"""Invariant: documents packed into one row are documents alone."""

import functools
import itertools

import numpy as np

from hybrid_attn.testing.report import Checks
from hybrid_attn.testing.subject import SEEDS, Subject, smallest_gap

# Lengths of a row's documents, repeated until it is full: below a group, whole groups,
# edges inside groups and windows, one document.
PATTERNS = (
    *((1,), (2,), (3,), (4,), (8,), (9,), (16,), (31,), (32,)),
    *((1, 30), (7, 9), (5, 11), (13, 6), (17, 15), (10, 3, 1), (1, 2, 3, 4, 5, 6, 7)),
)


class Packing:
    """Which documents stand in which row, and the same documents in rows of their own.

    Attributes:
      documents: (row, first column, length) of each.
      segment_ids: int32[rows, time]; neither sorted nor unique to one document.
    """

    def __init__(self, rows: int, time: int, patterns=PATTERNS):
        self.documents: list[tuple[int, int, int]] = []
        self.segment_ids = np.zeros((rows, time), np.int32)
        for row in range(rows):
            lengths, begin = itertools.cycle(patterns[row % len(patterns)]), 0
            for number, length in enumerate(lengths):
                length = min(length, time - begin)
                self.documents.append((row, begin, length))
                self.segment_ids[row, begin : begin + length] = number * 5 % 7
                begin += length
                if begin == time:
                    break

    def apart(self, tokens: np.ndarray):
        """Yields (tokens, lengths, place): documents at the start of rows of their own.

        Tokens int32[rows, time] end in junk; ``place(values, out)`` copies what
        [rows, time, ...] holds of the documents to where they stand when packed.
        """
        rows = len(tokens)
        for batch in itertools.batched(self.documents, rows):
            single = np.roll(tokens, 3, axis=1)
            lengths = np.zeros(rows, np.int32)
            for i, (row, begin, length) in enumerate(batch):
                single[i, :length] = tokens[row, begin : begin + length]
                lengths[i] = length
            yield single, lengths, functools.partial(_place, batch)

    def middle(self) -> tuple[np.ndarray, np.ndarray]:
        """(first column int[rows], bool[rows, time]) of a document within each row."""
        rows, time = self.segment_ids.shape
        first, own = np.zeros(rows, int), np.zeros((rows, time), bool)
        for row in range(rows):
            mine = [d for d in self.documents if d[0] == row]
            _, begin, length = mine[len(mine) // 2]
            first[row] = begin
            own[row, begin : begin + length] = True
        return first, own


def _place(batch, values, out) -> None:
    for i, (row, begin, length) in enumerate(batch):
        out[row, begin : begin + length] = values[i, :length]


def packed_equals_separate(subject: Subject, check: Checks) -> None:
    """Documents of 1.. tokens in one row: each is what it is alone, and stays so."""
    packing = Packing(subject.rows, subject.time)
    want, gap = np.full(subject.full.shape, np.nan, np.float32), 0.0
    for seed in range(SEEDS):
        tokens, gap = subject.draw(seed, subject.rows), np.inf
        for single, lengths, place in packing.apart(tokens):
            logits, _, aux = subject.whole(subject.cache(), single, lengths)
            place(np.asarray(logits), want)
            real = np.arange(subject.time) < lengths[:, None]
            gap = min(gap, smallest_gap(aux, real))
        if gap > subject.table.score_gap:
            break
    check.true("gap", gap > subject.table.score_gap, f"{gap:.3g}")
    got = subject.forward(tokens, packing.segment_ids)
    case = "packed against alone (read nothing before Span.document_start)"
    check.close(case, got, want)
    # What another document holds changes no bit.
    first, own = packing.middle()
    rows = np.arange(subject.rows)
    tokens[rows, first] = (tokens[rows, first] + 5) % subject.config.vocab_size
    changed = subject.forward(tokens, packing.segment_ids)
    check.same("another document changes", changed[~own], got[~own])
    moved = np.abs(changed - got).max(-1)
    check.true("own logit moves", moved[rows, first] > 1e-3)
