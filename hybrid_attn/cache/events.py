"""What can happen to blocks of state, and what it does to those that depend on them."""

import dataclasses
import enum
from typing import NamedTuple


class Node(NamedTuple):
    """One block of one group in one row of one cache."""

    cache: str
    row: int
    group: str
    block: int


class Edge(enum.Enum):
    """Why one block depends on another."""

    TOKENS = "the tokens up to its end"
    WEIGHTS = "the model that computed it"
    CHAIN = "the history below it"
    PAIR = "the entries that an index block stands for"
    COPY = "the version that it was quantised or re-aligned from"


class Effect(enum.Enum):
    """What became of a node in one event."""

    ADDED = "added"
    UPDATED = "a new version"
    DROPPED = "gone"
    STALE = "derived from an old version: derive again"
    REBUILD = "computed over other values: must be rebuilt"
    INVALID = "not to be trusted"
    BLOCKED = "sound, but what it depends on is not to be had"
    CURRENT = "to be read again"


class Change(NamedTuple):
    """One node that an event changed, and its version afterwards."""

    node: Node
    effect: Effect
    version: int


@dataclasses.dataclass(frozen=True)
class Open:
    """An empty row begins; ``model`` is the identity of the weights."""

    cache: str
    row: int
    model: str


@dataclasses.dataclass(frozen=True)
class Append:
    """The row closes its next block; ``recent``: its recent states are kept there."""

    cache: str
    row: int
    recent: bool = True


@dataclasses.dataclass(frozen=True)
class Fork:
    """A new row shares the first ``blocks`` blocks (None: all) of another."""

    cache: str
    row: int
    to_cache: str
    to_row: int
    blocks: int | None = None


@dataclasses.dataclass(frozen=True)
class Rewind:
    """The row keeps its first ``blocks`` blocks; rows that share them are untouched."""

    cache: str
    row: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class Close:
    """The row ends."""

    cache: str
    row: int


@dataclasses.dataclass(frozen=True)
class Evict:
    """The block's bytes are given up, in every row that shares them."""

    node: Node


@dataclasses.dataclass(frozen=True)
class Quantise:
    """The block is copied to group ``to``, a lower rung, or copied there anew."""

    node: Node
    to: str


@dataclasses.dataclass(frozen=True)
class Realign:
    """The block is copied to group ``to``, of another alignment, or copied anew."""

    node: Node
    to: str


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """The block's bytes proved wrong.

    ``resident``: they are the bytes that later blocks were computed from, not a second
    copy at rest, so that whatever was computed from them is in doubt too.
    """

    node: Node
    resident: bool = False


@dataclasses.dataclass(frozen=True)
class Rebuild:
    """The block was made again, from what it depends on as that stands now.

    ``exact``: bit for bit what it was, as a replica is. A block that was computed
    over values that have changed since gets new values in any case.
    """

    node: Node
    exact: bool = True


@dataclasses.dataclass(frozen=True)
class NewWeights:
    """The model has other weights under the same name."""

    model: str


Event = (
    Open
    | Append
    | Fork
    | Rewind
    | Close
    | Evict
    | Quantise
    | Realign
    | Quarantine
    | Rebuild
    | NewWeights
)

_OTHER_VALUES = {
    Edge.CHAIN: Effect.REBUILD,
    Edge.PAIR: Effect.REBUILD,
    Edge.COPY: Effect.STALE,
}
TABLE: dict[str, dict[Edge, Effect]] = {
    "rewind": dict.fromkeys(Edge, Effect.DROPPED),
    "evict": {Edge.CHAIN: Effect.BLOCKED, Edge.PAIR: Effect.DROPPED},
    "quantise": {},
    "realign": {},
    "quarantine": dict.fromkeys((Edge.CHAIN, Edge.PAIR, Edge.COPY), Effect.BLOCKED),
    "quarantine, resident": _OTHER_VALUES,
    "rebuild, same values": dict.fromkeys(Edge, Effect.CURRENT),
    "rebuild, other values": _OTHER_VALUES,
    "new weights": {Edge.WEIGHTS: Effect.INVALID},
}
"""By event: what happens to those that depend on its target, by the edge.

A missing edge is one along which nothing happens: a copy outlives its evicted source,
whose version it stands for. BLOCKED and CURRENT are no marks: they follow from what a
node depends on, however far away.
"""
