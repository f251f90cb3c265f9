"""To how many bytes records are aligned: chosen from measured reads, changed exactly.

A record is what one read of a cache group takes at least: an entry, an index key, a row
of a ring. Aligned to A bytes, each takes a whole multiple of A, the rest being zeros.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

CANDIDATES = (64, 128, 256)
"""Bytes: a CPU cache line, a GPU cache line, the allocation granule of CUDA."""
# Records this far apart share no fetch at any alignment: 8 · 64 is beyond 256 bytes.
_NEAR = 8


@dataclasses.dataclass(frozen=True)
class AccessCounters:
    """How one cache group was read; immutable, and as small as its histograms.

    Attributes:
      reads: calls of `update` that read anything.
      records: records that were read.
      span: largest distance from the first to the last record of a read, inclusive.
      runs: by length, how many runs of consecutive records.
      strides: by distance in records from the end of a run to the start of the next
        one of the same read, how many; distances from 8 on stand under their largest
        power of two.
    """

    reads: int = 0
    records: int = 0
    span: int = 0
    runs: Mapping[int, int] = dataclasses.field(default_factory=dict)
    strides: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def update(self, records: ArrayLike) -> "AccessCounters":
        """Counters with one more read.

        Args:
          records: int[n], the numbers of the records in the order of reading.

        Raises:
          ValueError: not one-dimensional whole numbers from 0.
        """
        number = np.asarray(records)
        if number.size == 0:
            return self
        whole = np.issubdtype(number.dtype, np.integer)
        if number.ndim != 1 or not whole or number.min() < 0:
            raise ValueError(f"records {records!r}: expected record numbers from 0")
        number = number.astype(np.int64)
        step = np.diff(number)
        breaks = np.flatnonzero(step != 1)
        edges = np.concatenate([[0], breaks + 1, [number.size]])
        gaps = np.abs(step[breaks])
        far = gaps >= _NEAR
        gaps[far] = 1 << np.log2(gaps[far]).astype(np.int64)
        read = AccessCounters(
            reads=1,
            records=number.size,
            span=int(number.max() - number.min()) + 1,
            runs=_histogram(np.diff(edges)),
            strides=_histogram(gaps),
        )
        return self.merge(read)

    def merge(self, other: "AccessCounters") -> "AccessCounters":
        """Counters of both; the order does not matter."""
        return AccessCounters(
            reads=self.reads + other.reads,
            records=self.records + other.records,
            span=max(self.span, other.span),
            runs=_sum(self.runs, other.runs),
            strides=_sum(self.strides, other.strides),
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """An alignment and what it costs.

    Attributes:
      alignment: bytes.
      bytes_read: expected bytes that all counted reads fetch.
      padding_bytes: zeros stored within the span that was read.
    """

    alignment: int
    bytes_read: float
    padding_bytes: int


def padded(record_bytes: int, alignment: int) -> int:
    """Bytes that one record takes."""
    return -(-record_bytes // alignment) * alignment


def choose(
    counters: AccessCounters,
    record_bytes: int,
    candidates: Sequence[int] = CANDIDATES,
    *,
    fetch_bytes: int = 256,
) -> Choice:
    """The alignment at which the counted reads fetch the fewest bytes.

    The model: memory moves whole fetches of ``fetch_bytes``, themselves aligned. A run
    of L records costs the fetches that its bytes touch, from the first byte of its
    first record to the last byte of its last, without that one's padding; a run that
    starts where the last fetch of the one before it ended does not fetch it again.
    Runs start at any record with equal chance, so each cost is the mean over all
    phases of a record against a fetch. More padding costs long runs, less of it makes
    short runs straddle fetches. Ties go to fewer padding bytes, then to the smaller
    alignment; without any read padding alone decides.

    Args:
      counters: of one cache group.
      record_bytes: bytes of one record, unpadded.
      candidates: alignments in bytes.
      fetch_bytes: what the device moves at least: 64 for a CPU line, 128 for a GPU
        line, more for a copy engine.

    Raises:
      ValueError: no candidate, or sizes below 1.
    """
    if not candidates or min(record_bytes, fetch_bytes, *candidates) < 1:
        raise ValueError(
            f"record_bytes={record_bytes}, fetch_bytes={fetch_bytes}, "
            f"candidates={tuple(candidates)}: expected at least one, and sizes from 1"
        )
    choices = [
        Choice(
            alignment,
            _bytes_read(
                counters, record_bytes, padded(record_bytes, alignment), fetch_bytes
            ),
            (padded(record_bytes, alignment) - record_bytes) * counters.span,
        )
        for alignment in candidates
    ]
    return min(choices, key=lambda c: (c.bytes_read, c.padding_bytes, c.alignment))


def _bytes_read(
    counters: AccessCounters, record: int, stride: int, fetch: int
) -> float:
    """Expected bytes fetched, with records of ``record`` bytes ``stride`` apart."""
    phases = [i * stride % fetch for i in range(math.lcm(stride, fetch) // stride)]
    fetches = 0.0
    for length, count in counters.runs.items():
        size = (length - 1) * stride + record
        touched = sum((phase + size - 1) // fetch + 1 for phase in phases)
        fetches += count * touched / len(phases)
    for distance, count in counters.strides.items():
        if not 0 < distance < _NEAR:
            continue
        # The last byte of one run and the first of the next, in one fetch.
        shared = sum(
            (phase + record - 1) // fetch == (phase + distance * stride) // fetch
            for phase in phases
        )
        fetches -= count * shared / len(phases)
    return fetches * fetch


def _histogram(values: np.ndarray) -> dict[int, int]:
    keys, counts = np.unique(values, return_counts=True)
    return dict(zip(keys.tolist(), counts.tolist(), strict=True))


def _sum(a: Mapping[int, int], b: Mapping[int, int]) -> dict[int, int]:
    return dict(sorted((Counter(a) + Counter(b)).items()))


# -- converters ------------------------------------------------------------------------

Layout = str | int
"""The name of a layout; an int is the alignment in bytes of records, 1 being packed."""
Converter = Callable[[bytes, int], bytes]
"""(payload, record_bytes) -> the same records in another layout, bit for bit."""
_CONVERTERS: dict[tuple[Layout, Layout], Converter] = {}


def register_converter(old: Layout, new: Layout, converter: Converter) -> None:
    """Registers the EXACT conversion from one layout to another.

    Raises:
      ValueError: the pair has one already.
    """
    if (old, new) in _CONVERTERS:
        raise ValueError(f"layouts {old!r} -> {new!r} have a converter already")
    _CONVERTERS[old, new] = converter


def realign(payload: bytes, record_bytes: int, old: Layout, new: Layout) -> bytes:
    """The records of a payload in another layout. EXACT.

    Args:
      payload: whole records in layout ``old``.
      record_bytes: bytes of one record, unpadded.

    Raises:
      ValueError: a pair without a converter (naming both), a payload that is not whole
        records, or padding that is not zeros.
    """
    if (old, new) not in _CONVERTERS:
        known = ", ".join(f"{a!r} -> {b!r}" for a, b in _CONVERTERS)
        raise ValueError(f"no converter from layout {old!r} to {new!r}; known: {known}")
    if record_bytes < 1:
        raise ValueError(f"record_bytes={record_bytes}: expected from 1")
    return _CONVERTERS[old, new](payload, record_bytes)


def _between(old: int, new: int) -> Converter:
    def convert(payload: bytes, record_bytes: int) -> bytes:
        stride = padded(record_bytes, old)
        if len(payload) % stride:
            raise ValueError(
                f"payload of {len(payload)} bytes: expected records of {record_bytes} "
                f"bytes at every {stride}"
            )
        rows = np.frombuffer(payload, np.uint8).reshape(-1, stride)
        if rows[:, record_bytes:].any():
            # Dropping it could not be undone, so it would not be exact.
            raise ValueError(f"padding of layout {old} holds other bytes than zeros")
        out = np.zeros((rows.shape[0], padded(record_bytes, new)), np.uint8)
        out[:, :record_bytes] = rows[:, :record_bytes]
        return out.tobytes()

    return convert


for _old in (1, *CANDIDATES):
    for _new in (1, *CANDIDATES):
        register_converter(_old, _new, _between(_old, _new))
