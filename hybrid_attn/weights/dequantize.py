"""Block-scaled tensors of official releases as plain numbers.

FP8 is e4m3 with one scale for each block of a matrix (128 × 128 as released), FP4 is
e2m1, two to a byte with the lower nibble first, with one scale for each 32 inputs.
Scales are powers of two (ue8m0) or float32; the size of a block follows from the two
shapes. A power of two times e4m3 or e2m1 fits into bfloat16 exactly.
"""

import ml_dtypes
import numpy as np

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_E2M1, -_E2M1])


def unpack_fp4(packed: np.ndarray) -> np.ndarray:
    """Bytes [..., n] -> float32[..., 2n]; the lower nibble stands first."""
    bits = packed.view(np.uint8)
    pairs = np.stack([bits & 0xF, bits >> 4], axis=-1)
    return _FP4[pairs].reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def scale_values(scales: np.ndarray) -> np.ndarray:
    """float32 scales; bytes are ue8m0 exponents, 2^(byte - 127)."""
    if scales.dtype in (np.uint8, np.int8):
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    return scales.astype(np.float32)


def dequantize(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """values · scale of their block, bfloat16 where that is exact, else float32.

    Args:
      values: e4m3 [..., rows, columns], or int8/uint8 [..., rows, columns / 2]
        holding two e2m1 each.
      scales: ue8m0 (as such or as bytes) or float32 [..., rows / m, columns / n]; a
        last block may be cut off by the edge.

    Raises:
      ValueError: the shapes do not belong together, or the dtype is not block-scaled.
    """
    if values.dtype in (np.int8, np.uint8):
        numbers = unpack_fp4(values)
    elif values.dtype == ml_dtypes.float8_e4m3fn:
        numbers = values.astype(np.float32)
    else:
        raise ValueError(f"dtype {values.dtype}: expected float8_e4m3fn, int8 or uint8")
    if scales.ndim != numbers.ndim or scales.shape[:-2] != numbers.shape[:-2]:
        raise ValueError(
            f"scales {scales.shape} do not belong to values {numbers.shape}"
        )
    exact = scales.dtype != np.float32
    factor = scale_values(scales)
    for axis in (-2, -1):
        size, count = numbers.shape[axis], factor.shape[axis]
        block = _block(size, count)
        if block is None:
            raise ValueError(
                f"scales {scales.shape} do not divide values {numbers.shape} in blocks"
            )
        factor = np.take(np.repeat(factor, block, axis=axis), range(size), axis=axis)
    result = numbers * factor
    return result.astype(ml_dtypes.bfloat16) if exact else result


def _block(size: int, count: int) -> int | None:
    """Numbers under one scale; None if no length fits."""
    # The lengths of the releases first: with them a last block may be cut off.
    for block in (128, 64, 32):
        if -(-size // block) == count:
            return block
    return size // count if count and size % count == 0 else None
