"""Merging partial sums and adding the sink is one softmax over the union."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.softmax import LOG2_E, Partial, finish, merge, partial_softmax


def _partial(logits, values, mask) -> Partial:
    """From natural logits [b, t, n, s] and values [b, s, n, h], one head a group."""
    logits = jnp.moveaxis(jnp.asarray(logits) * LOG2_E, 2, 1)[:, :, :, None]
    mask = jnp.moveaxis(jnp.asarray(mask), 2, 1)[:, :, :, None]
    weights, total, maximum = partial_softmax(logits, mask)
    weighted = jnp.einsum("bktgs,bskh->bktgh", weights, jnp.asarray(values))
    return Partial(weighted, total, maximum)


def test_union_and_sink(normal):
    logits, values = 4 * normal(2, 3, 2, 9), normal(2, 9, 2, 5)
    mask = normal(2, 3, 2, 9) > 0
    mask[0, 0] = False  # a query that sees nothing
    mask[0, 1, :, :4] = False  # and one that sees nothing of the first part
    sink = np.array([0.7, -2.0], np.float32)
    left = _partial(logits[..., :4], values[:, :4], mask[..., :4])
    right = _partial(logits[..., 4:], values[:, 4:], mask[..., 4:])
    weights = np.where(mask, np.exp(logits.astype(np.float64)), 0)
    for given, extra in ((None, 0.0), (sink, np.exp(sink, dtype=np.float64)[:, None])):
        total = weights.sum(-1, keepdims=True) + extra
        share = weights / np.where(total > 0, total, 1)
        want = np.einsum("btns,bsnh->btnh", share, values)
        for first, second in ((left, right), (right, left)):
            got = finish(
                merge(first, second), None if given is None else jnp.array(given)
            )
            np.testing.assert_allclose(np.asarray(got), want, atol=2e-6)


def test_gradients_of_nothing_seen():
    """Masks never meet as -inf - inf: values and gradients stay finite."""

    def loss(logits, sink):
        none = jnp.zeros(logits.shape, bool)
        partial = _partial(logits, jnp.ones((1, 4, 1, 2)), none)
        return jnp.sum(finish(merge(partial, partial), sink) ** 2)

    slopes = jax.grad(loss, argnums=(0, 1))(jnp.ones((1, 2, 1, 4)), jnp.zeros(1))
    assert all(np.isfinite(np.asarray(x)).all() for x in slopes)


def test_far_logits():
    """A part 200 nats below counts for nothing and overflows nothing."""
    values = jnp.ones((1, 1, 1, 1))
    seen = np.ones((1, 1, 1, 1), bool)
    low = _partial(np.full((1, 1, 1, 1), -100.0, np.float32), 5 * values, seen)
    high = _partial(np.full((1, 1, 1, 1), 100.0, np.float32), values, seen)
    assert float(finish(merge(low, high), None)[0, 0, 0, 0]) == 1.0
    assert float(finish(merge(low, high), jnp.array([300.0]))[0, 0, 0, 0]) == 0.0
