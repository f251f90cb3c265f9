import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.softmax import finish
from pallas_kernels.sparse_attention.reference import reference
from pallas_kernels.sparse_attention.xla import masked_attention, sparse_attention


def _chosen(rng, b, t, e, c) -> np.ndarray:
    """0, 1, some and c entries a query, in any order, -1 anywhere."""
    chosen = np.full((b, t, c), -1)
    for row, column in np.ndindex(b, t):
        n = min((row + column) % (c + 1), e)
        places = rng.permutation(c)[:n]
        chosen[row, column, places] = rng.permutation(e)[:n]
    return chosen.astype(np.int32)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("b", "t", "e", "n", "k", "c"),
    [(1, 1, 1, 2, 1, 1), (2, 5, 13, 4, 2, 3), (3, 4, 6, 4, 1, 6), (2, 3, 4, 4, 4, 7)],
)
def test_reference(b, t, e, n, k, c, shared, normal, agrees):
    query, key = normal(b, t, n, 8), normal(b, e, k, 8)
    value = key if shared else normal(b, e, k, 8)
    chosen = _chosen(np.random.default_rng(1), b, t, e, c)
    want = reference(query, key, value, chosen, scale=0.4)
    keys = jnp.asarray(key)
    values = keys if shared else jnp.asarray(value)
    got = sparse_attention(
        jnp.asarray(query), keys, values, jnp.asarray(chosen), scale=0.4
    )
    agrees(got, want)
    mask = (chosen[..., None] == np.arange(e)).any(2)
    got, shares = masked_attention(
        jnp.asarray(query), keys, values, jnp.asarray(mask), scale=0.4
    )
    agrees(got, want)
    np.testing.assert_allclose(np.asarray(shares), want[2], atol=2e-6)


def test_poisoned_padding(normal, agrees):
    """NaN in entries that nobody chose, entry 0 of an empty list too, is not read."""
    query, key, value = normal(2, 3, 4, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8)
    chosen = np.array([[[-1, -1], [3, -1], [5, 3]], [[-1, -1], [-1, -1], [-1, 8]]])
    want = reference(query, key, value, chosen, scale=0.4)
    for row, used in enumerate(({3, 5}, {8})):
        dead = [e for e in range(9) if e not in used]
        key[row, dead], value[row, dead] = np.nan, np.nan
    arrays = (jnp.asarray(x) for x in (query, key, value, chosen))
    agrees(sparse_attention(*arrays, scale=0.4), want)


@pytest.mark.parametrize("mass_block", [1, 4, 16])
def test_mass(mass_block, normal, agrees, per_block):
    """An entry chosen twice counts twice; empty lists, and NaN that nobody chose."""
    query, key = normal(2, 3, 4, 8), normal(2, 11, 2, 8)
    chosen = np.array([[[-1, -1, -1], [3, -1, 3], [5, 10, 4]], [[-1, 0, 8]] * 3])
    want = reference(query, key, key, chosen, scale=1.5)
    for row in range(2):
        key[row, np.setdiff1d(np.arange(11), chosen[row])] = np.nan
    query, key, chosen = (jnp.asarray(x) for x in (query, key, chosen))
    partial, mass = sparse_attention(
        query, key, key, chosen, scale=1.5, mass_block=mass_block
    )
    agrees(partial, want)
    np.testing.assert_allclose(
        np.asarray(mass), per_block(want[2], mass_block), atol=1e-6
    )


@pytest.mark.parametrize(("e", "c"), [(0, 3), (5, 0)])
def test_nothing_to_choose(e, c, normal):
    query, key = jnp.asarray(normal(2, 3, 4, 8)), jnp.asarray(normal(2, e, 1, 8))
    none = jnp.full((2, 3, c), -1)
    partial, mass = sparse_attention(query, key, key, none, scale=1.0, mass_block=2)
    np.testing.assert_array_equal(np.asarray(finish(partial, None)), 0)
    np.testing.assert_array_equal(np.asarray(mass), np.zeros((2, 3, -(-e // 2))))


def test_all_rows_masked(normal):
    nan = jnp.full((2, 5, 1, 8), jnp.nan)
    none = jnp.full((2, 3, 4), -1)
    query = jnp.asarray(normal(2, 3, 4, 8))
    partial = sparse_attention(query, nan, nan, none, scale=1.0)
    np.testing.assert_array_equal(np.asarray(finish(partial, None)), 0)


def test_two_queries_are_apart(normal):
    """What one query chose is not read by another (Automodel's non-causal leak)."""
    query, key = normal(1, 2, 2, 8), normal(1, 6, 1, 8)
    base = jnp.asarray([[[0, 1], [2, 3]]])
    other = jnp.asarray([[[0, 1], [4, 5]]])
    one, two = (
        np.asarray(
            finish(
                sparse_attention(
                    jnp.asarray(query), jnp.asarray(key), jnp.asarray(key), c, scale=1.0
                ),
                None,
            )
        )
        for c in (base, other)
    )
    np.testing.assert_array_equal(one[:, 0], two[:, 0])
    assert np.abs(one[:, 1] - two[:, 1]).max() > 1e-3
