"""Cache groups, how their blocks depend on each other, and which may be read.

The graph belongs to a store or an engine and holds ids, counts and versions only;
caches stay pure. Block numbers count blocks of block_tokens tokens.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from hybrid_attn.cache.events import (
    TABLE,
    Append,
    Change,
    Close,
    Edge,
    Effect,
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
from hybrid_attn.cache.graph_blocks import Block, Group, judge, serves, users_of
from hybrid_attn.cache.meet import Availability, meet

__all__ = ["TOKENS", "Availability", "Group", "Node", "StateGraph", "meet"]

TOKENS = "tokens"
"""The group of the token ids themselves, which every row has."""
_WEIGHTS = "weights"
# A mark never hides a graver one.
_GRAVITY = (None, Effect.STALE, Effect.REBUILD, Effect.INVALID)


@dataclasses.dataclass
class _Row:
    model: str
    blocks: list[dict[str, Block]]


class StateGraph:
    """Versions and dependencies of blocks; gives readers current ones only.

    A node is *trusted* if it bears no mark and all that it depends on is trusted and
    still has the values that it was computed from. It may be *read* if it is trusted,
    present, and all that it depends on is available: readable itself or through a copy
    that is (what a copy was made from need not be present any more).
    """

    def __init__(self, groups: Sequence[Group]):
        """Raises ValueError for groups that are not unique or name unknown ones."""
        self.groups = {group.name: group for group in groups}
        if len(self.groups) < len(groups) or self.groups.keys() & {TOKENS, _WEIGHTS}:
            names = [group.name for group in groups]
            raise ValueError(
                f"groups {names}: expected unique names, not {TOKENS!r} or {_WEIGHTS!r}"
            )
        seen = set()
        for group in groups:
            for name in (group.entries, group.source):
                if name is not None and name not in seen:
                    raise ValueError(
                        f"group {group.name} names {name!r}: expected one before it, "
                        f"of {sorted(seen)}"
                    )
            seen.add(group.name)
        own = [group for group in groups if group.source is None]
        self._history = [group for group in own if group.family == "history"]
        self._recent = [group for group in own if group.family == "recent"]
        self._rows: dict[tuple[str, int], _Row] = {}
        self._weights: dict[str, Block] = {}
        self._contents = 0
        self._changes: list[Change] = []
        # Blocks whose readers' view must be judged anew, and those already reported.
        self._touched: dict[Block, None] = {}
        self._told: set[Block] = set()
        self._handlers: dict[type, Callable] = {
            Open: self._open,
            Append: self._append,
            Fork: self._fork,
            Rewind: self._rewind,
            Close: self._close,
            Evict: self._evict,
            Quantise: self._copy,
            Realign: self._copy,
            Quarantine: self._quarantine,
            Rebuild: self._rebuild,
            NewWeights: self._new_weights,
        }

    # -- readers -------------------------------------------------------------------

    def read(self, node: Node) -> int | None:
        """The node's version if it and all that it depends on are current, or None."""
        block = self._find(node)
        return block.version if block is not None and block.readable else None

    def available(self, cache: str, row: int, stride: int) -> dict[str, Availability]:
        """What `meet` asks, by group without copies; ``stride`` is block_tokens."""
        blocks = self._row(cache, row).blocks
        return {
            group.name: Availability(
                stride,
                frozenset(
                    number
                    for number, held in enumerate(blocks)
                    if group.name in held and held[group.name].available
                ),
            )
            for group in (*self._history, *self._recent)
        }

    def nodes(self) -> Iterable[Node]:
        """Every node of every row, tokens included."""
        for (cache, row), held in self._rows.items():
            for number, blocks in enumerate(held.blocks):
                for group in blocks:
                    yield Node(cache, row, group, number)

    def references(self, node: Node) -> int:
        """How many rows share the node; 0 if it is unknown."""
        block = self._find(node)
        return 0 if block is None else len(block.places)

    def rebuild_order(self, node: Node) -> list[Node]:
        """What keeps the node from readers, deepest first; empty if nothing does.

        Rebuild each that still cannot be read when its turn comes: some only wait for
        one before them.

        Raises:
          ValueError: the node is unknown.
        """
        order: dict[Block, None] = {}
        todo = [(self._known(node), False)]
        while todo:
            block, ready = todo.pop()
            if ready:
                order[block] = None
            elif block not in order and not block.readable:
                todo.append((block, True))
                todo += [
                    (need, False)
                    for need, edge, _ in block.needs
                    if not serves(need, edge)
                ]
        where = (node.cache, node.row)
        return [next(p for p in block.places if p[:2] == where) for block in order]

    # -- events --------------------------------------------------------------------

    def apply(self, event: Event) -> tuple[Change, ...]:
        """Applies an event to its target and to all that depends on it.

        Returns:
          Every node whose version or validity changed, once for each row that shares
          it; a node that is dropped is named before it is gone.

        Raises:
          TypeError: no event of the table.
          ValueError: a row or node that is unknown or must not be (naming it), or a
            rebuild or copy of what is not current. Nothing has changed then.
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"unknown event {type(event).__name__}")
        self._changes, self._touched, self._told = [], {}, set()
        handler(event)
        self._settle()
        return tuple(self._changes)

    def _open(self, event: Open) -> None:
        self._free(event.cache, event.row)
        self._rows[event.cache, event.row] = _Row(event.model, [])
        if event.model not in self._weights:
            self._weights[event.model] = self._new(_WEIGHTS)

    def _append(self, event: Append) -> None:
        row = self._row(event.cache, event.row)
        below = row.blocks[-1] if row.blocks else {}
        weights = self._weights[row.model]
        tokens = self._new(TOKENS, [(below.get(TOKENS), Edge.CHAIN)])
        held = {TOKENS: tokens}
        common = [(tokens, Edge.TOKENS), (weights, Edge.WEIGHTS)]
        for group in self._history:
            needs = [*common, (below.get(group.name), Edge.CHAIN)]
            if group.entries is not None:
                needs.append((held[group.entries], Edge.PAIR))
            held[group.name] = self._new(group.name, needs)
        chain = [(held[group.name], Edge.CHAIN) for group in self._history]
        for group in self._recent if event.recent else ():
            held[group.name] = self._new(group.name, [*common, *chain])
        number = len(row.blocks)
        row.blocks.append({})
        for name, block in held.items():
            self._place(block, Node(event.cache, event.row, name, number))
            self._tell(block, block.mark or Effect.ADDED)

    def _fork(self, event: Fork) -> None:
        donor = self._row(event.cache, event.row)
        self._free(event.to_cache, event.to_row)
        count = len(donor.blocks) if event.blocks is None else event.blocks
        _check_blocks(donor, count, event)
        row = _Row(donor.model, [{} for _ in range(count)])
        self._rows[event.to_cache, event.to_row] = row
        for number in range(count):
            for name, block in donor.blocks[number].items():
                node = Node(event.to_cache, event.to_row, name, number)
                self._place(block, node)
                self._changes.append(Change(node, Effect.ADDED, block.version))

    def _rewind(self, event: Rewind) -> None:
        row = self._row(event.cache, event.row)
        _check_blocks(row, event.blocks, event)
        dead: list[Block] = []
        for number in range(event.blocks, len(row.blocks)):
            for name, block in row.blocks[number].items():
                node = Node(event.cache, event.row, name, number)
                self._changes.append(Change(node, Effect.DROPPED, block.version))
                block.places.remove(node)
                if not block.places:
                    dead.append(block)
        del row.blocks[event.blocks :]
        for block in dead:
            for need, _, _ in block.needs:
                need.users.discard(block)
            if block.source is not None:
                del block.source.copies[block.group]
                self._touched[block.source] = None
        # A row holds all that its blocks depend on, so nothing living needs the dead.
        for block in dead:
            self._touched.pop(block, None)

    def _close(self, event: Close) -> None:
        self._rewind(Rewind(event.cache, event.row, 0))
        del self._rows[event.cache, event.row]

    def _evict(self, event: Evict) -> None:
        block = self._known(event.node)
        if block.group == TOKENS:
            raise ValueError(f"{event.node} holds tokens, which identify the rest")
        self._drop(block)
        for user, edge in users_of(block):
            if TABLE["evict"].get(edge) is Effect.DROPPED:
                self._drop(user)

    def _copy(self, event: Quantise | Realign) -> None:
        source = self._known(event.node)
        group = self.groups.get(event.to)
        if group is None or group.source != source.group:
            raise ValueError(f"{event.to!r} is no group copied from {source.group}")
        if not source.readable:
            raise ValueError(f"{event.node} is not current: nothing to copy")
        copy = source.copies.get(event.to)
        if copy is not None:
            self._rebuild(Rebuild(event.node._replace(group=event.to)))
            return
        # Its reader needs the same chain as the source's reader.
        needs = [(need, edge) for need, edge, _ in source.needs if edge != Edge.COPY]
        copy = self._new(event.to, [*needs, (source, Edge.COPY)])
        copy.source, source.copies[event.to] = source, copy
        for place in source.places:
            self._place(copy, place._replace(group=event.to))
        self._tell(copy, Effect.ADDED)

    def _quarantine(self, event: Quarantine) -> None:
        block = self._known(event.node)
        if block.group == TOKENS:
            raise ValueError(f"{event.node} holds tokens, which no block can give back")
        self._mark(block, Effect.INVALID)
        if event.resident:
            self._mark_users(block, "quarantine, resident", deep=True)

    def _rebuild(self, event: Rebuild) -> None:
        block = self._known(event.node)
        for need, edge, _ in block.needs:
            if not serves(need, edge):
                raise ValueError(
                    f"{event.node} cannot be rebuilt yet: {edge.value} "
                    f"({need.group}) is not current"
                )
        moved = any(need.content != seen for need, _, seen in block.needs)
        same = event.exact and not block.recompute and not moved
        block.needs = [(need, edge, need.content) for need, edge, _ in block.needs]
        block.mark, block.present, block.recompute = None, True, False
        block.version += 1
        self._tell(block, Effect.UPDATED)
        if not same:
            block.content = self._content()
            self._mark_users(block, "rebuild, other values")

    def _new_weights(self, event: NewWeights) -> None:
        weights = self._weights.get(event.model)
        if weights is None:
            raise ValueError(f"model {event.model!r}: no row was opened with it")
        weights.version += 1
        weights.content = self._content()
        self._mark_users(weights, "new weights")

    # -- parts of events -----------------------------------------------------------

    def _content(self) -> int:
        self._contents += 1
        return self._contents

    def _new(
        self, group: str, needs: Iterable[tuple[Block | None, Edge]] = ()
    ) -> Block:
        block = Block(group, self._content())
        block.needs = [(need, edge, need.content) for need, edge in needs if need]
        for need, _, _ in block.needs:
            need.users.add(block)
            if not need.trusted:
                block.mark, block.recompute = Effect.REBUILD, True
        # At once, since blocks of the same event stand on it.
        judge(block)
        return block

    def _place(self, block: Block, node: Node) -> None:
        block.places.add(node)
        self._rows[node.cache, node.row].blocks[node.block][node.group] = block

    def _drop(self, block: Block) -> None:
        if block.present:
            block.present = False
            self._tell(block, Effect.DROPPED)

    def _mark(self, block: Block, mark: Effect) -> None:
        if _GRAVITY.index(mark) > _GRAVITY.index(block.mark):
            block.mark = mark
            self._tell(block, mark)

    def _mark_users(self, block: Block, event: str, deep: bool = False) -> None:
        todo, seen = [block], {block}
        while todo:
            for user, edge in users_of(todo.pop()):
                mark = TABLE[event].get(edge)
                if mark in _GRAVITY and mark is not None:
                    user.recompute = True
                    self._mark(user, mark)
                    if deep and user not in seen:
                        seen.add(user)
                        todo.append(user)

    def _tell(self, block: Block, effect: Effect) -> None:
        self._told.add(block)
        self._touched[block] = None
        self._changes += [Change(p, effect, block.version) for p in block.places]

    def _settle(self) -> None:
        """Carries readability on to all that depend on what was touched."""
        before: dict[Block, bool] = {}
        while self._touched:
            block = next(iter(self._touched))
            del self._touched[block]
            before.setdefault(block, block.readable)
            if judge(block):
                self._touched.update(dict.fromkeys(block.users))
                if block.source is not None:
                    self._touched[block.source] = None
        for block, readable in before.items():
            if block.readable != readable and block not in self._told:
                effect = Effect.CURRENT if block.readable else Effect.BLOCKED
                self._tell(block, effect)

    def _row(self, cache: str, row: int) -> _Row:
        if (cache, row) not in self._rows:
            raise ValueError(f"cache {cache!r} has no open row {row}")
        return self._rows[cache, row]

    def _free(self, cache: str, row: int) -> None:
        if (cache, row) in self._rows:
            raise ValueError(f"row {row} of cache {cache!r} is open: close it first")

    def _find(self, node: Node) -> Block | None:
        row = self._rows.get((node.cache, node.row))
        if row is None or not 0 <= node.block < len(row.blocks):
            return None
        return row.blocks[node.block].get(node.group)

    def _known(self, node: Node) -> Block:
        block = self._find(node)
        if block is None:
            raise ValueError(f"{node} is unknown")
        return block


def _check_blocks(row: _Row, count: int, event: Event) -> None:
    if not 0 <= count <= len(row.blocks):
        raise ValueError(f"{event}: the row has {len(row.blocks)} blocks")
