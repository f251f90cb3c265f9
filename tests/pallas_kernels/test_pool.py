import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pool.reference import reference
from pallas_kernels.pool.xla import pool


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 3, 4, 5), (2, 0, 4, 5), (1, 2, 8, 3)]
)
def test_reference(shape, normal):
    content, score = normal(*shape), 3 * normal(*shape)
    got = pool(jnp.asarray(content), jnp.asarray(score))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got), reference(content, score), atol=2e-6)


def test_absent_slots_weigh_nothing(normal):
    """A slot scored far below counts for nothing: the group before the first."""
    content, score = normal(1, 2, 4, 3), normal(1, 2, 4, 3)
    score[:, :, :2] = -1e30
    got = pool(jnp.asarray(content), jnp.asarray(score))
    want = reference(content[:, :, 2:], score[:, :, 2:])
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-6)
    content[:, :, :2] = 1e4
    again = pool(jnp.asarray(content), jnp.asarray(score))
    np.testing.assert_array_equal(np.asarray(again), np.asarray(got))


def test_large_scores_do_not_overflow(normal):
    content, score = normal(1, 1, 4, 3), 300 * normal(1, 1, 4, 3)
    got = pool(jnp.asarray(content), jnp.asarray(score))
    np.testing.assert_allclose(np.asarray(got), reference(content, score), atol=2e-6)


def test_poisoned_group_stays_alone(normal):
    """An open group may hold anything: no other group, row or channel hears of it."""
    content, score = normal(2, 3, 4, 5), normal(2, 3, 4, 5)
    want = reference(content, score)
    content[1, 2], score[1, 2] = np.nan, np.nan
    got = np.asarray(pool(jnp.asarray(content), jnp.asarray(score)))
    clean = np.ones((2, 3), bool)
    clean[1, 2] = False
    np.testing.assert_allclose(got[clean], want[clean], atol=2e-6)


def test_stored_dtype_is_pooled_in_float32(normal):
    content, score = (jnp.asarray(normal(1, 2, 8, 3), jnp.bfloat16) for _ in range(2))
    got = pool(content, score)
    want = reference(np.asarray(content, np.float32), np.asarray(score, np.float32))
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-6)


def test_gradient_is_finite(normal):
    content, score = jnp.asarray(normal(1, 1, 4, 2)), jnp.full((1, 1, 4, 2), -1e30)
    slopes = jax.grad(lambda c, s: jnp.sum(pool(c, s) ** 2), argnums=(0, 1))(
        content, score
    )
    assert all(np.isfinite(np.asarray(x)).all() for x in slopes)
