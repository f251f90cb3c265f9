"""Where two caches first differ, among the places that their counts call valid."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from hybrid_attn.cache.spec import CacheSpec
from hybrid_attn.cache.states import Cache, State, check_state

_COUNTS = ("length", "floor", "sealed", "faults", "cut")
_VALID = ("length", "floor", "sealed", "cut")
_ABSENT = "(absent)"


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between two caches.

    Attributes:
      state: "entries.key" (state and field), "cut window.key" (what a cut keeps of
        one), a count ("length"), a field of the spec ("capacity"), or the part of the
        structure that differs ("batch").
      layer: index of the layer; None for what belongs to no layer.
      kind: the layer's mixer; "counts", "spec" or "structure" otherwise.
      row: row of the batch, or None.
      position: position in tokens; of an entry, that of its group's first token.
      a, b: the two values there.
      index: place in the axes after those of row and position.
    """

    state: str
    layer: int | None
    kind: str
    row: int | None
    position: int | None
    a: Any
    b: Any
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = [self.state if self.layer is not None else f"{self.kind}: {self.state}"]
        if self.layer is not None:
            where.append(f"layer {self.layer} ({self.kind})")
        if self.row is not None:
            where.append(f"row {self.row}")
        if self.position is not None:
            where.append(f"position {self.position}")
        if self.index:
            where.append(f"at {list(self.index)}")
        return f"{', '.join(where)}: {self.a} != {self.b}"


class _Counts(NamedTuple):
    """int[b, 1] each, the same for both caches once they are compared."""

    length: np.ndarray
    floor: np.ndarray
    sealed: np.ndarray
    cut: np.ndarray


def diff(
    cache_a: Cache, cache_b: Cache, *, tolerance: float = 0.0
) -> Difference | None:
    """The first place at which two caches differ, or None where they are equal.

    Compared are, in this order: the spec, the structure (batch, layers, states,
    shapes and dtypes), the counts row by row, then the states layer by layer; within
    a state the lowest row, then the lowest position; after a layer's states its cut.
    Only valid places count: entries of groups that lie below ``length`` or ``sealed``,
    ring slots that a step from ``floor`` or later can ask for, and the rows of cuts
    that have a position. Both caches are copied to the host, one array at a time.

    Args:
      tolerance: largest absolute difference of two values that count as equal; at 0
        their bits must be the same (so 0.0 differs from -0.0) and so must ``on_grid``;
        above 0 NaN equals NaN.

    Raises:
      ValueError: a negative or undefined tolerance.
      TypeError: a state of an unknown kind.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance!r}: expected a number from 0")
    found = _spec(cache_a.spec, cache_b.spec) or _structure(cache_a, cache_b)
    if found:
        return found
    # `on_grid` says how values came about, which decides about bits alone.
    for name in _COUNTS if tolerance else (*_COUNTS, "on_grid"):
        a, b = (np.asarray(getattr(cache, name)) for cache in (cache_a, cache_b))
        if (a != b).any():
            row = int(np.flatnonzero(a != b)[0])
            return Difference(name, None, "counts", row, None, int(a[row]), int(b[row]))
    counts = _Counts(*(np.asarray(getattr(cache_a, n))[:, None] for n in _VALID))
    for number, (a, b) in enumerate(zip(cache_a.layers, cache_b.layers, strict=True)):
        for name in a.states:
            found = _state(
                name, a.states[name], b.states[name], cache_a.spec, counts, tolerance
            )
            if found:
                return dataclasses.replace(found, layer=number, kind=a.kind)
        for name, array in cache_a.cuts[number].items():
            one, other = (np.asarray(x) for x in (array, cache_b.cuts[number][name]))
            position = counts.cut - one.shape[1] + np.arange(one.shape[1])
            valid = (position >= 0) & (counts.cut > 0)
            found = _first(f"cut {name}", one, other, valid, position, tolerance)
            if found:
                return dataclasses.replace(found, layer=number, kind=a.kind)
    return None


def _state(
    name: str,
    a: State,
    b: State,
    spec: CacheSpec,
    counts: _Counts,
    tolerance: float,
) -> Difference | None:
    """The lowest row and position, over its arrays, at which two states differ."""
    found = []
    for field, _ in _fields(a):
        axis = a.growing.get(field)
        one, other = (np.asarray(getattr(state, field)) for state in (a, b))
        valid, position = _valid(one.shape, axis, spec, counts)
        one, other = (np.moveaxis(array, axis or 1, 1) for array in (one, other))
        found.append(_first(f"{name}.{field}", one, other, valid, position, tolerance))
    return min(filter(None, found), key=lambda d: (d.row, d.position), default=None)


def _fields(state: State) -> list[tuple[str, Any]]:
    fields = dataclasses.fields(check_state(state))
    return [
        (field.name, value)
        for field in fields
        if (value := getattr(state, field.name)) is not None
    ]


def _spec(a: CacheSpec, b: CacheSpec) -> Difference | None:
    for field in dataclasses.fields(CacheSpec):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if one != other:
            return Difference(field.name, None, "spec", None, None, one, other)
    return None


def _structure(cache_a: Cache, cache_b: Cache) -> Difference | None:
    """What keeps the arrays of two caches from being compared place by place."""

    def differs(name: str, a: Any, b: Any, layer: int | None = None):
        """The difference between two descriptions, if they do."""
        if a != b:
            return Difference(name, layer, "structure", None, None, a, b)
        return None

    found = differs("batch", cache_a.batch, cache_b.batch)
    found = found or differs("layers", len(cache_a.layers), len(cache_b.layers))
    if found:
        return found
    for number, (a, b) in enumerate(zip(cache_a.layers, cache_b.layers, strict=True)):
        found = differs("kind", a.kind, b.kind, number)
        for name in [*a.states, *(name for name in b.states if name not in a.states)]:
            one, other = a.states.get(name), b.states.get(name)
            shown = [_ABSENT if s is None else type(s).__name__ for s in (one, other)]
            found = found or differs(name, shown[0], shown[1], number)
            if found or one is None or other is None:
                return found
            arrays = [
                {field: (value.shape, str(value.dtype)) for field, value in _fields(s)}
                for s in (one, other)
            ]
            for field in {**arrays[0], **arrays[1]}:
                left, right = (array.get(field, _ABSENT) for array in arrays)
                found = found or differs(f"{name}.{field}", left, right, number)
        cuts = [
            {n: (x.shape, str(x.dtype)) for n, x in cache.cuts[number].items()}
            for cache in (cache_a, cache_b)
        ]
        found = found or differs("cuts", cuts[0], cuts[1], number)
        if found:
            return found
    return None


def _valid(shape, axis: int | None, spec: CacheSpec, counts: _Counts):
    """(bool[b, places], int[b, places]): what holds something, and its position."""
    place = np.arange(shape[axis or 1])[None]
    if axis is not None:
        ratio = spec.capacity // shape[axis]
        # A replay below `sealed` finds the entries there, so they are held too.
        held = np.maximum(counts.length, counts.sealed) // ratio
        position = np.broadcast_to(place * ratio, (shape[0], place.size))
        return place < held, position
    position = counts.length - 1 - (counts.length - 1 - place) % place.size
    reach = place.size - spec.undo
    return (position >= 0) & (position >= counts.floor - reach), position


def _first(
    state: str,
    one: np.ndarray,
    other: np.ndarray,
    valid: np.ndarray,
    position: np.ndarray,
    tolerance: float,
) -> Difference | None:
    """The lowest row and position of arrays [b, places, ...] that differ."""
    unequal = _unequal(one, other, tolerance)
    places = unequal.reshape(*unequal.shape[:2], -1).any(-1) & valid
    if not places.any():
        return None
    row = int(np.flatnonzero(places.any(1))[0])
    # Slots of a ring do not stand in the order of their positions.
    at = np.flatnonzero(places[row])
    place = int(at[np.argmin(position[row, at])])
    index = tuple(int(i) for i in np.argwhere(unequal[row, place])[0])
    where = (row, place, *index)
    return Difference(
        state,
        None,
        "",
        row,
        int(position[row, place]),
        one[where].item(),
        other[where].item(),
        index,
    )


def _unequal(a: np.ndarray, b: np.ndarray, tolerance: float) -> np.ndarray:
    if not tolerance:
        bits = f"u{a.dtype.itemsize}"
        a, b = (np.ascontiguousarray(array).view(bits) for array in (a, b))
        return a != b
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        # Equal infinities have no distance; a NaN is not within any.
        near = (a == b) | (np.abs(a - b) <= tolerance) | (np.isnan(a) & np.isnan(b))
    return ~near
