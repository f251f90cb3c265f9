import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.codec_transform import api
from pallas_kernels.codec_transform.bases import BASES, basis
from pallas_kernels.codec_transform.reference import (
    reference_basis,
    reference_transform,
)
from pallas_kernels.kv_quant.formats import FORMATS, record_layout


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("size", [1, 2, 64, 512])
def test_orthonormal(name, size):
    matrix = basis(name, size).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=3e-7)
    if size <= 64:
        np.testing.assert_allclose(matrix, reference_basis(name, size), atol=1e-7)


def test_hadamard_entries_are_exact_for_even_powers():
    matrix = basis("hadamard", 64) * 8
    np.testing.assert_array_equal(matrix @ matrix.T, 64 * np.eye(64))


@pytest.mark.parametrize(
    ("shape", "tokens", "channels"),
    [
        ((2, 4, 8), "cosine", None),
        ((2, 4, 8), None, "hadamard"),
        ((1, 6, 5), "cosine", "cosine"),
        ((3, 1, 16), "hadamard", "hadamard"),
        ((0, 4, 8), "cosine", "cosine"),
        ((2, 3, 4), None, None),
    ],
)
def test_reference_and_inverse(shape, tokens, channels, normal):
    x = normal(*shape)
    options = dict(tokens=tokens, channels=channels)
    got = api.transform(jnp.asarray(x), **options)
    want = reference_transform(x, tokens, channels)
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-6)
    back = api.inverse(got, **options)
    np.testing.assert_allclose(np.asarray(back), x, atol=2e-6)


def test_learned_basis(normal):
    x = normal(2, 4, 6)
    matrix = np.linalg.qr(normal(6, 6))[0].astype(np.float32)
    got = api.transform(jnp.asarray(x), channels=jnp.asarray(matrix))
    np.testing.assert_allclose(np.asarray(got), x @ matrix.T, atol=2e-6)
    back = api.inverse(got, channels=jnp.asarray(matrix))
    np.testing.assert_allclose(np.asarray(back), x, atol=2e-6)


def test_indexer_hadamard_keeps_products(normal):
    query, key = normal(3, 128), normal(2, 5, 128)
    turned_query = np.asarray(api.hadamard(jnp.asarray(query)))
    turned_key = np.asarray(api.hadamard(jnp.asarray(key)))
    np.testing.assert_allclose(turned_key @ turned_query.T, key @ query.T, atol=3e-5)
    back = np.asarray(api.hadamard(jnp.asarray(turned_key)))
    np.testing.assert_allclose(back, key, atol=2e-6)


def test_refusals(normal):
    with pytest.raises(ValueError, match="'haar': expected one of hadamard, cosine"):
        api.transform(jnp.asarray(normal(1, 2, 2)), tokens="haar")
    with pytest.raises(ValueError, match="size 6: expected a power of two"):
        api.hadamard(jnp.asarray(normal(1, 6)))


@pytest.mark.parametrize("format", FORMATS)
def test_packed(format, normal):
    """One function; what is stored errs as its records do, and no more."""
    x = jnp.asarray(normal(2, 4, 64))
    options = dict(tokens="cosine", channels="hadamard")
    records = api.transform_pack(x, format=format, alignment=16, **options)
    layout = record_layout(format, 64, leading=("n", "s"), alignment=16)
    layout.check(records, "records")
    back = np.asarray(api.unpack_inverse(records, layout, **options))
    error = np.linalg.norm(back - x) / np.linalg.norm(x)
    assert error < {"fp8": 0.04, "fp4": 0.16, "int8": 0.01, "int4": 0.12}[format]


def test_correlated_tokens_cost_fewer_bits(normal):
    """Where tokens resemble each other, 8 bits for one coefficient in 16 are enough.

    With 4 bits for all, the error is the same with and without the transform: one
    large coefficient errs as much as 16 rows do.
    """
    x = jnp.asarray(normal(4, 1, 64) + 0.1 * normal(4, 16, 64))

    def stored(rows, format):
        layout = record_layout(format, 64, leading=("n", "s"))
        return api.unpack_inverse(api.transform_pack(rows, format=format), layout)

    coefficients = api.transform(x, tokens="cosine")
    mixed = jnp.concatenate(
        [stored(coefficients[:, :1], "int8"), stored(coefficients[:, 1:], "int4")],
        axis=1,
    )
    plain, even, uneven = (
        float(jnp.linalg.norm(back - x))
        for back in (
            stored(x, "int4"),
            api.inverse(stored(coefficients, "int4"), tokens="cosine"),
            api.inverse(mixed, tokens="cosine"),
        )
    )
    assert even > 0.9 * plain
    assert uneven < plain / 4
