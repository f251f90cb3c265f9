"""Allocated bytes of a cache, by state, layer kind and tier."""

import dataclasses
from collections import defaultdict

import jax

from hybrid_attn.cache.states import Cache, check_state


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Bytes allocated by one cache (all rows).

    Attributes:
      total: every array, counts included.
      by_state, by_kind, by_tier: bytes by state class (and "cuts", the recent states
        at the last boundary, and "counts"), layer kind, memory tier.
      per_token: total / (capacity · batch).
      capacity, batch: what ``per_token`` divides by.
    """

    total: int
    by_state: dict[str, int]
    by_kind: dict[str, int]
    by_tier: dict[str, int]
    per_token: float
    capacity: int
    batch: int


def _tier(array) -> str:
    sharding = getattr(array, "sharding", None)
    kind = getattr(sharding, "memory_kind", None) or "device"
    return "host" if "host" in kind and kind != "unpinned_host" else "device"


def cache_bytes(cache: Cache) -> Ledger:
    """Counts the bytes of a cache from its arrays (abstract arrays count too).

    Raises:
      TypeError: a state of an unknown kind.
    """
    by_state: dict[str, int] = defaultdict(int)
    by_kind: dict[str, int] = defaultdict(int)
    by_tier: dict[str, int] = defaultdict(int)

    def add(array, state: str, kind: str) -> None:
        size = array.size * array.dtype.itemsize
        by_state[state] += size
        by_kind[kind] += size
        by_tier[_tier(array)] += size

    for layer in cache.layers:
        for state in layer.states.values():
            for array in jax.tree.leaves(check_state(state)):
                add(array, type(state).__name__, layer.kind)
    for layer, cut in zip(cache.layers, cache.cuts, strict=True):
        for array in jax.tree.leaves(cut):
            add(array, "cuts", layer.kind)
    counts = ("length", "floor", "sealed", "faults", "cut", "on_grid")
    for array in (getattr(cache, name) for name in counts):
        add(array, "counts", "counts")
    total = sum(by_state.values())
    return Ledger(
        total=total,
        by_state=dict(by_state),
        by_kind=dict(by_kind),
        by_tier=dict(by_tier),
        per_token=total / (cache.spec.capacity * cache.batch),
        capacity=cache.spec.capacity,
        batch=cache.batch,
    )
