"""Heads of an attention, and what their arrays and products amount to."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from experiments.bench_kernels.case import Arrays, Case, Given, ours
from pallas_kernels.dispatch import Dispatch


class Heads(NamedTuple):
    """Query heads, key/value heads and channels; keys as values where shared."""

    n: int
    k: int
    h: int
    dtype: Any
    shared: bool = False

    def __str__(self) -> str:
        of = f"{self.n} heads of {self.k}" if self.n != self.k else f"{self.n} heads"
        return f"{of} × {self.h}, {jnp.dtype(self.dtype).name}"

    def queries(self, t: int, b: int = 1) -> Given:
        """[b, t, n, h]."""
        return Given((b, t, self.n, self.h), self.dtype)

    def keys(self, s: int, b: int = 1) -> dict[str, Given]:
        """key [b, s, k, h], and value unless shared."""
        given = Given((b, s, self.k, self.h), self.dtype)
        return {"key": given} if self.shared else {"key": given, "value": given}

    def key_bytes(self, s: int) -> int:
        """Bytes of the keys and values of s positions."""
        size = jnp.dtype(self.dtype).itemsize
        return s * self.k * self.h * size * (1 if self.shared else 2)

    def output_bytes(self, t: int) -> int:
        """Bytes of the queries and the float32 outputs."""
        return t * self.n * self.h * (4 + jnp.dtype(self.dtype).itemsize)

    @property
    def tolerance(self) -> float:
        """By how much results of equal products may differ."""
        return 3e-2 if jnp.dtype(self.dtype).itemsize < 4 else 1e-4

    def flops(self, pairs: int) -> int:
        """FLOPs of pairs of a query and a key, over all heads."""
        return 4 * self.n * self.h * pairs


def value(arrays: Arrays) -> Any:
    """The values, which are the keys where they are shared."""
    return arrays.get("value", arrays["key"])


def mass_case(
    op: str,
    name: str,
    shape: str,
    arrays: dict[str, Given],
    dispatch: Dispatch,
    with_mass: Any,
    without: Any,
    **counts: Any,
) -> Case:
    """An operation with and without the attention mass of blocks of entries."""
    return Case(
        op=op,
        name=name,
        shape=shape,
        arrays=arrays,
        contenders=[
            *ours(dispatch, with_mass, suffix=" with mass", **counts),
            *ours(dispatch, without, **counts),
        ],
        ratios={"ratio": ("{} with mass", "{}")},
        tolerance=None,
        seconds=2.0,
    )
