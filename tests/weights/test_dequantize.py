"""Block-scaled FP8 and FP4 against plain loops over their definitions."""

import ml_dtypes
import numpy as np
import pytest

from hybrid_attn.weights.dequantize import dequantize, unpack_fp4

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def powers(rng, shape):
    return (2.0 ** rng.integers(-9, 4, shape)).astype(E8M0)


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (3, 256, 128), (200, 300)])
def test_fp8(shape):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape).astype(E4M3)
    rows, columns = (-(-n // 128) for n in shape[-2:])
    scales = powers(rng, (*shape[:-2], rows, columns))
    got = dequantize(values, scales)
    assert got.dtype == ml_dtypes.bfloat16
    for index in np.ndindex(shape):
        block = (*index[:-2], index[-2] // 128, index[-1] // 128)
        assert float(got[index]) == float(values[index]) * float(scales[block])


def test_fp4():
    """Every byte: e2m1 as ml_dtypes knows it, the lower nibble first."""
    packed = np.arange(256, dtype=np.uint8).view(np.int8).reshape(4, 64)
    rng = np.random.default_rng(0)
    scales = powers(rng, (4, 4))
    got = dequantize(packed, scales).astype(np.float32)
    assert got.shape == (4, 128)
    for row, column in np.ndindex(got.shape):
        byte = int(packed.view(np.uint8)[row, column // 2])
        nibble = byte >> 4 if column % 2 else byte & 15
        value = np.array(nibble, np.uint8).astype(ml_dtypes.uint4)
        number = float(value.view(ml_dtypes.float4_e2m1fn))
        assert got[row, column] == number * float(scales[row, column // 32])


def test_unpack_all_values():
    got = unpack_fp4(np.arange(16, dtype=np.uint8))[0::2]
    want = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    assert (got == np.concatenate([want, -want])).all()
    assert np.signbit(got[8])


def test_scales_as_bytes_and_float32():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((128, 256)).astype(E4M3)
    scales = powers(rng, (1, 2))
    want = dequantize(values, scales)
    assert (dequantize(values, scales.view(np.uint8)) == want).all()
    plain = dequantize(values, scales.astype(np.float32))
    assert plain.dtype == np.float32
    assert (plain == want.astype(np.float32)).all()


def test_exact():
    """No product is rounded: bfloat16 holds it."""
    values = np.arange(256, dtype=np.uint8).view(E4M3)
    values = values[np.isfinite(values.astype(np.float32))].reshape(1, -1)
    for scale in (2.0**-20, 1.0, 2.0**15):
        got = dequantize(values, np.full((1, 1), scale, E8M0))
        assert (got.astype(np.float64) == values.astype(np.float64) * scale).all()


def test_errors():
    values = np.zeros((128, 128), E4M3)
    with pytest.raises(ValueError, match="float16"):
        dequantize(values.astype(np.float16), np.zeros((1, 1), E8M0))
    with pytest.raises(ValueError, match="do not divide"):
        dequantize(values, np.zeros((3, 1), E8M0))
    with pytest.raises(ValueError, match="do not belong"):
        dequantize(values, np.zeros((1,), E8M0))
