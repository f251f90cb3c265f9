"""Which boundary of a prompt a store can restore: the meet over all cache groups."""

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

import numpy as np

from hybrid_attn.cache.layout import CacheLayout, Group
from hybrid_attn.cache.meet import Availability, meet
from hybrid_attn.cache.states import Cache

if TYPE_CHECKING:
    from hybrid_attn.store.store import Store

Recent = Literal["auto", "stored", "replay"]
RECENT = ("auto", "stored", "replay")


@dataclasses.dataclass(frozen=True)
class Hit:
    """What is restored of one row.

    Attributes:
      boundary: tokens below which entries are restored, 0 for a miss.
      length: where the row goes on; below the boundary where recent states are
        replayed.
      payloads: verified bytes by (group name, block index).
      on_grid: tokens from 0 on whose blocks were made by `prefill`.
    """

    boundary: int
    length: int
    payloads: dict[tuple[str, int], np.ndarray]
    on_grid: int


def replay_span(cache: Cache) -> int:
    """Tokens before a boundary that a replay must read for its states to be exact.

    A state at position p depends on the layer below back to p - reach, and so on down:
    the reaches of all layers add up. Entries are restored and end no chain.
    """
    return sum(
        max((rows.shape[1] for rows in cut.values()), default=0) for cut in cache.cuts
    )


class Reader:
    """Verified payloads of one store, fetched once, ahead of need if asked to."""

    def __init__(self, store: "Store", workers: int = 0):
        self.store = store
        self._pool = ThreadPoolExecutor(workers) if workers else None
        self._jobs: dict[tuple[str, str, str], Future] = {}

    def ahead(self, group: Group, digest: str) -> None:
        """Begins to fetch a block."""
        key = (group.name, group.fingerprint, digest)
        if self._pool is not None and key not in self._jobs:
            self._jobs[key] = self._pool.submit(self.store.fetch, *key[:2], digest)

    def get(self, group: Group, digest: str):
        """The block's payload, or None."""
        job = self._jobs.pop((group.name, group.fingerprint, digest), None)
        if job is not None:
            return job.result()
        return self.store.fetch(group.name, group.fingerprint, digest)

    def close(self) -> None:
        """Gives up what was not begun; reading goes on, without threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None
        self._jobs.clear()


def candidates(store: "Store", layout: CacheLayout, chain) -> dict[str, set[int]]:
    """By group, the blocks of a chain that the index names."""
    return {
        group.name: {
            i
            for i, digest in enumerate(chain)
            if store.contains(group.name, group.fingerprint, digest)
        }
        for group in layout.groups
    }


def deepest(layout: CacheLayout, available: dict[str, set[int]], replay: bool) -> int:
    """The deepest boundary all groups share; the history groups alone for a replay."""
    groups = layout.family("history") if replay else layout.groups
    if not groups:
        return 0
    return meet(
        {
            g.name: Availability(layout.block_tokens, frozenset(available[g.name]))
            for g in groups
        },
        {g.name: g.family for g in groups},
    )


def choose(
    layout: CacheLayout, available: dict[str, set[int]], recent: Recent, span: int
) -> tuple[int, bool, list[tuple[Group, int]]]:
    """What a restore would read of the blocks that are there.

    Returns:
      (boundary in tokens, whether recent states are replayed up to it, the (group,
      block) pairs to read).
    """
    boundary = 0 if recent == "replay" else deepest(layout, available, False)
    replay = recent == "replay" or (recent == "auto" and not boundary)
    if replay:
        boundary = deepest(layout, available, True)
        # Where all of it would be read again, nothing is gained: a miss.
        boundary = boundary if boundary > span else 0
    count = boundary // layout.block_tokens
    needed = [(group, i) for group in layout.family("history") for i in range(count)]
    if count and not replay:
        needed += [(group, count - 1) for group in layout.family("recent")]
    return boundary, replay, needed


def find(
    reader: Reader,
    layout: CacheLayout,
    tokens: np.ndarray,
    *,
    recent: Recent,
    span: int,
) -> Hit:
    """The deepest boundary of one row whose every block passes verification.

    Blocks that turn out to be unsound are taken out and the meet is formed anew: a
    damaged block makes the hit shorter, and never wrong.
    """
    store, size = reader.store, layout.block_tokens
    chain = store.chain(layout.fingerprint, tokens, size)
    available = candidates(store, layout, chain)
    payloads: dict[tuple[str, int], np.ndarray] = {}
    origins: dict[tuple[str, int], str] = {}
    while True:
        boundary, replay, needed = choose(layout, available, recent, span)
        lost = False
        for group, i in needed:
            if (group.name, i) not in payloads:
                reader.ahead(group, chain[i])
        for group, i in needed:
            if (group.name, i) in payloads:
                continue
            payload = reader.get(group, chain[i])
            if payload is None or payload.data.size != group.nbytes:
                available[group.name].discard(i)
                lost = True
                break
            payloads[group.name, i] = payload.data
            origins[group.name, i] = payload.header.origin
        if not lost:
            break
    on_grid = 0
    for i in range(boundary // size):
        made = {origin for (_, block), origin in origins.items() if block == i}
        if made != {"prefill"}:
            break
        on_grid = (i + 1) * size
    keys = {(group.name, i) for group, i in needed}
    # What is replayed agrees within tolerance, and so does what follows from it.
    length = boundary
    if replay and boundary:
        length, on_grid = boundary - span, 0
    held = {key: data for key, data in payloads.items() if key in keys}
    return Hit(boundary, length, held, on_grid)
