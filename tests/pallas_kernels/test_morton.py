import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpret import interpreted
from pallas_kernels.lowering import kernels, lower
from pallas_kernels.morton.api import decode, encode
from pallas_kernels.morton.mosaic_gpu import TILE
from pallas_kernels.morton.reference import reference_encode

SHAPES = [(2, 16), (2, 5), (3, 10), (3, 7), (4, 8), (4, 1), (2, 1)]


def _points(dimensions: int, bits: int, n: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    points = rng.integers(0, 1 << bits, (dimensions, n)).astype(np.uint32)
    if n > 2:
        points[:, 0], points[:, 1] = 0, (1 << bits) - 1
    return points


@pytest.mark.parametrize("n", [0, 1, 97])
@pytest.mark.parametrize(("dimensions", "bits"), SHAPES)
def test_reference(dimensions, bits, n):
    points = _points(dimensions, bits, n)
    codes = encode(jnp.asarray(points), bits=bits)
    np.testing.assert_array_equal(np.asarray(codes), reference_encode(points, bits))
    back = decode(codes, dimensions=dimensions, bits=bits)
    np.testing.assert_array_equal(np.asarray(back), points)


@pytest.mark.parametrize(("dimensions", "bits"), [(2, 4), (3, 3), (4, 2)])
def test_every_code(dimensions, bits):
    """decode, then encode, is the identity on all codes."""
    codes = jnp.arange(1 << dimensions * bits, dtype=jnp.uint32)
    points = decode(codes, dimensions=dimensions, bits=bits)
    np.testing.assert_array_equal(np.asarray(encode(points, bits=bits)), codes)


@pytest.mark.parametrize(("dimensions", "bits"), SHAPES)
def test_higher_bits_are_dropped(dimensions, bits):
    points = _points(dimensions, bits, 9)
    want = reference_encode(points, bits)
    above = np.uint32(((1 << 32) - 1) ^ ((1 << bits) - 1))
    got = encode(jnp.asarray(points | above), bits=bits)
    np.testing.assert_array_equal(np.asarray(got), want)
    if dimensions * bits < 32:
        codes = jnp.asarray(want | np.uint32(1 << dimensions * bits))
        back = decode(codes, dimensions=dimensions, bits=bits)
        np.testing.assert_array_equal(np.asarray(back), points)


@pytest.mark.parametrize(
    ("dimensions", "bits", "message"),
    [(1, 8, "1 dimensions"), (5, 2, "5 dim"), (2, 17, r"1\.\.16"), (3, 0, r"1\.\.10")],
)
def test_refusals(dimensions, bits, message):
    with pytest.raises(ValueError, match=message):
        encode(jnp.zeros((dimensions, 1), jnp.uint32), bits=bits)
    with pytest.raises(ValueError, match=message):
        decode(jnp.zeros(1, jnp.uint32), dimensions=dimensions, bits=bits)


@pytest.mark.parametrize("n", [3, 2 * TILE, TILE + 5])
@pytest.mark.parametrize(("dimensions", "bits"), [(2, 16), (3, 10)])
def test_kernel(dimensions, bits, n):
    points = _points(dimensions, bits, n)
    options = dict(bits=bits, implementation="mosaic_gpu")
    with interpreted():
        codes = np.asarray(encode(jnp.asarray(points), **options))
        back = decode(jnp.asarray(codes), dimensions=dimensions, **options)
        back = np.asarray(back)
    np.testing.assert_array_equal(codes, reference_encode(points, bits))
    np.testing.assert_array_equal(back, points)


@pytest.mark.parametrize("device", ["a100", "h100", "h200", "b200"])
@pytest.mark.parametrize(("dimensions", "bits"), SHAPES)
def test_lowers(dimensions, bits, device):
    options = dict(bits=bits, implementation="mosaic_gpu", device=device)
    n = 2**31 + 7
    points = jax.ShapeDtypeStruct((dimensions, n), jnp.uint32)
    assert kernels(lower(encode, points, **options)) == 1
    codes = jax.ShapeDtypeStruct((n,), jnp.uint32)
    assert kernels(lower(decode, codes, dimensions=dimensions, **options)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("dimensions", "bits"), SHAPES)
def test_on_a_device(dimensions, bits):
    points = _points(dimensions, bits, 3 * TILE + 1)
    options = dict(bits=bits, implementation="mosaic_gpu")
    codes = encode(jnp.asarray(points), **options)
    np.testing.assert_array_equal(np.asarray(codes), reference_encode(points, bits))
    back = decode(codes, dimensions=dimensions, **options)
    np.testing.assert_array_equal(np.asarray(back), points)
