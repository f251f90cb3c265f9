import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.softmax import finish
from pallas_kernels.window_attention.api import window_attention
from pallas_kernels.window_attention.reference import reference


def _run(query, key, value, at, positions, **options):
    key = jnp.asarray(key)
    value = key if value is None else jnp.asarray(value)
    return window_attention(
        jnp.asarray(query),
        key,
        value,
        jnp.asarray(at),
        jnp.asarray(positions),
        **options,
    )


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("window", [1, 4, 40])
@pytest.mark.parametrize("t", [1, 7, 65, 130])
def test_contiguous(t, window, decay, normal, agrees):
    """Short steps read all keys, long ones a band; both are the reference."""
    s = t + window - 1
    query, key = normal(2, t, 4, 8), normal(2, s, 2, 8)
    value = None if window == 4 else normal(2, s, 2, 8)
    slopes = np.array([0.0, 0.3, 0.1, 1.0], np.float32) if decay else None
    # Row 0 starts at 0, so its lead is before the sequence; row 1 does not.
    start = np.array([[0], [17]])
    at = start + np.arange(t)
    positions = start - (window - 1) + np.arange(s)
    options = dict(window=window, scale=0.4)
    got = _run(
        query,
        key,
        value,
        at,
        positions,
        contiguous=True,
        decay=None if slopes is None else jnp.asarray(slopes),
        **options,
    )
    want = reference(
        query,
        key,
        key if value is None else value,
        at,
        positions,
        decay=slopes,
        **options,
    )
    agrees(got, want, atol=5e-6)


@pytest.mark.parametrize("window", [1, 4, 40])
@pytest.mark.parametrize("t", [7, 130])
def test_visible_from(t, window, normal, agrees):
    """Packed documents: keys before the own one's start are not read."""
    s = t + window - 1
    query, key, value = normal(2, t, 4, 8), normal(2, s, 2, 8), normal(2, s, 2, 8)
    slopes = np.array([0.0, 0.3, 0.1, 1.0], np.float32)
    column = np.arange(t)
    start = np.stack([column - column % 5, np.where(column < 64, 0, 64)])
    at = np.broadcast_to(column, (2, t))
    positions = np.broadcast_to(np.arange(s) - (window - 1), (2, s))
    options = dict(window=window, scale=0.4)
    got = _run(
        query,
        key,
        value,
        at,
        positions,
        contiguous=True,
        decay=jnp.asarray(slopes),
        visible_from=jnp.asarray(start),
        **options,
    )
    want = reference(
        query, key, value, at, positions, decay=slopes, visible_from=start, **options
    )
    agrees(got, want, atol=5e-6)


def test_ring_order(normal, agrees):
    """Slots in any order, some empty: positions alone say what is read."""
    window, size = 5, 9
    query, key, value = normal(3, 2, 4, 8), normal(3, size, 1, 8), normal(3, size, 1, 8)
    length = np.array([1, 6, 40])
    at = length[:, None] + np.arange(2) - 1
    slot = np.arange(size)
    last = length[:, None] - 1
    positions = last - (last - slot) % size
    options = dict(window=window, scale=0.4)
    want = reference(query, key, value, at, positions, decay=None, **options)
    # What stands in dead or old slots must not matter.
    dead = (positions < 0) | (positions < at.min(1)[:, None] - window + 1)
    assert dead.any()
    key[dead], value[dead] = np.nan, -np.inf
    got = _run(
        query, key, value, at, positions, contiguous=False, decay=None, **options
    )
    agrees(got, want)


def test_all_rows_masked(normal):
    query, key = normal(2, 3, 4, 8), normal(2, 6, 2, 8)
    none = np.full((2, 6), -1)
    partial = _run(
        query,
        key,
        None,
        np.zeros((2, 3), int),
        none,
        window=4,
        scale=1.0,
        decay=None,
        contiguous=False,
    )
    np.testing.assert_array_equal(np.asarray(finish(partial, None)), 0)
    np.testing.assert_array_equal(np.asarray(finish(partial, jnp.zeros(4))), 0)


def test_window_of_one_reads_itself(normal):
    query, key = normal(1, 3, 2, 8), normal(1, 3, 2, 8)
    at = np.arange(3)[None]
    partial = _run(
        query, key, None, at, at, window=1, scale=1.0, decay=None, contiguous=True
    )
    np.testing.assert_allclose(np.asarray(finish(partial, None)), key, atol=1e-6)
