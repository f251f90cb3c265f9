"""What the tests of the attention kernels share: arrays, abstract ones, comparisons."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.softmax import Partial, finish

# Weights are rounded to bfloat16 before they meet the values: 2^-9 of a value.
ATOL = 8e-3


def rounded(x):
    """float32 numbers that are bfloat16 ones."""
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


def given(query, key, value):
    """The arrays as the kernels take them; a value that is the key stays it."""
    query, given = (jnp.asarray(x, jnp.bfloat16) for x in (query, key))
    return query, given, given if value is key else jnp.asarray(value, jnp.bfloat16)


def abstract(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape):
    return abstract(*shape, dtype=jnp.int32)


def sees_nothing(partial: Partial, shape: tuple[int, ...]) -> None:
    """Sums over no keys: zeros of the shape, and nothing that is not finite."""
    out = np.asarray(finish(partial, None))
    assert out.shape == shape
    np.testing.assert_array_equal(out, 0)


def same_gradients(got, want) -> None:
    """Of sums whose weights one side rounds to bfloat16."""
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=3e-2)
