"""Publishes the blocks of a cache to a store. EXACT: what is stored is what is held."""

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from hybrid_attn.cache.layout import Group, layout_of
from hybrid_attn.cache.states import Cache, DiskPrefix
from hybrid_attn.store.blocks import Block

if TYPE_CHECKING:
    from hybrid_attn.store.store import Store

# Recent states are kept at every boundary.
FULL = 1


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """What one call of `offload` did.

    Attributes:
      boundary: int[b], tokens of each row that the store holds entries of.
      recent: int[b], the boundary whose recent states it holds, 0 for none.
      blocks, bytes: what was published by this call; what the store had is not
        written again.
    """

    boundary: np.ndarray
    recent: np.ndarray
    blocks: int
    bytes: int


def offload(
    cache: Cache,
    store: "Store",
    tokens: ArrayLike,
    *,
    recent: int = FULL,
    alignment: int = 4096,
) -> Offloaded:
    """Stores every full block of every row, and the recent states at its cut.

    Entries are stored for each full block of ``block_tokens``. Recent states (windows,
    frontiers) can be stored for one boundary a row, the last that it crossed
    (``cache.cut``): a cache that is offloaded at every boundary leaves them at all.

    Args:
      cache: stays valid.
      store: an open `hybrid_attn.store.Store` of the model that filled the cache.
      tokens: int[b, t], what each row was fed from position 0 on; t at least the
        longest length.
      recent: every how many boundaries the recent states are kept: 1 (full), p
        (periodic; the row's deepest boundary always counts), 0 (zero: never, a restore
        replays tokens instead).
      alignment: block objects are padded to a multiple of it, in bytes.

    Returns:
      `Offloaded`. Blocks are durable and visible when it returns.

    Raises:
      ValueError: tokens of another batch or shorter than a row, or a bad ``recent``.
      StoreWriteError: nothing of a row became visible.
    """
    if not isinstance(recent, int) or recent < 0:
        raise ValueError(f"recent={recent!r}: expected a whole number from 0")
    ids = check_tokens(tokens, cache.batch)
    lengths = np.asarray(cache.length)
    if ids.shape[1] < lengths.max(initial=0):
        raise ValueError(
            f"tokens {list(ids.shape)}: row {int(lengths.argmax())} of the cache holds "
            f"{int(lengths.max())} tokens"
        )
    layout = layout_of(cache)
    size = layout.block_tokens
    cuts, on_grid = np.asarray(cache.cut), np.asarray(cache.on_grid)
    host = _Host(cache)
    kept = np.zeros_like(lengths)
    count = total = 0
    for row, length in enumerate(lengths):
        chain = store.chain(layout.fingerprint, ids[row, :length], size)
        wanted = [(g, i) for g in layout.family("history") for i in range(len(chain))]
        last = int(cuts[row]) // size
        if recent and last and (last % recent == 0 or last == len(chain)):
            kept[row] = last * size
            wanted += [(group, last - 1) for group in layout.family("recent")]
        wanted = [
            (group, i)
            for group, i in wanted
            if not store.contains(group.name, group.fingerprint, chain[i])
        ]
        blocks = [
            Block(
                group=group.name,
                layout=group.fingerprint,
                chain=chain[i],
                index=i,
                length=chain[i].length,
                payload=host.payload(group, row, i, size),
                origin="prefill" if chain[i].length <= on_grid[row] else "decode",
                alignment=alignment,
            )
            for group, i in wanted
        ]
        if blocks:
            store.publish(blocks)
        count += len(blocks)
        total += sum(group.nbytes for group, _ in wanted)
    return Offloaded(lengths // size * size, kept, count, total)


def disk_prefix(cache: Cache, store: "Store", tokens: ArrayLike) -> DiskPrefix:
    """Which blocks of each row the store holds, every one of them verified.

    Args:
      cache, tokens: as `offload`.
    """
    ids = check_tokens(tokens, cache.batch)
    layout = layout_of(cache)
    lengths = np.asarray(cache.length)
    count = int(lengths.max(initial=0)) // layout.block_tokens
    chain = np.zeros((cache.batch, count, 4), np.uint32)
    generation = np.full((cache.batch, count, len(layout.groups)), -1, np.int32)
    verified = np.zeros((cache.batch,), np.int32)
    for row, length in enumerate(lengths):
        digests = store.chain(
            layout.fingerprint, ids[row, :length], layout.block_tokens
        )
        whole = True
        for i, digest in enumerate(digests):
            chain[row, i] = np.frombuffer(bytes.fromhex(digest), ">u4")
            for g, group in enumerate(layout.groups):
                payload = store.fetch(group.name, group.fingerprint, digest)
                if payload is not None:
                    generation[row, i, g] = payload.header.generation & 0x7FFFFFFF
                elif group.family == "history":
                    whole = False
            if whole:
                verified[row] = digest.length
    return DiskPrefix(
        chain=jnp.asarray(chain),
        generation=jnp.asarray(generation),
        verified=jnp.asarray(verified),
        reads=jnp.zeros((cache.batch, count), jnp.int32),
    )


class _Host:
    """Arrays of a cache on the host, each fetched once and only if it is read."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self._arrays: dict[tuple[int, str, str, bool], np.ndarray] = {}

    def _get(self, layer: int, state: str, field: str, cut: bool) -> np.ndarray:
        key = (layer, state, field, cut)
        if key not in self._arrays:
            if cut:
                array = self.cache.cuts[layer][f"{state}.{field}"]
            else:
                array = getattr(self.cache.layers[layer].states[state], field)
            self._arrays[key] = np.asarray(array)
        return self._arrays[key]

    def payload(self, group: Group, row: int, block: int, size: int) -> np.ndarray:
        """uint8[nbytes]: the group's arrays of one row's block, in order."""
        parts = []
        for array in group.arrays:
            recent = group.family == "recent"
            held = self._get(array.layer, array.state, array.field, recent)[row]
            if not recent:
                count = array.shape[array.axis]
                at = [slice(None)] * held.ndim
                at[array.axis] = slice(block * count, (block + 1) * count)
                held = held[tuple(at)]
            parts.append(held)
        return group.pack(parts)


def check_tokens(tokens: ArrayLike, batch: int | None = None) -> np.ndarray:
    """int[b, t] on the host.

    Raises:
      ValueError: no integers [b, t], or another number of rows.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 2 or not (np.issubdtype(ids.dtype, np.integer) or not ids.size):
        raise ValueError(f"tokens {ids.dtype}{list(ids.shape)}: expected integers b, t")
    if batch is not None and ids.shape[0] != batch:
        raise ValueError(f"tokens have {ids.shape[0]} rows, the cache has {batch}")
    return ids
