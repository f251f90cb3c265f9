"""How a cache is cut into blocks of bytes: the ABI of what is stored.

States of all layers with the same geometry form a cache group. A history group has one
block for every ``block_tokens`` tokens, a recent group one for each boundary at which
it was kept. A layout describes every array of a block and is hashed into its header;
data of another layout is refused by name.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from hybrid_attn.cache.cuts import reach, recent_fields
from hybrid_attn.cache.states import Cache, State, check_state

VERSION = 1
Family = Literal["history", "recent"]


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """One array of a block, in C order.

    Attributes:
      layer: the layer's index.
      state, field: where it comes from, "entries" and "key".
      shape: of one row's block.
      axis: the axis of entries or positions in ``shape``.
      dtype: name.
    """

    layer: int
    state: str
    field: str
    shape: tuple[int, ...]
    axis: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Group:
    """A cache group: the unit of storing and checking.

    Attributes:
      name: state, family, and a hash of the geometry.
      family: history (needs the whole chain) or recent (only its own boundary).
      ratio: tokens an entry; 0 for recent groups, whose rows are single positions.
      arrays: of all layers, in order.
      abi: what else reading the numbers depends on (rope of each layer), as JSON.
    """

    name: str
    family: Family
    ratio: int
    arrays: tuple[ArrayLayout, ...]
    abi: str

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest of the descriptor; blocks carry it."""
        return _digest({"version": VERSION, **dataclasses.asdict(self)})

    def pack(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """uint8[nbytes] from one array for each of ``arrays``, shapes as described."""
        out = np.empty((self.nbytes,), np.uint8)
        at = 0
        for layout, array in zip(self.arrays, arrays, strict=True):
            if array.shape != layout.shape or array.dtype != jnp.dtype(layout.dtype):
                raise ValueError(
                    f"{self.name}: layer {layout.layer} {layout.state}.{layout.field} "
                    f"is {array.dtype}{list(array.shape)}, expected "
                    f"{layout.dtype}{list(layout.shape)}"
                )
            part = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            out[at : at + part.size] = part
            at += part.size
        return out

    def unpack(self, data: np.ndarray) -> list[np.ndarray]:
        """The arrays of a payload uint8[nbytes], as views.

        Raises:
          ValueError: another number of bytes.
        """
        if data.size != self.nbytes:
            raise ValueError(f"{self.name}: {data.size} bytes, expected {self.nbytes}")
        out, at = [], 0
        for layout in self.arrays:
            part = data[at : at + layout.nbytes]
            out.append(part.view(jnp.dtype(layout.dtype)).reshape(layout.shape))
            at += layout.nbytes
        return out


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """All groups of a cache; equal for caches of any capacity, batch and undo."""

    groups: tuple[Group, ...]
    block_tokens: int

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest over all groups: the layout that a token chain belongs to."""
        parts = {group.name: group.fingerprint for group in self.groups}
        return _digest({"block_tokens": self.block_tokens, "groups": parts})

    def family(self, family: Family) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.family == family)


def layout_of(cache: Cache) -> CacheLayout:
    """The layout of a cache (abstract arrays suffice).

    Raises:
      TypeError: a state of an unknown kind.
    """
    spec = cache.spec
    members: dict[tuple, list[ArrayLayout]] = {}
    for index, layer in enumerate(cache.layers):
        rings = recent_fields(layer)
        for name, state in sorted(layer.states.items()):
            history = _history(check_state(state), index, name, cache)
            recent = []
            for key, ring in rings.items():
                owner, field = key.split(".")
                rows = reach(ring.shape[1], spec.undo)
                if owner == name and rows > 0:
                    shape = (rows, *ring.shape[2:])
                    recent.append(
                        ArrayLayout(index, name, field, shape, 0, _name(ring))
                    )
            for family, arrays in (("history", history), ("recent", recent)):
                if arrays:
                    key = (family, type(state).__name__, name, _ratio(arrays, spec))
                    key += tuple((a.field, a.shape, a.dtype) for a in arrays)
                    members.setdefault(key, []).extend(arrays)
    groups = [
        _group(key[0], key[2], key[3] if key[0] == "history" else 0, key, arrays, cache)
        for key, arrays in members.items()
    ]
    return CacheLayout(tuple(sorted(groups, key=lambda g: g.name)), spec.block_tokens)


def _history(state: State, layer: int, name: str, cache: Cache) -> list[ArrayLayout]:
    out = []
    for field, axis in state.growing.items():
        array = getattr(state, field)
        if array is None:
            continue
        shape = list(array.shape[1:])
        shape[axis - 1] = shape[axis - 1] * cache.spec.block_tokens
        shape[axis - 1] //= cache.spec.capacity
        out.append(
            ArrayLayout(layer, name, field, tuple(shape), axis - 1, _name(array))
        )
    return out


def _ratio(arrays: list[ArrayLayout], spec) -> int:
    return spec.block_tokens // arrays[0].shape[arrays[0].axis]


def _group(family, state, ratio, key, arrays, cache: Cache) -> Group:
    layers = sorted({array.layer for array in arrays})
    rope = [dataclasses.asdict(cache.spec.layers[layer].rope) for layer in layers]
    what = f"r{ratio}" if family == "history" else "recent"
    return Group(
        name=f"{state}.{what}.{_digest(key)[:8]}",
        family=family,
        ratio=ratio,
        arrays=tuple(arrays),
        abi=json.dumps({"rope": rope, "spec": cache.spec.version}, sort_keys=True),
    )


def _name(array) -> str:
    return jnp.dtype(array.dtype).name


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
