"""What leaves a store: eviction to a budget, and forgetting on request."""

import contextlib
import dataclasses
import heapq
import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

from hybrid_attn.store.blocks import crc32c, object_name, parse_name
from hybrid_attn.store.catalog import (
    UNKNOWN_PARENT,
    Catalog,
    Changes,
    parse_quarantine,
)
from hybrid_attn.store.errors import BlockError, StoreError
from hybrid_attn.store.index import Entry, split_key

USAGE = "usage"
_CRC = struct.Struct("<I")


@dataclasses.dataclass(frozen=True)
class GcReport:
    """What `Store.gc` did; sizes are bytes of block objects.

    Attributes:
      evicted, evicted_bytes: blocks taken out for the budget.
      orphans: objects removed that no key named.
      quarantined: objects removed that had failed.
      bytes_before, bytes_after: what the index named; the latter can exceed the
        budget by pinned blocks.
      index_bytes: of the compacted index.
    """

    evicted: int
    evicted_bytes: int
    orphans: int
    quarantined: int
    bytes_before: int
    bytes_after: int
    index_bytes: int


def plan(
    entries: Mapping[str, Entry],
    used: Mapping[str, float],
    pinned: Set[str],
    budget: int,
) -> list[str]:
    """Keys to evict so that the rest fits into ``budget`` bytes.

    All blocks of one boundary go together, and a boundary goes only after every
    boundary behind it: later blocks are worthless without the earlier ones. Among the
    chains' ends the one used longest ago goes first; ends that lost an earlier block
    come before all. A pinned boundary stays, and so do those before it.

    Args:
      entries: the index.
      used: seconds of the last use by key; 0 where there is none.
      pinned: digests.
      budget: bytes.
    """
    total = sum(entry.size for entry in entries.values())
    members: dict[tuple[str, str], list[str]] = defaultdict(list)
    parent: dict[tuple[str, str], tuple[str, str]] = {}
    last: dict[tuple[str, str], float] = defaultdict(float)
    for key, entry in entries.items():
        model, _, _, digest = split_key(key)
        node = (model, digest)
        members[node].append(key)
        last[node] = max(last[node], used.get(key, 0.0))
        if entry.parent:
            parent[node] = (model, entry.parent)
    children: dict[tuple[str, str], int] = defaultdict(int)
    for before in parent.values():
        children[before] += 1
    # Using a boundary is using those before it.
    depth = {node: entries[keys[0]].index for node, keys in members.items()}
    for node in sorted(members, key=lambda n: -depth[n]):
        before = parent.get(node)
        if before in members:
            last[before] = max(last[before], last[node])
    broken: set[tuple[str, str]] = set()
    for node in sorted(members, key=lambda n: depth[n]):
        before = parent.get(node)
        if before is not None and (before not in members or before in broken):
            broken.add(node)

    def rank(node: tuple[str, str]):
        return (node not in broken, last[node], -depth[node], node)

    ends = [rank(node) for node in members if not children[node]]
    heapq.heapify(ends)
    evicted = []
    while total > budget and ends:
        node = heapq.heappop(ends)[-1]
        if node[1] in pinned:
            continue
        for key in members[node]:
            evicted.append(key)
            total -= entries[key].size
        before = parent.get(node)
        if before is not None:
            children[before] -= 1
            if before in members and not children[before]:
                heapq.heappush(ends, rank(before))
    return evicted


def collect(
    catalog: Catalog,
    used: Mapping[str, float],
    pinned: Set[str],
    budget: int,
    orphans: bool,
) -> tuple[GcReport, set[str]]:
    """Evicts to the budget and compacts; returns the keys that went, too.

    Keys go first and objects after them, so that a kill leaves orphans at worst.

    Raises:
      StoreError: the storage failed; what was done so far is consistent.
    """
    io, doomed = catalog.io, {}

    def choose(entries: dict[str, Entry]) -> Changes:
        keys = plan(entries, used, pinned, budget)
        doomed.clear()
        doomed.update({key: entries[key] for key in keys})
        return {}, set(keys)

    with catalog.objects_lock.hold():
        catalog.refresh()
        before = sum(entry.size for entry in catalog.entries.values())
        catalog.commit(choose)
        io.delete_many([_name(key, entry) for key, entry in doomed.items()])
        loose: list[str] = []
        if orphans:
            named = {_name(key, entry) for key, entry in catalog.entries.items()}
            held = io.list("blocks/")
            loose = [name for name in held if name not in named and parse_name(name)]
            io.delete_many(loose)
            io.drop_stale_writes("blocks/")
            io.drop_stale_writes("quarantine/")
        aside = io.list("quarantine/")
        io.delete_many(aside)
        catalog.compact()
    gone = sum(entry.size for entry in doomed.values())
    report = GcReport(
        evicted=len(doomed),
        evicted_bytes=gone,
        orphans=len(loose),
        quarantined=len(aside),
        bytes_before=before,
        bytes_after=sum(entry.size for entry in catalog.entries.values()),
        index_bytes=catalog.index.bytes_in_storage(),
    )
    return report, set(doomed)


def forget(catalog: Catalog, chains: Iterable[str]) -> tuple[int, set[str]]:
    """Removes all objects of these digests and of every boundary behind them.

    Returns:
      How many objects were removed, and the digests.

    Raises:
      StoreError: the storage failed; call again.
    """
    io = catalog.io
    with catalog.objects_lock.hold():
        catalog.refresh()
        children: dict[str, set[str]] = defaultdict(set)
        for key, entry in catalog.entries.items():
            children[entry.parent].add(split_key(key)[3])
        named = {_name(key, entry) for key, entry in catalog.entries.items()}
        unreadable = []
        for name, header, _ in catalog.headers(skip=named):
            if not isinstance(header, BlockError):
                children[header.parent].add(header.chain)
            elif parse_name(name):
                # It may be a descendant; sound it is not, so nothing is lost.
                unreadable.append(name)
        aside = {name: parse_quarantine(name) for name in io.list("quarantine/")}
        for parsed in aside.values():
            if parsed is not None and parsed[1] != UNKNOWN_PARENT:
                children[parsed[1]].add(parsed[0])
        doomed: set[str] = set()
        ahead = [str(digest) for digest in chains]
        # Of what lost its header nobody knows what it came after: it goes too, and
        # so does what stands on it alone.
        known = set().union(*children.values())
        lost = {_chain_of(name) for name in unreadable}
        lost |= {p[0] for p in aside.values() if p and p[1] == UNKNOWN_PARENT}
        ahead += [digest for digest in lost if digest and digest not in known]
        while ahead:
            digest = ahead.pop()
            if digest not in doomed:
                doomed.add(digest)
                ahead.extend(children.get(digest, ()))

        def choose(entries: dict[str, Entry]) -> Changes:
            return {}, {key for key in entries if split_key(key)[3] in doomed}

        catalog.commit(choose)
        names = [n for n in io.list("blocks/") if _chain_of(n) in doomed]
        names += unreadable
        names += [
            name
            for name, parsed in aside.items()
            if parsed is None or parsed[0] in doomed or parsed[1] == UNKNOWN_PARENT
        ]
        io.delete_many(sorted(set(names)))
        # A killed writer's remains hold tokens' states too, and OCDBT keeps old keys.
        io.drop_stale_writes("blocks/")
        io.drop_stale_writes("quarantine/")
        catalog.compact()
    return len(set(names)), doomed


def load_usage(catalog: Catalog) -> dict[str, float]:
    """Seconds of the last use by key, as the last process left them.

    They only order evictions: a damaged record is reported and dropped.
    """
    (data,) = catalog.io.read_many([USAGE])
    if data is None:
        return {}
    try:
        return read_usage(data)
    except (BlockError, StoreError) as error:
        catalog.recorder.fail(USAGE, "crc", str(error))
        with contextlib.suppress(StoreError):
            catalog.io.delete_many([USAGE])
        return {}


def read_usage(data) -> dict[str, float]:
    """Seconds by key in a usage record.

    Raises:
      BlockError: a byte is not as it was written.
      StoreReadError: it could not be read.
    """
    if not isinstance(data, bytes):
        raise data
    body = data[_CRC.size :]
    if data[: _CRC.size] != _CRC.pack(crc32c(body)):
        raise BlockError("crc", f"{USAGE}: CRC32C differs")
    return json.loads(body)


def save_usage(catalog: Catalog, used: Mapping[str, float]) -> None:
    """Writes the last uses of the keys that still exist."""
    kept = {key: used[key] for key in sorted(catalog.entries) if key in used}
    body = json.dumps(kept).encode()
    try:
        catalog.io.write_many({USAGE: _CRC.pack(crc32c(body)) + body})
    except StoreError as error:
        catalog.recorder.event("failed", USAGE, str(error))


def _name(key: str, entry: Entry) -> str:
    _, group, _, digest = split_key(key)
    return object_name(group, digest, entry.generation)


def _chain_of(name: str) -> str | None:
    parsed = parse_name(name)
    return parsed[1] if parsed else None
