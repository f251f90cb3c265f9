"""Samplers: one row of logits and a key in, one token out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_attn import samplers

KEYS = jax.random.split(jax.random.key(0), 4000)


def _draw(sampler, logits) -> np.ndarray:
    logits = jnp.asarray(logits, jnp.float32)
    return np.asarray(jax.jit(jax.vmap(lambda key: sampler(logits, key)))(KEYS))


def test_greedy_takes_the_first_of_equals():
    token = samplers.greedy(jnp.array([0.0, 3.0, 3.0, -1.0]), KEYS[0])
    assert (int(token), token.dtype) == (1, jnp.int32)


@pytest.mark.parametrize("value", [0.5, 1.0, 2.0])
def test_temperature_frequencies(value):
    logits = np.array([1.0, 0.0, -1.0, 2.0])
    weights = np.exp(logits / value)
    share = np.bincount(_draw(samplers.temperature(value), logits), minlength=4) / 4000
    # Four standard errors of a share of 4000 draws.
    np.testing.assert_allclose(share, weights / weights.sum(), atol=4 * 0.5 / 4000**0.5)


def test_nucleus():
    # Shares 0.5, 0.3, 0.15, 0.05, out of order.
    logits = np.log(np.array([0.15, 0.5, 0.05, 0.3]))
    for top_p, kept in (
        (0.4, {1}),
        (0.6, {1, 3}),
        (0.85, {0, 1, 3}),
        (1.0, {0, 1, 2, 3}),
    ):
        assert set(_draw(samplers.temperature(1.0, top_p), logits).tolist()) == kept


def test_nucleus_keeps_proportions():
    logits = np.log(np.array([0.15, 0.5, 0.05, 0.3]))
    share = (
        np.bincount(_draw(samplers.temperature(1.0, 0.7), logits), minlength=4) / 4000
    )
    np.testing.assert_allclose(share[[1, 3]], [0.625, 0.375], atol=0.032)


def test_same_key_same_token():
    sampler = samplers.temperature(1.0, 0.9)
    logits = jnp.arange(6.0)
    assert int(sampler(logits, KEYS[5])) == int(sampler(logits, KEYS[5]))


@pytest.mark.parametrize(
    ("value", "top_p"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, 1.5)]
)
def test_refuses(value, top_p):
    with pytest.raises(ValueError, match=f"temperature={value}, top_p={top_p}"):
        samplers.temperature(value, top_p)
