"""Partial rotary embedding in the interleaved layout, on the trailing channels.

Pairs are (2k, 2k+1) of the last ``dims`` channels, as DeepSeek-V4 stores them; the
half-split layout is another permutation and gives wrong numbers with its weights.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from hybrid_attn.config import Rope


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """float32[dims / 2]: angle per position of each pair, YaRN included."""
    exponent = np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims)
    base = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.yarn_factor <= 1.0:
        return base

    def pair_at(rotations: float) -> float:
        # The pair that turns `rotations` times over the original positions.
        ratio = rope.original_positions / (rotations * 2 * math.pi)
        return rope.dims * math.log(ratio) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_at(rope.beta_fast)), 0)
    high = min(math.ceil(pair_at(rope.beta_slow)), rope.dims - 1)
    span = (high - low) or 0.001
    pairs = np.arange(rope.dims // 2, dtype=np.float32)
    stretched = np.clip((pairs - low) / np.float32(span), 0, 1)
    scaled = base / np.float32(rope.yarn_factor)
    return (scaled * stretched + base * (1 - stretched)).astype(np.float32)


def rotate(
    x: Array, positions: Array | np.ndarray, rope: Rope, *, inverse: bool = False
) -> Array:
    """Rotates the trailing channels of x by the angle of each position.

    Args:
      x: float[b, t, ..., h]; any axes may stand between time and channels.
      positions: int32[b, t], or a numpy int32[1, t] where they are static.
      inverse: rotate by the negative angle (undoes the position carried by values).

    Returns:
      float32, the shape of x.
    """
    x = x.astype(jnp.float32)
    if rope.dims == 0:
        return x
    cos, sin = _tables(positions, rope, x.shape[-1])
    shape = positions.shape + (1,) * (x.ndim - 3) + x.shape[-1:]
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    # One product over all channels, with cos = 1 and sin = 0 where nothing turns:
    # cutting the rotated channels out and back in took longer than the rotation.
    # The size is spelled out: -1 has no answer where there are no entries yet.
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    partner = pairs[..., ::-1].reshape(x.shape)
    return x * cos - partner * sin if inverse else x * cos + partner * sin


def _tables(positions, rope: Rope, width: int):
    """(cos, sin) [b, t, width]; sin is negative on even channels."""
    where = np if isinstance(positions, np.ndarray) else jnp
    frequencies = np.zeros((width,), np.float32)
    frequencies[width - rope.dims :] = np.repeat(inverse_frequencies(rope), 2)
    angle = positions[..., None].astype(np.float32) * frequencies
    sign = np.tile(np.array([-1, 1], np.float32), width // 2)
    return where.cos(angle), where.sin(angle) * sign
