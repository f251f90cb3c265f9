"""The state graph of prompts in a store, kept current by what the store reports."""

import threading

import numpy as np
from jax.typing import ArrayLike

from hybrid_attn.cache.events import (
    Append,
    Close,
    Evict,
    Fork,
    Node,
    Open,
    Quarantine,
    Rebuild,
)
from hybrid_attn.cache.groups import Group, StateGraph
from hybrid_attn.cache.layout import CacheLayout
from hybrid_attn.cache.meet import Family, meet
from hybrid_attn.store.chain import Boundary
from hybrid_attn.store.index import split_key
from hybrid_attn.store.rebuild import BlockKey, Rebuilder
from hybrid_attn.store.statistics import Event
from hybrid_attn.store.store import Store

_CACHE = "store"
_INDEX = "index."


class PrefixGraph:
    """Which blocks of held prompts may be read, and what must be made again first.

    Each held prompt is a row of a `StateGraph`; prompts with a common beginning share
    its blocks. The store's events change the graph: a quarantined, evicted or forgotten
    block blocks what stands on it; one that came back from a replica is the same again;
    one that was computed anew may differ in its low bits, so that the blocks computed
    over the former one are to be made again as well. Safe for threads.
    """

    def __init__(self, store: Store, layout: CacheLayout):
        """Subscribes to ``store``; ``layout`` is of the caches that it holds."""
        self.store, self.layout = store, layout
        self.graph = StateGraph(_graph_groups(layout))
        self._families: dict[str, Family] = {
            group.name: group.family for group in layout.groups
        }
        self._fingerprints = {group.name: group.fingerprint for group in layout.groups}
        self._guard = threading.RLock()
        self._rows: dict[int, tuple[Boundary, ...]] = {}
        self._next = 0
        # What the store lacks, and what it has again before what that stands on.
        self._gone: set[BlockKey] = set()
        self._back: dict[BlockKey, bool] = {}
        store.subscribe(self._on_event)

    def hold(self, tokens: ArrayLike) -> int:
        """Takes a prompt's full blocks, of int[t] tokens, into the graph.

        Returns:
          The number of its row, for the other methods.
        """
        size = self.layout.block_tokens
        chain = self.store.chain(self.layout.fingerprint, np.asarray(tokens), size)
        with self._guard:
            row, self._next = self._next, self._next + 1
            donor, shared = self._deepest(chain)
            if shared:
                self.graph.apply(Fork(_CACHE, donor, _CACHE, row, shared))
            else:
                self.graph.apply(Open(_CACHE, row, self.store.model_id))
            self._rows[row] = chain
            for block in range(shared, len(chain)):
                self.graph.apply(Append(_CACHE, row))
                self._compare(row, block)
            return row

    def release(self, row: int) -> None:
        """Gives a prompt up. Raises KeyError for a row that is not held."""
        with self._guard:
            del self._rows[row]
            self.graph.apply(Close(_CACHE, row))
            held = {boundary for chain in self._rows.values() for boundary in chain}
            self._gone = {key for key in self._gone if key.chain in held}
            self._back = {k: v for k, v in self._back.items() if k.chain in held}

    def readable(self, row: int) -> int:
        """Tokens up to the deepest boundary at which all that a row needs is current.

        Raises:
          KeyError: the row is not held.
        """
        with self._guard:
            if row not in self._rows:
                raise KeyError(row)
            stride = self.layout.block_tokens
            return meet(self.graph.available(_CACHE, row, stride), self._families)

    def missing(self, row: int) -> list[BlockKey]:
        """What keeps a row's last boundary from being read, in the order to make it.

        Raises:
          KeyError: the row is not held.
        """
        with self._guard:
            chain, found = self._rows[row], {}
            for group in self._families if chain else ():
                last = Node(_CACHE, row, group, len(chain) - 1)
                for need in self.graph.rebuild_order(last):
                    # Some only wait for one before them.
                    key = self._key(need)
                    if key in self._gone or not self._waits(need):
                        found[key] = None
            return list(found)

    def mend(self, row: int, rebuilder: Rebuilder) -> int:
        """Has everything that `missing` names rebuilt, each after what it stands on.

        Returns:
          How many blocks were made.

        Raises:
          KeyError: the row is not held.
          LookupError: a block could not be made; the message says why.
        """
        made = 0
        while missing := self.missing(row):
            result = rebuilder.submit(missing[0], replace=True).result()
            if not result.ok:
                raise LookupError(f"{missing[0]}: {result.error}")
            made += 1
        return made

    def refresh(self) -> None:
        """Compares every row with the store, for what other processes did to it."""
        with self._guard:
            self.store.refresh()
            for row, chain in self._rows.items():
                for block in range(len(chain)):
                    self._compare(row, block)

    def _deepest(self, chain: tuple[Boundary, ...]) -> tuple[int, int]:
        """(row, blocks) of the held prompt that shares most."""
        best = (0, 0)
        for row, held in self._rows.items():
            same = [a == b for a, b in zip(chain, held, strict=False)] + [False]
            best = max(best, (row, same.index(False)), key=lambda found: found[1])
        return best

    def _compare(self, row: int, block: int) -> None:
        for group in self._families:
            node = Node(_CACHE, row, group, block)
            key = self._key(node)
            there = self.store.contains(key.group, key.layout, key.chain)
            if not there and key not in self._gone:
                self._gone.add(key)
                self.graph.apply(Evict(node))
            elif there and key in self._gone:
                self._came_back(key, exact=False)

    def _key(self, node: Node) -> BlockKey:
        chain = self._rows[node.row][node.block]
        return BlockKey(node.group, self._fingerprints[node.group], chain)

    def _node(self, key: BlockKey) -> Node | None:
        """The block in one of the rows that have it: they share it."""
        if self._fingerprints.get(key.group) == key.layout:
            for row, held in self._rows.items():
                for boundary in held:
                    if boundary == key.chain:
                        return Node(_CACHE, row, key.group, boundary.index)
        return None

    def _may_be_read(self, node: Node) -> bool:
        """Whether a block that is there again has all that it stands on."""
        return self.graph.read(node) is not None or not self._waits(node)

    def _waits(self, node: Node) -> bool:
        """Whether a block is not readable for the sake of others alone."""
        return self.graph.rebuild_order(node) != [node]

    def _on_event(self, event: Event) -> None:
        lost = event.kind in ("quarantined", "evicted", "forgotten")
        if not lost and event.kind not in ("published", "rebuilt"):
            return
        key = BlockKey(*split_key(event.key)[1:])
        with self._guard:
            node = self._node(key)
            if node is None:
                return
            if lost:
                bad = event.kind == "quarantined"
                self.graph.apply(Quarantine(node) if bad else Evict(node))
                self._gone.add(key)
                self._back.pop(key, None)
            else:
                replica = event.detail not in ("", "from recompute")
                self._came_back(key, exact=replica)

    def _came_back(self, key: BlockKey, *, exact: bool) -> None:
        """Lets readers have a block again, as soon as they have what it stands on."""
        self._back[key] = exact
        progress = True
        while progress:
            progress = False
            for key in list(self._back):
                node = self._node(key)
                if node is None or (
                    self._waits(node) and self.graph.read(node) is None
                ):
                    continue
                self.graph.apply(Rebuild(node, self._back.pop(key)))
                self._gone.discard(key)
                progress = True


def _graph_groups(layout: CacheLayout) -> list[Group]:
    """The layout's groups; those of index keys with the entries that they stand for."""
    history = layout.family("history")
    entries = {
        array.layer: group.name
        for group in history
        if not group.name.startswith(_INDEX)
        for array in group.arrays
    }
    groups = [Group(name, "history") for name in dict.fromkeys(entries.values())]
    groups += [
        Group(group.name, "history", entries=entries.get(group.arrays[0].layer))
        for group in history
        if group.name.startswith(_INDEX)
    ]
    return groups + [Group(g.name, "recent") for g in layout.family("recent")]
