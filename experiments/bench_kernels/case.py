"""What is compared: a case has named arrays and contenders that read them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Dispatch

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Given:
    """An array of a case.

    Attributes:
      shape, dtype: of the array.
      fill: makes it with a NumPy generator and the shape; normal numbers if None.
    """

    shape: tuple[int, ...]
    dtype: Any = jnp.float32
    fill: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape)) * jnp.dtype(self.dtype).itemsize

    def make(self, generator: np.random.Generator) -> jax.Array:
        """The array, on the default device."""
        if self.fill is not None:
            return jnp.asarray(self.fill(generator, self.shape), self.dtype)
        return jnp.asarray(
            generator.standard_normal(self.shape, dtype=np.float32), self.dtype
        )

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Its shape and dtype alone."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to compute a case.

    Attributes:
      name: an implementation of ours, or what a user would call.
      function: of the case's arrays; traced.
      bytes: that it has to read and write, each number once.
      flops: of its matrix products, two a multiplication and addition; of element-wise
        operations where it has no product.
      reads: the bytes in words.
      ours: an implementation of the operation, and no baseline.
      platform: where it exists; None for anywhere.
    """

    name: str
    function: Callable[..., Any]
    bytes: int
    flops: int
    reads: str
    ours: bool = False
    platform: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Contenders over the same arrays.

    Attributes:
      op: operation.
      name: of the case, unique within the operation.
      shape: in words.
      arrays: by name.
      contenders: at least one.
      ratios: key -> (dividend, divisor), names of contenders, whose times are divided;
        "ours" stands for the fastest implementation of ours, and "{}" in both for the
        best one that has both.
      tolerance: largest difference of any contender's result from the last one's, as
        a part of that one's largest number; None where results are not the same.
      compare: what of a result is compared.
      seconds: spent on each contender; None for the run's own.
      least: samples of each contender at least.
      expected: seconds of the whole case on two CPU cores, for the progress bar.
    """

    op: str
    name: str
    shape: str
    arrays: Mapping[str, Given]
    contenders: Sequence[Contender]
    ratios: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    tolerance: float | None = 1e-4
    compare: Callable[[Any], Any] = lambda result: result
    seconds: float | None = None
    least: int = 2
    expected: float = 3.0

    @property
    def stage(self) -> str:
        """Name of its stage in a run's directory."""
        return f"{self.op}.{self.name}"


def ours(
    dispatch: Dispatch,
    call: Callable[..., Any],
    *,
    bytes: int,
    flops: int,
    reads: str,
    suffix: str = "",
) -> list[Contender]:
    """A contender for each implementation of an operation.

    Args:
      dispatch: of the operation.
      call: of the arrays, with ``implementation``.
      bytes, flops, reads: as `Contender`.
      suffix: put behind each implementation's name.
    """

    def bound(name: str) -> Callable[..., Any]:
        return lambda arrays: call(arrays, implementation=name)

    return [
        Contender(
            name=name + suffix,
            function=bound(name),
            bytes=bytes,
            flops=flops,
            reads=reads,
            ours=True,
            platform=None if name == "xla" else "gpu",
        )
        for name in dispatch.names
    ]


def uniform(low: int, high: int) -> Callable[..., np.ndarray]:
    """A fill of whole numbers low..high-1."""
    return lambda generator, shape: generator.integers(low, high, shape)


def distinct(high: int) -> Callable[..., np.ndarray]:
    """A fill of rows of ascending, distinct whole numbers below ``high``."""

    def fill(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        rows = [
            np.sort(generator.choice(high, shape[-1], replace=False))
            for _ in range(int(np.prod(shape[:-1])))
        ]
        return np.stack(rows).reshape(shape)

    return fill


def count(first: int = 0, step: int = 1) -> Callable[..., np.ndarray]:
    """A fill of ascending numbers along the last axis."""

    def fill(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        del generator
        row = first + step * np.arange(shape[-1])
        return np.broadcast_to(row, shape)

    return fill
