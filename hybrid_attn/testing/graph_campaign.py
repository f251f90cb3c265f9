"""Random events on a state graph, against a model that holds the values themselves.

The model knows neither versions nor marks, and carries nothing from one block to the
next: each cell keeps its own value and the value of everything that went into it, and
a reader's view is derived from nothing else, every time anew.
"""

import dataclasses
import random
import time
from collections.abc import Sequence

from hybrid_attn.cache.events import (
    Append,
    Close,
    Event,
    Evict,
    Fork,
    NewWeights,
    Node,
    Open,
    Quantise,
    Quarantine,
    Realign,
    Rebuild,
    Rewind,
)
from hybrid_attn.cache.groups import TOKENS, Group, StateGraph

GROUPS = (
    Group("hca", "history"),
    Group("csa", "history"),
    Group("csa.index", "history", entries="csa"),
    Group("csa.int8", "history", source="csa"),
    Group("csa.int8.256", "history", source="csa.int8"),
    Group("window", "recent"),
    Group("frontier", "recent"),
)
"""Two histories, one with index keys and two rungs, and two recent groups."""

_ROWS = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
_MODELS = ("first", "second")
_BLOCKS = 6
_FULL_CHECK = 250
_GARBAGE = -1


@dataclasses.dataclass(eq=False)
class _Cell:
    """Bytes that rows may share: their value, and the values that went into it.

    ``wrong``: the bytes themselves are not what was computed. ``tainted``: what was
    computed may have come from wrong bytes. ``seen``: by (group, block) of the same
    row; ("weights", 0) is the model.
    """

    value: int
    seen: dict[tuple[str, int], int]
    present: bool = True
    wrong: bool = False
    tainted: bool = False


class Model:
    """The values of every row, and what may be read of them."""

    def __init__(self, groups: Sequence[Group] = GROUPS):
        self.groups = {group.name: group for group in groups}
        self.own = [group for group in groups if group.source is None]
        self.rows: dict[tuple[str, int], dict[tuple[str, int], _Cell]] = {}
        self.model: dict[tuple[str, int], str] = {}
        self.weights: dict[str, int] = {}
        self.count = 0

    def value(self) -> int:
        self.count += 1
        return self.count

    def inputs(self, group: str, block: int) -> list[tuple[str, int]]:
        """All that goes into a block, however far below."""
        if group == TOKENS:
            return [(TOKENS, b) for b in range(block)]
        found: list[tuple[str, int]] = [("weights", 0)]
        found += [(TOKENS, b) for b in range(block + 1)]
        known = self.groups[group]
        if known.source is not None:
            root = known
            while root.source is not None:
                found.append((root.source, block))
                root = self.groups[root.source]
            found += [x for x in self.inputs(root.name, block) if x not in found]
        elif known.family == "recent":
            histories = [g.name for g in self.own if g.family == "history"]
            found += [(name, b) for name in histories for b in range(block + 1)]
        else:
            found += [(group, b) for b in range(block)]
            if known.entries is not None:
                found += [(known.entries, b) for b in range(block + 1)]
        return found

    def now(self, row: tuple[str, int], at: tuple[str, int]) -> int:
        """The value that stands at a place of a row."""
        if at[0] == "weights":
            return self.weights[self.model[row]]
        return self.rows[row][at].value

    def sound(self, row, at, memo: dict) -> bool:
        """Whether a place and all that went into it are as they should be."""
        if at[0] == "weights":
            return True
        if at not in memo:
            cell = self.rows[row][at]
            memo[at] = not (cell.wrong or cell.tainted) and all(
                self.now(row, x) == value and self.sound(row, x, memo)
                for x, value in cell.seen.items()
            )
        return memo[at]

    def readable(self, row, at, memo: dict | None = None) -> bool:
        """Whether a reader may have a place: sound, and its inputs to be had."""
        memo = {} if memo is None else memo
        cell = self.rows[row][at]
        if not cell.present or not self.sound(row, at, memo):
            return False
        # What a copy was made from need not be present; the chain below it must.
        above = [(name, at[1]) for name in self._sources(at[0])]
        return all(
            self.had(row, x, memo)
            for x in self.inputs(*at)
            if x[0] != "weights" and x not in above
        )

    def had(self, row, at, memo: dict) -> bool:
        """Whether the values of a place can be had, from it or from a copy.

        Only its own bytes count here: what goes into it is asked for by itself.
        """
        names = [at[0], *(g for g in self.groups if at[0] in self._sources(g))]
        return any(
            (name, at[1]) in self.rows[row]
            and self.rows[row][name, at[1]].present
            and self.sound(row, (name, at[1]), memo)
            for name in names
        )

    def _sources(self, group: str) -> list[str]:
        found = []
        known = self.groups.get(group)
        while known is not None and known.source is not None:
            found.append(known.source)
            known = self.groups[known.source]
        return found

    def make(self, row, at) -> _Cell:
        """A block computed now from what stands below it."""
        seen = {x: self.now(row, x) for x in self.inputs(*at)}
        memo: dict = {}
        tainted = any(not self.sound(row, x, memo) for x in seen)
        return _Cell(self.value(), seen, tainted=tainted)

    def length(self, row) -> int:
        return 1 + max((block for _, block in self.rows[row]), default=-1)

    def apply(self, event: Event) -> None:
        """The event, done to the values."""
        match event:
            case Open(cache, row, model):
                self.rows[cache, row], self.model[cache, row] = {}, model
                self.weights.setdefault(model, self.value())
            case Append(cache, number, recent):
                row = (cache, number)
                block = self.length(row)
                self.rows[row][TOKENS, block] = self.make(row, (TOKENS, block))
                for group in self.own:
                    if recent or group.family == "history":
                        at = (group.name, block)
                        self.rows[row][at] = self.make(row, at)
            case Fork(cache, number, to_cache, to_row, blocks):
                held = self.rows[cache, number]
                count = self.length((cache, number)) if blocks is None else blocks
                self.rows[to_cache, to_row] = {
                    at: cell for at, cell in held.items() if at[1] < count
                }
                self.model[to_cache, to_row] = self.model[cache, number]
            case Rewind(cache, number, blocks):
                held = self.rows[cache, number]
                for at in [at for at in held if at[1] >= blocks]:
                    del held[at]
            case Close(cache, number):
                del self.rows[cache, number], self.model[cache, number]
            case Evict(node):
                row, at = _split(node)
                self.rows[row][at].present = False
                for group in self.groups.values():
                    if group.entries == at[0]:
                        self.rows[row][group.name, at[1]].present = False
            case Quantise(node, to) | Realign(node, to):
                self._copy(node, to)
            case Quarantine(node, resident):
                row, at = _split(node)
                self.rows[row][at].wrong = True
                if resident:
                    self._taint(self.rows[row][at])
            case Rebuild(node, exact):
                row, at = _split(node)
                self._again(self.rows[row][at], row, at, exact)
            case NewWeights(model):
                self.weights[model] = self.value()

    def _copy(self, node: Node, to: str) -> None:
        row, at = _split(node)
        source, target = self.rows[row][at], (to, at[1])
        if target in self.rows[row]:
            self._again(self.rows[row][target], row, target, True)
            return
        copy = self.make(row, target)
        for held in self.rows.values():
            if held.get(at) is source:
                held[target] = copy

    def _again(self, cell: _Cell, row, at, exact: bool) -> None:
        new = self.make(row, at)
        if exact and not cell.tainted and new.seen == cell.seen:
            new.value = cell.value
        cell.value, cell.seen = new.value, new.seen
        cell.present, cell.wrong, cell.tainted = True, False, new.tainted

    def _taint(self, cell: _Cell) -> None:
        """Whatever read the cell, in any row that holds it, may be wrong."""
        for held in self.rows.values():
            sources = [at for at, other in held.items() if other is cell]
            for other in held.values():
                if any(at in other.seen for at in sources):
                    other.tainted = True


def _split(node: Node) -> tuple[tuple[str, int], tuple[str, int]]:
    return (node.cache, node.row), (node.group, node.block)


def random_event(chance: random.Random, graph: StateGraph, model: Model) -> Event:
    """An event that may happen now, or one on a node that must not be touched."""
    opened, closed = list(model.rows), [r for r in _ROWS if r not in model.rows]
    kind = chance.choices(range(8), (2, 18, 6, 5, 1, 30, 26, 1))[0]
    if not opened or (kind == 0 and closed):
        return Open(*chance.choice(closed), chance.choice(_MODELS))
    row = chance.choice(opened)
    length = model.length(row)
    if kind == 2 and closed:
        blocks = chance.choice([None, chance.randint(0, length)])
        return Fork(*row, *chance.choice(closed), blocks)
    if kind == 3:
        return Rewind(*row, chance.randint(0, length))
    if kind == 4:
        return Close(*row)
    if kind == 7:
        return NewWeights(model.model[row])
    cells = [at for at in model.rows[row] if at[0] != TOKENS]
    if not cells or (kind <= 1 and length < _BLOCKS):
        if length < _BLOCKS:
            return Append(*row, chance.random() < 0.7)
        return Rewind(*row, 0)
    node = Node(*row, *chance.choice(cells))
    if kind == 6:
        # What a repairer does: the first thing in the way of some node.
        order = graph.rebuild_order(node)
        return Rebuild(order[0] if order else node, chance.random() < 0.7)
    copies = [g.name for g in model.groups.values() if g.source == node.group]
    if copies and chance.random() < 0.7:
        return chance.choice((Quantise, Realign))(node, copies[0])
    if chance.random() < 0.6:
        return Evict(node)
    return Quarantine(node, chance.random() < 0.3)


def random_campaign(events: int, seed: int = 0) -> dict[str, float | int]:
    """Applies random events and asks readers after each what they would get.

    Args:
      events: how many.
      seed: of the events and of the nodes that are read.

    Returns:
      events: applied, those that were refused left out of the time.
      graph_violations: reads that gave a node over a stale, wrong or missing one.
      graph_withheld: reads that refused a node that could have been given.
      graph_unreported: nodes whose readability changed without being reported.
      graph_reads, graph_reads_given, graph_refused: how many of each.
      graph_changes: nodes reported as changed.
      graph_us_per_event: microseconds of `StateGraph.apply`, in the mean.
    """
    chance = random.Random(seed)
    graph, model = StateGraph(GROUPS), Model()
    result = dict.fromkeys(
        (
            "graph_violations",
            "graph_withheld",
            "graph_unreported",
            "graph_reads",
            "graph_reads_given",
            "graph_refused",
            "graph_changes",
        ),
        0,
    )
    spent, applied = 0.0, 0
    known: dict[Node, bool] = {}

    def ask(nodes: Sequence[Node], memos: dict) -> None:
        for node in nodes:
            row, at = _split(node)
            given = graph.read(node) is not None
            allowed = model.readable(row, at, memos.setdefault(row, {}))
            result["graph_reads"] += 1
            result["graph_reads_given"] += given
            result["graph_violations"] += given and not allowed
            result["graph_withheld"] += allowed and not given

    while applied < events:
        event = random_event(chance, graph, model)
        begin = time.perf_counter()
        try:
            changes = graph.apply(event)
        except ValueError:
            result["graph_refused"] += 1
            continue
        spent += time.perf_counter() - begin
        applied += 1
        model.apply(event)
        result["graph_changes"] += len(changes)
        changed = {change.node for change in changes}
        nodes = list(graph.nodes())
        now = {node: graph.read(node) is not None for node in nodes}
        result["graph_unreported"] += sum(
            known.get(node, False) != current and node not in changed
            for node, current in now.items()
        )
        known = now
        if applied % _FULL_CHECK:
            nodes = chance.sample(nodes, min(8, len(nodes)))
        ask(nodes, {})
    return {
        "events": applied,
        **result,
        "graph_us_per_event": 1e6 * spent / max(applied, 1),
    }
