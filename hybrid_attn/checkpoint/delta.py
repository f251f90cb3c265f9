"""What changed in a cache since it was last recorded, and its replay.

A record holds new entries, the rows of rings whose bytes changed, and the rows of cuts
that cannot be taken from the rings: writer and reader form the same expectation of
every array, and only what differs from it is written.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_attn.cache.states import Cache
from hybrid_attn.checkpoint.description import (
    COUNTS,
    growing_axes,
    named,
    ring_of,
)

# Compiled copies of entries cover this many tokens or a power of two above.
_LEAST_WINDOW = 64
Changed = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Delta:
    """One cache's part of a record.

    Attributes:
      counts: int[b] by name: length, floor, sealed, faults, cut, on_grid.
      start: int[b], tokens that are kept from before.
      ids: the tokens of each row from there on.
      changed: by array, uint32[n] of places (row · places a row + place), increasing,
        and what stands there, [n, ...].
    """

    counts: dict[str, np.ndarray]
    start: np.ndarray
    ids: list[np.ndarray]
    changed: Changed


class Base:
    """Host copies of what the next record of a cache is compared with.

    Rings and cuts whole (they are small), and the entries that a rewind could still
    take back. Nothing here shares memory with the cache.
    """

    def __init__(self, small, entries, first, tokens):
        self.small: dict[str, np.ndarray] = small
        self.entries: dict[str, np.ndarray] = entries
        self.first: dict[str, np.ndarray] = first
        self.tokens: list[np.ndarray] = tokens

    def count(self, name: str) -> np.ndarray:
        return self.small[f"counts/{name}"].astype(np.int64)

    @property
    def lower(self) -> np.ndarray:
        """int[b]: entries below this position can no longer change."""
        return np.minimum(self.count("floor"), self.count("length"))

    @property
    def held(self) -> np.ndarray:
        """int[b]: entries of groups below this position exist."""
        return np.maximum(self.count("length"), self.count("sealed"))

    @classmethod
    def of(cls, cache: Cache, tokens: Sequence[np.ndarray]) -> "Base":
        """The base of a cache that is wholly stored otherwise."""
        counts = {n: np.asarray(getattr(cache, n)).astype(np.int64) for n in COUNTS}
        lower = np.minimum(counts["floor"], counts["length"])
        held = np.maximum(counts["length"], counts["sealed"])
        return cls(*_copies(cache, lower, held), list(tokens))


def compare(
    base: Base, cache: Cache, tokens: Sequence[np.ndarray]
) -> tuple[Delta, Base]:
    """The difference between a cache and what was last recorded, and the new base.

    Rows that do not descend from what was recorded (another sequence took the row's
    place, or an older cache went on) are written anew as a whole.

    Args:
      cache: of the same spec and batch.
      tokens: int32[n] for every row.
    """
    start = np.array(
        [_common(a, b) for a, b in zip(base.tokens, tokens, strict=True)], np.int64
    )
    length, floor, sealed, cut = (
        np.asarray(getattr(cache, n)).astype(np.int64)
        for n in ("length", "floor", "sealed", "cut")
    )
    held = np.maximum(length, sealed)
    # Positions below it are the same in every cache that descends from the base.
    lower = base.lower
    foreign = (start < lower) | (length < lower) | (floor < base.count("floor"))
    foreign |= held < lower
    foreign |= sealed != base.count("sealed")
    from_ = np.where(foreign, 0, lower)
    # A cut is taken once: it stays as it is unless a rewind went below it.
    cuts = bool(((cut != base.count("cut")) | (cut > lower) | foreign).any())
    small, entries, first = _copies(cache, from_, held, cuts)
    if not cuts:
        old = {k: v for k, v in base.small.items() if k.startswith("cuts/")}
        small = small | old
    strangers = ~foreign & _rings_differ(base, small, cache, lower, length)
    if strangers.any():
        foreign |= strangers
        from_ = np.where(foreign, 0, lower)
        small, entries, first = _copies(cache, from_, held)
    changed: Changed = {}
    axes = growing_axes(cache)
    for name, array in small.items():
        if name.startswith("layers/"):
            changed[name] = _places(_differ(base.small[name], array), array)
    for name, array in entries.items():
        places = named(cache)[name].shape[axes[name]]
        ratio = cache.spec.capacity // places
        changed[name] = _new_entries(
            base, name, array, first[name], places, ratio, from_, held, foreign
        )
    expected = expected_cuts(base.small, small) if cuts else small
    for name, array in small.items():
        if name.startswith("cuts/") and expected[name] is not array:
            changed[name] = _places(_differ(expected[name], array), array)
    counts = {name: small[f"counts/{name}"] for name in COUNTS}
    ids = [row[at:] for row, at in zip(tokens, start, strict=True)]
    delta = Delta(counts, start, ids, {k: v for k, v in changed.items() if v[0].size})
    new = Base(small, entries, first, list(tokens))
    _trim(new, cache)
    return delta, new


def apply(
    arrays: dict[str, np.ndarray],
    axes: Mapping[str, int],
    tokens: list[np.ndarray],
    deltas: Sequence[Delta],
) -> None:
    """Brings writable host arrays and token rows to the state of the last delta."""
    run: list[Delta] = []
    for delta in deltas:
        # Where cuts move, what the rings held just before and after decides; between
        # such records only the last value of a place counts.
        moved = np.flatnonzero(delta.counts["cut"] != arrays["counts/cut"])
        if moved.size:
            _apply(arrays, axes, run)
            _apply(arrays, axes, [delta], moved)
            run = []
        else:
            run.append(delta)
        for row, (at, ids) in enumerate(zip(delta.start, delta.ids, strict=True)):
            kept = tokens[row][: int(at)]
            tokens[row] = np.concatenate([kept, ids]) if ids.size else kept
    _apply(arrays, axes, run)


def _apply(arrays, axes, deltas: Sequence[Delta], moved=None) -> None:
    """Applies deltas at once; ``moved`` int[n] are the rows whose cuts move, if any."""
    if not deltas:
        return

    def rows_of() -> dict[str, np.ndarray]:
        return {n: array[moved] for n, array in arrays.items() if n not in axes}

    before = None if moved is None else rows_of()
    for name, count in deltas[-1].counts.items():
        arrays[f"counts/{name}"] = np.array(count, arrays[f"counts/{name}"].dtype)
    # Rings before cuts: the latter are taken from the former.
    for kind in ("layers/", "cuts/"):
        if kind == "cuts/" and before is not None:
            for name, rows in expected_cuts(before, rows_of()).items():
                arrays[name][moved] = rows
        for name, array in arrays.items():
            parts = [d.changed[name] for d in deltas if name in d.changed]
            if not name.startswith(kind) or not parts:
                continue
            places = np.concatenate([part[0] for part in parts])
            rows = np.concatenate([part[1] for part in parts])
            target = np.moveaxis(array, axes.get(name, 1), 1)
            # Of places that repeat, numpy keeps the last.
            target[places // target.shape[1], places % target.shape[1]] = rows


def expected_cuts(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """By name, the rows of each cut as far as the rings before and after tell them."""
    cut, was = after["counts/cut"], before["counts/cut"]
    end = after["counts/length"]
    out = {}
    for name, old in before.items():
        if not name.startswith("cuts/"):
            continue
        out[name] = old
        # A rewind below a boundary voids its cut and leaves the rows.
        moved = (cut != was) & (cut > 0)
        if not moved.any():
            continue
        rings = [x[ring_of(name)] for x in (before, after)]
        size = rings[0].shape[1]
        position = cut[:, None] - old.shape[1] + np.arange(old.shape[1])
        row = np.arange(old.shape[0])[:, None]
        rows = [ring[row, position % size] for ring in rings]
        trailing = (1,) * (old.ndim - 2)
        late = (position >= end[:, None] - size).reshape(*position.shape, *trailing)
        real = (position >= 0).reshape(*position.shape, *trailing)
        new = np.where(late, rows[1], rows[0])
        new = np.where(real, new, np.zeros((), new.dtype))
        out[name] = np.where(moved.reshape(-1, 1, *trailing), new, old)
    return out


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(a.size, b.size)
    unequal = a[:n] != b[:n]
    return int(unequal.argmax()) if unequal.any() else n


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool[b, places]: whose bytes are not the same."""
    shape = (*a.shape[:2], -1) if a.size else (*a.shape[:2], 0)
    a, b = (
        np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(shape)
        for x in (a, b)
    )
    return (a != b).any(-1)


def _places(differ: np.ndarray, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    row, place = np.nonzero(differ)
    flat = (row * differ.shape[1] + place).astype(np.uint32)
    return flat, array[row, place]


def _rings_differ(base: Base, small, cache: Cache, lower, length) -> np.ndarray:
    """bool[b]: a ring holds, below what can change, something else than before."""
    out = np.zeros(lower.shape, bool)
    for name, array in small.items():
        if not name.startswith("layers/"):
            continue
        size = array.shape[1]
        slot = np.arange(size)
        last = lower[:, None] - 1
        position = last - (last - slot) % size
        # Later tokens may have taken the slot; drafts that were taken back too.
        reached = np.maximum(length, base.count("length")) + cache.spec.undo
        still = (position >= 0) & (position + size >= reached[:, None])
        out |= (_differ(base.small[name], array) & still).any(1)
    return out


def _new_entries(base, name, array, first, places, ratio, lower, held, foreign):
    """Places and rows of the entries that are new or differ from the base's."""
    entry = first[:, None] + np.arange(array.shape[1])
    wanted = (entry >= (lower // ratio)[:, None]) & (entry < (held // ratio)[:, None])
    old, start = base.entries[name], base.first[name]
    if old.shape[1]:
        at = entry - start[:, None]
        known = (at >= 0) & (at < old.shape[1]) & ~foreign[:, None]
        known &= entry < (base.held // ratio)[:, None]
        row = np.arange(old.shape[0])[:, None]
        same = ~_differ(old[row, np.clip(at, 0, old.shape[1] - 1)], array)
        wanted &= ~(known & same)
    row, column = np.nonzero(wanted)
    flat = row * places + entry[row, column]
    return flat.astype(np.uint32), array[row, column]


def _copies(cache: Cache, lower: np.ndarray, held: np.ndarray, cuts: bool = True):
    """Host copies: rings, cuts and counts; entries [b, n, ...]; first entry int[b]."""
    need = int((held - lower).max(initial=0)) + 1
    window = max(_LEAST_WINDOW, 1 << (need - 1).bit_length())
    window = min(window, cache.spec.capacity)
    small, entries, first = jax.device_get(
        _device_copies(cache, lower.astype(np.int32), window, cuts)
    )
    return small, entries, {k: v.astype(np.int64) for k, v in first.items()}


@functools.partial(jax.jit, static_argnums=(2, 3))
def _device_copies(cache: Cache, lower, window: int, cuts: bool):
    axes = growing_axes(cache)
    small, entries, first = {}, {}, {}
    for name, array in named(cache).items():
        axis = axes.get(name)
        if axis is None:
            if name.startswith("cuts/") and not cuts:
                continue
            # A jit hands through what it does not compute, and a view of a caller's
            # buffer would keep the caller from donating it.
            small[name] = jnp.copy(array)
            continue
        places = array.shape[axis]
        ratio = cache.spec.capacity // places
        count = min(places, window // ratio + 2)
        start = jnp.clip(lower // ratio, 0, places - count)
        entries[name] = jax.vmap(
            lambda row, at, axis=axis, count=count: jnp.moveaxis(
                jax.lax.dynamic_slice_in_dim(row, at, count, axis - 1), axis - 1, 0
            )
        )(array, start)
        first[name] = start
    return small, entries, first


def _trim(base: Base, cache: Cache) -> None:
    """Keeps of the entries those that can still change."""
    lower, held = base.lower, base.held
    for name, axis in growing_axes(cache).items():
        ratio = cache.spec.capacity // named(cache)[name].shape[axis]
        array, first = base.entries[name], base.first[name]
        begin = np.maximum(lower // ratio, first)
        count = int((held // ratio - begin).max(initial=0))
        if count >= array.shape[1]:
            continue
        at = np.minimum(begin - first, array.shape[1] - count)
        row = np.arange(array.shape[0])[:, None]
        base.entries[name] = array[row, at[:, None] + np.arange(count)]
        base.first[name] = first + at
