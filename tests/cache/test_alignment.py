"""Counters of access, the cost model against counting, and exact re-aligning."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_attn.cache.alignment import (
    AccessCounters,
    choose,
    padded,
    realign,
    register_converter,
)


def test_counters():
    counters = AccessCounters().update([5, 6, 7, 9, 30, 31])
    assert (counters.reads, counters.records, counters.span) == (1, 6, 27)
    assert counters.runs == {1: 1, 2: 1, 3: 1}
    assert counters.strides == {2: 1, 16: 1}  # 21 stands under 16
    assert counters.update([]) == counters
    assert counters.update([7]).runs == {1: 2, 2: 1, 3: 1}
    # Reading backwards, or one record twice, makes no run.
    assert AccessCounters().update([3, 2, 2]).runs == {1: 3}
    for wrong in ([-1], [0.5], [[1]]):
        with pytest.raises(ValueError, match="expected record numbers from 0"):
            counters.update(wrong)


@given(st.lists(st.lists(st.integers(0, 99), max_size=12), max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_merge_is_the_counters_of_all(reads, data):
    cut = data.draw(st.integers(0, len(reads)))
    parts = [AccessCounters(), AccessCounters(), AccessCounters()]
    for index, read in enumerate(reads):
        parts[0] = parts[0].update(read)
        parts[1 + (index >= cut)] = parts[1 + (index >= cut)].update(read)
    assert parts[1].merge(parts[2]) == parts[2].merge(parts[1]) == parts[0]


@pytest.mark.parametrize("record", [48, 64, 100, 192, 320, 520])
@pytest.mark.parametrize("fetch", [64, 128, 256])
@pytest.mark.parametrize("read", [[0], [0, 1, 2, 3, 4], [0, 2, 4], [0, 1, 4, 5, 20]])
def test_model_counts_fetches(record, fetch, read):
    """Against the set of fetches that a read touches, over every start."""
    counters = AccessCounters().update(read)
    for alignment in (64, 128, 256):
        stride = padded(record, alignment)
        total = 0
        starts = range(fetch)
        for start in starts:
            touched, last = 0, None
            run: list[int] = []
            for number in [*read, None]:
                if run and (number is None or number != run[-1] + 1):
                    low = (start + run[0]) * stride // fetch
                    high = ((start + run[-1]) * stride + record - 1) // fetch
                    touched += high - low + 1 - (low == last)
                    last, run = high, []
                if number is not None:
                    run.append(number)
            total += touched
        found = choose(counters, record, (alignment,), fetch_bytes=fetch)
        assert found.bytes_read == pytest.approx(fetch * total / len(starts))
        assert found.padding_bytes == (stride - record) * counters.span


def test_access_decides():
    """192-byte records: alone they straddle fetches, in long runs padding costs."""
    rng = np.random.default_rng(0)
    single, runs = AccessCounters(), AccessCounters()
    for _ in range(20):
        single = single.update(np.sort(rng.choice(4096, 32, replace=False)))
        first = int(rng.integers(0, 4000))
        runs = runs.update(np.arange(first, first + 64))
    assert choose(single, 192).alignment == 128
    assert choose(single, 384, fetch_bytes=512).alignment == 256
    assert choose(runs, 192).alignment == 64
    # Where lines are what is fetched, straddling costs nothing.
    assert choose(single, 192, fetch_bytes=64).alignment == 64
    # The same bytes: the least padding, then the smallest.
    assert choose(AccessCounters(), 192).alignment == 64
    assert choose(single, 256).alignment == 64
    assert choose(single, 192) == choose(single, 192, (256, 128, 64))
    with pytest.raises(ValueError, match=r"candidates=\(\)"):
        choose(single, 192, ())
    with pytest.raises(ValueError, match="record_bytes=0"):
        choose(single, 0)


@given(
    st.integers(1, 300),
    st.integers(0, 5),
    st.sampled_from([1, 64, 128, 256]),
    st.sampled_from([1, 64, 128, 256]),
)
@settings(max_examples=80, deadline=None)
def test_realign_is_exact(record, count, old, new):
    rng = np.random.default_rng(record)
    packed = rng.integers(0, 256, record * count, np.uint8).tobytes()
    there = realign(packed, record, 1, old)
    moved = realign(there, record, old, new)
    assert len(moved) == count * padded(record, new)
    assert realign(moved, record, new, 1) == packed
    for number in range(count):
        at = number * padded(record, new)
        assert moved[at : at + record] == packed[number * record :][:record]
        assert not any(moved[at + record : at + padded(record, new)])


def test_realign_refuses():
    with pytest.raises(ValueError, match="from layout 64 to 'planar'; known: 1 -> 1"):
        realign(bytes(64), 64, 64, "planar")
    with pytest.raises(ValueError, match="from layout 512 to 64"):
        realign(bytes(512), 64, 512, 64)
    with pytest.raises(ValueError, match="payload of 65 bytes"):
        realign(bytes(65), 10, 64, 128)
    with pytest.raises(ValueError, match="other bytes than zeros"):
        realign(bytes(63) + b"x", 10, 64, 128)
    with pytest.raises(ValueError, match="record_bytes=0"):
        realign(b"", 0, 64, 128)
    with pytest.raises(ValueError, match="64 -> 128 have a converter already"):
        register_converter(64, 128, lambda payload, record_bytes: payload)
