"""Parts of the state graph: a group, and what a block of it holds, needs, offers."""

import dataclasses

from hybrid_attn.cache.events import Edge, Effect, Node
from hybrid_attn.cache.meet import Family


@dataclasses.dataclass(frozen=True)
class Group:
    """A cache group as the graph sees it.

    Attributes:
      name: unique.
      family: history blocks need the chain below them; the block of a recent group
        is the state at the block's end.
      entries: of index keys, the group of the entries that they stand for.
      source: of a lower rung or another alignment, the group that it is copied from.
    """

    name: str
    family: Family
    entries: str | None = None
    source: str | None = None


class Block:
    """One version chain, shared by every row that holds it.

    ``content`` changes when the values do, ``version`` whenever the bytes are written.
    ``needs`` holds (block, edge, content that was seen).
    """

    __slots__ = (
        "available",
        "content",
        "copies",
        "group",
        "mark",
        "needs",
        "places",
        "present",
        "readable",
        "recompute",
        "source",
        "trusted",
        "users",
        "version",
    )

    def __init__(self, group: str, content: int):
        self.group, self.content, self.version = group, content, 1
        self.mark: Effect | None = None
        self.present = True
        # What it was computed over has changed: a replica would be wrong as well.
        self.recompute = False
        self.needs: list[tuple[Block, Edge, int]] = []
        self.users: set[Block] = set()
        self.copies: dict[str, Block] = {}
        self.source: Block | None = None
        self.places: set[Node] = set()
        self.trusted = self.readable = self.available = False


def users_of(block: Block) -> list[tuple[Block, Edge]]:
    """What depends on a block, and along which edge."""
    return [
        (user, edge)
        for user in block.users
        for need, edge, _ in user.needs
        if need is block
    ]


def serves(need: Block, edge: Edge) -> bool:
    """Whether something can be made from the block now."""
    return need.readable if edge is Edge.COPY else need.available


def judge(block: Block) -> bool:
    """Sets what follows from a block's own state and its needs'; True if it changed."""
    old = block.trusted, block.readable, block.available
    block.trusted = block.mark is None and all(
        need.trusted and need.content == seen for need, _, seen in block.needs
    )
    block.readable = (
        block.trusted
        and block.present
        and all(need.available or edge is Edge.COPY for need, edge, _ in block.needs)
    )
    block.available = block.readable or any(
        copy.available for copy in block.copies.values()
    )
    return old != (block.trusted, block.readable, block.available)
