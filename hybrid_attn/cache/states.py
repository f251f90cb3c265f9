"""Cache states: frozen pytrees with a leading batch axis and static capacities.

Which rows of a state are valid follows from the cache's per-row counts, never from
the data. A state class says to which family it belongs (*history*: needs the whole
chain; *recent*: needs only a trailing span) and which of its fields grow with the
capacity, along which axis. Its other fields are rings [b, r, ...], slot = position
modulo r, with r the rows before a position that a step reads, and ``undo`` more: that
is what a boundary keeps of them.
"""

import dataclasses
import typing
from typing import Any, ClassVar, Literal

import jax
from jax import Array

from hybrid_attn.cache.spec import CacheSpec

_KINDS: dict[str, type["State"]] = {}


@dataclasses.dataclass(frozen=True)
class State:
    """Base of every state; subclasses are registered with `register_state`."""

    family: ClassVar[Literal["history", "recent"]]
    growing: ClassVar[dict[str, int]] = {}

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


@typing.dataclass_transform(frozen_default=True)
def register_state[S: type](cls: S) -> S:
    """Class decorator: makes a frozen `State` dataclass a pytree with a known kind.

    Raises:
      ValueError: the family is missing or the name is taken.
    """
    if getattr(cls, "family", None) not in ("history", "recent"):
        raise ValueError(f"{cls.__name__}.family: expected 'history' or 'recent'")
    if cls.__name__ in _KINDS:
        raise ValueError(f"a state named {cls.__name__} is already registered")
    cls = typing.cast(S, dataclasses.dataclass(frozen=True)(cls))
    fields = [field.name for field in dataclasses.fields(cls)]
    _KINDS[cls.__name__] = cls
    return jax.tree_util.register_dataclass(cls, data_fields=fields, meta_fields=[])


def check_state(state: Any) -> "State":
    """Returns the state, or raises `TypeError` for a kind nobody registered."""
    if _KINDS.get(type(state).__name__) is not type(state):
        raise TypeError(
            f"unknown state kind {type(state).__name__}; expected one of "
            f"{', '.join(sorted(_KINDS))}"
        )
    return state


@register_state
class CompressedKV(State):
    """Closed entries: key [b, e, k, h], value the same, or None where shared.

    An uncompressed (`dense`) history is the case ratio = 1.
    """

    family = "history"
    growing: ClassVar = {"key": 1, "value": 1}
    key: Array
    value: Array | None


@register_state
class UncompressedTail(State):
    """Raw rows that are still needed: content [b, r, c], score [b, r, c] or None.

    The frontier of a compressor (open group, overlap group, undo span), or the last
    inputs of a token shift (no score). Slot = position modulo r.
    """

    family = "recent"
    content: Array
    score: Array | None


@register_state
class SlidingWindow(State):
    """Exact keys/values of the last window - 1 + undo positions.

    key [b, r, k, h], value the same or None where shared; slot = position modulo r.
    """

    family = "recent"
    key: Array
    value: Array | None


@register_state
class IndexerState(State):
    """Index keys [b, c, e] and their own frontier: content, score [b, r, c'].

    Entries lie along the last axis: each of a query's heads then reads the keys as one
    contiguous product, 1.6 times faster on a CPU than entry by entry.
    """

    family = "history"
    growing: ClassVar = {"key": 2}
    key: Array
    content: Array
    score: Array


@register_state
class DiskPrefix(State):
    """What a store holds of each row; arrays only, the store itself stays outside.

    Attributes:
      chain: uint32[b, n, 4], the 128-bit digest of each block's boundary, first word
        first; zeros where a row has no such block.
      generation: int32[b, n, g], of each cache group's block, -1 where there is none.
      verified: int32[b], tokens from 0 on whose blocks passed verification.
      reads: int32[b, n], how often each block was read: predicts the next reads.
    """

    family = "history"
    chain: Array
    generation: Array
    verified: Array
    reads: Array


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The states of one layer by name; ``kind`` is the layer's mixer."""

    states: dict[str, State]
    kind: str

    def __getitem__(self, name: str) -> Any:
        return self.states[name]


jax.tree_util.register_dataclass(
    LayerCache, data_fields=["states"], meta_fields=["kind"]
)


@dataclasses.dataclass(frozen=True)
class Cache:
    """An immutable cache of all layers.

    Attributes:
      layers: one `LayerCache` a layer.
      length: int32[b], tokens held by each row.
      floor: int32[b], the lowest length that `rewind` can reach.
      sealed: int32[b], entries below this position are never written again.
      cut: int32[b], the boundary of each row's ``cuts``; 0 is the empty start.
      on_grid: int32[b], so many tokens from 0 on were read by `prefill`, whose bits do
        not depend on how they were cut; what stands above agrees within tolerance.
      faults: uint8[b], bits of `Fault`, set inside jit until cleared.
      cuts: by layer, what `hybrid_attn.cache.cuts` keeps of the recent states.
      spec: the static `CacheSpec`.
    """

    layers: tuple[LayerCache, ...]
    length: Array
    floor: Array
    sealed: Array
    faults: Array
    cut: Array
    on_grid: Array
    cuts: tuple[dict[str, Array], ...]
    spec: CacheSpec

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    def replace(self, **changes) -> "Cache":
        return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(
    Cache,
    data_fields=[
        "layers",
        "length",
        "floor",
        "sealed",
        "faults",
        "cut",
        "on_grid",
        "cuts",
    ],
    meta_fields=["spec"],
)


class Fault:
    """Bits of `Cache.faults`: why a row was left untouched inside jit."""

    CAPACITY = 1
    TOKEN = 2
    LENGTHS = 4
    REWIND = 8

    @classmethod
    def names(cls, bits: int) -> list[str]:
        known = {
            "position beyond the capacity": cls.CAPACITY,
            "token outside the vocabulary": cls.TOKEN,
            "lengths outside 0..t": cls.LENGTHS,
            "rewind target out of range": cls.REWIND,
        }
        return [name for name, bit in known.items() if bits & bit]
