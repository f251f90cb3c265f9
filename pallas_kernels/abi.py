"""Descriptors of the arrays that kernels read and write; what each GPU asks of them.

Every stored array has one `Layout`: the names of its axes, their sizes and strides,
dtype, quantisation, alignment, tokens per entry and a version. Its hash identifies the
layout wherever the bytes outlive a process. Operations check arrays against it whenever
they are called or traced, so that a kernel never reads a foreign layout.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

VERSION = 1


class LayoutError(ValueError):
    """An array or its layout is not what an operation reads; names both sides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How an array lies in memory, row-major with the last axis densest.

    Attributes:
      axes: name of each axis, outermost first.
      sizes: size of each axis; None where any size is allowed (batch, entries).
      dtype: name of the element type.
      quantization: codec of the stored numbers, "none" for plain numbers.
      alignment: bytes; the last axis is padded so that its byte length is a multiple.
      ratio: tokens per entry, 1 for one row per token.
      version: of this description.
    """

    axes: tuple[str, ...]
    sizes: tuple[int | None, ...]
    dtype: str
    quantization: str = "none"
    alignment: int = 1
    ratio: int = 1
    version: int = VERSION

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes):
            raise LayoutError(f"axes {self.axes} and sizes {self.sizes} differ in rank")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise LayoutError(f"alignment {self.alignment}: expected a power of two")
        size = self.sizes[-1] if self.sizes else None
        if size is not None and size * self.itemsize % self.alignment:
            raise LayoutError(
                f"{size} x {self.dtype} bytes are no multiple of alignment "
                f"{self.alignment}"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def strides(self) -> tuple[int | None, ...]:
        """Bytes between neighbours along each axis; None if an inner size is open."""
        strides: list[int | None] = []
        stride: int | None = self.itemsize
        for size in reversed(self.sizes):
            strides.append(stride)
            stride = None if size is None or stride is None else stride * size
        return tuple(reversed(strides))

    def hash(self) -> str:
        """16 hexadecimal digits that identify the layout."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def check(self, array: Any, name: str) -> None:
        """Refuses an array that does not lie as described.

        Args:
          array: anything with shape and dtype, also while tracing.
          name: of the argument, for the message.

        Raises:
          LayoutError: what was given beside what was expected.
        """
        fits = len(array.shape) == len(self.sizes) and all(
            want is None or got == want
            for got, want in zip(array.shape, self.sizes, strict=True)
        )
        if not fits or np.dtype(array.dtype) != jnp.dtype(self.dtype):
            raise LayoutError(
                f"{name}: given {np.dtype(array.dtype).name}{list(array.shape)}, "
                f"expected {self}"
            )

    def expect(self, other: "Layout", name: str) -> None:
        """Refuses another layout.

        Args:
          other: what the array was written with.
          name: of the argument, for the message.

        Raises:
          LayoutError: each field that differs, given and expected.
        """
        differing = [
            f"{field.name} {getattr(other, field.name)!r}, "
            f"expected {getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(other, field.name) != getattr(self, field.name)
        ]
        if differing:
            raise LayoutError(
                f"{name}: layout {other.hash()} given, {self.hash()} expected: "
                + "; ".join(differing)
            )

    def __str__(self) -> str:
        sizes = ", ".join(
            axis if size is None else f"{axis}={size}"
            for axis, size in zip(self.axes, self.sizes, strict=True)
        )
        text = f"{self.dtype}[{sizes}]"
        if self.quantization != "none":
            text += f" {self.quantization}"
        return f"{text}, aligned to {self.alignment} bytes"


class MemoryRules(NamedTuple):
    """What a GPU generation asks of arrays.

    Attributes:
      bulk_copy: bytes; the tensor memory accelerator copies arrays whose strides are
        multiples of it. None where there is no such unit.
      sector: bytes that one access to device memory moves at least.
      shared_memory: bytes of shared memory that one block can use.
    """

    bulk_copy: int | None
    sector: int
    shared_memory: int


# CUDA programming guide, tables of technical specifications by compute capability.
MEMORY_RULES = {
    (8, 0): MemoryRules(bulk_copy=None, sector=32, shared_memory=163 * 1024),
    (9, 0): MemoryRules(bulk_copy=16, sector=32, shared_memory=227 * 1024),
    (10, 0): MemoryRules(bulk_copy=16, sector=32, shared_memory=227 * 1024),
}


def bulk_copyable(layout: Layout, capability: tuple[int, int] | None) -> bool:
    """Whether the generation's bulk copies can move rows of the layout."""
    rules = MEMORY_RULES.get(capability) if capability is not None else None
    if rules is None or rules.bulk_copy is None:
        return False
    return all(
        stride is not None and stride % rules.bulk_copy == 0
        for stride, size in zip(layout.strides[:-1], layout.sizes[1:], strict=True)
        if size is not None
    )


def adapt(layout: Layout, capability: tuple[int, int]) -> Layout:
    """The layout with its last axis padded as far as the generation's copies need.

    Args:
      layout: with a known last size.
      capability: a key of `MEMORY_RULES`.
    """
    if capability not in MEMORY_RULES:
        raise LayoutError(
            f"compute capability {capability}: expected one of {sorted(MEMORY_RULES)}"
        )
    needed = MEMORY_RULES[capability].bulk_copy or 1
    return aligned(layout, max(layout.alignment, needed))


def aligned(layout: Layout, alignment: int) -> Layout:
    """The layout with its last axis padded to a multiple of ``alignment`` bytes."""
    size = layout.sizes[-1]
    if size is None:
        raise LayoutError(f"{layout}: the last axis has no size to pad")
    unit = math.lcm(alignment, layout.itemsize)
    padded = -(-size * layout.itemsize // unit) * unit // layout.itemsize
    return dataclasses.replace(
        layout, sizes=(*layout.sizes[:-1], padded), alignment=alignment
    )


Adapter = Callable[[Array], Array]
_adapters: dict[tuple[str, str], Adapter] = {}


def register_adapter(given: Layout, wanted: Layout, adapter: Adapter) -> None:
    """Makes `convert` turn arrays of one layout into another by ``adapter``."""
    _adapters[given.hash(), wanted.hash()] = adapter


def convert(array: Array, given: Layout, wanted: Layout, name: str = "array") -> Array:
    """The array in another layout.

    Layouts that differ only in the padding of the last axis convert by padding or
    cutting; others need a registered adapter.

    Raises:
      LayoutError: the array is not in ``given``, or no conversion is known.
    """
    given.check(array, name)
    if given == wanted:
        return array
    adapter = _adapters.get((given.hash(), wanted.hash()))
    if adapter is None and _differ_in_padding(given, wanted):
        size, target = given.sizes[-1], wanted.sizes[-1]
        assert size is not None and target is not None
        if target <= size:
            return array[..., :target]
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, target - size)])
    if adapter is None:
        wanted.expect(given, name)
        raise AssertionError("equal layouts are not converted")
    converted = adapter(array)
    wanted.check(converted, name)
    return converted


def _differ_in_padding(a: Layout, b: Layout) -> bool:
    if a.sizes[-1] is None or b.sizes[-1] is None:
        return False
    # Only a codec whose records say where they end can lose or gain padding.
    if a.quantization == "none":
        return False
    common = dict(sizes=b.sizes, alignment=b.alignment)
    return a.sizes[:-1] == b.sizes[:-1] and dataclasses.replace(a, **common) == b


def check_stored(
    layout: Layout | None, axes: tuple[str, ...], array: Any, name: str
) -> None:
    """Refuses a stored array of plain numbers that is described otherwise.

    Args:
      layout: the owner's description, None where it keeps none.
      axes: in the operation's order.
      array, name: the argument and its name.
    """
    if layout is None:
        return
    if layout.axes != axes or layout.version != VERSION:
        raise LayoutError(
            f"{name}: given axes {layout.axes} of version {layout.version}, expected "
            f"{axes} of version {VERSION}"
        )
    if layout.quantization != "none":
        raise LayoutError(
            f"{name}: given {layout.quantization!r} codes, expected plain numbers"
        )
    layout.check(array, name)


def abstract(layout: Layout, **sizes: int) -> jax.ShapeDtypeStruct:
    """The abstract array of a layout, open axes given by name."""
    shape = tuple(
        sizes[axis] if size is None else size
        for axis, size in zip(layout.axes, layout.sizes, strict=True)
    )
    return jax.ShapeDtypeStruct(shape, jnp.dtype(layout.dtype))
