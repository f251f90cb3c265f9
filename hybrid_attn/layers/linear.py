"""Bias-free linear maps as flat matrix products."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

# Up to here a grouped product is written out on CPU.
_FEW_GROUPS = 16


def _init(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> Array:
    return nnx.initializers.normal(fan_in**-0.5)(rngs.params(), shape, jnp.float32)


class Linear(nnx.Module):
    """y = x·W with W [inputs, outputs].

    Batch and time are flattened first: the gradient of one large 2-D product is 2-3
    times cheaper on CPU than that of a batched one.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        rngs: nnx.Rngs,
        dtype: str = "float32",
        scale: float = 1.0,
    ):
        self.weight = nnx.Param(scale * _init(rngs, (inputs, outputs), inputs))
        self.dtype = dtype

    def __call__(self, x: Array) -> Array:
        weight = self.weight[...].astype(self.dtype)
        flat = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        return (flat @ weight).reshape(*x.shape[:-1], weight.shape[-1])


class GroupedLinear(nnx.Module):
    """Block-diagonal map: the last axis split in groups, W [groups, in/groups, out]."""

    def __init__(
        self, groups: int, inputs: int, outputs: int, *, rngs: nnx.Rngs, dtype="float32"
    ):
        width = inputs // groups
        self.weight = nnx.Param(_init(rngs, (groups, width, outputs), width))
        self.dtype = dtype

    def __call__(self, x: Array) -> Array:
        groups, width, outputs = self.weight[...].shape
        flat = x.reshape(-1, groups * width).astype(self.dtype)
        weight = self.weight[...].astype(self.dtype)
        if groups > _FEW_GROUPS or jax.default_backend() != "cpu":
            parts = flat.reshape(-1, groups, width)
            y = jnp.einsum("tgi,gio->tgo", parts, weight)
        else:
            # The batched product transposes what it reads and writes.
            y = jnp.concatenate(
                [
                    flat[:, g * width : (g + 1) * width] @ weight[g]
                    for g in range(groups)
                ],
                axis=-1,
            )
        return y.reshape(*x.shape[:-1], groups * outputs)
