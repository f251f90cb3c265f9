"""A row times one matrix of a stack, read where it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hybrid_attn.layers.linear import GroupedLinear, Linear, row_product


@pytest.mark.parametrize("k", [1, 7, 12, 64])
def test_row_product_is_the_product(k):
    rng = np.random.default_rng(k)
    row, weights = rng.normal(size=(k,)), rng.normal(size=(5, k, 6))
    product = jax.jit(row_product)
    for index in (0, 3, 4):
        y = product(jnp.float32(row), jnp.float32(weights), jnp.int32(index))
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, row @ weights[index], atol=2e-5)


def test_row_product_of_another_dtype():
    rng = np.random.default_rng(0)
    row = jnp.asarray(rng.normal(size=(16,)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(2, 16, 4)), jnp.bfloat16)
    y = row_product(row, weights, 1)
    assert y.dtype == jnp.bfloat16
    expected = np.asarray(row, np.float64) @ np.asarray(weights[1], np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=0.1)


def test_one_row_of_a_grouped_product_equals_many():
    layer = GroupedLinear(3, 24, 5, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 24)), jnp.float32)
    many = layer(x)
    for row in range(4):
        np.testing.assert_allclose(layer(x[row : row + 1])[0], many[row], atol=1e-5)


@pytest.mark.parametrize("inputs", [100, 128])
def test_one_row_of_a_large_product_equals_many(inputs):
    layer = Linear(inputs, 256, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, inputs)), jnp.float32)
    many = layer(x)
    for row in range(3):
        np.testing.assert_allclose(layer(x[row : row + 1])[0], many[row], atol=1e-5)
