"""Paging of entries: blocks in a fixed number of device slots, the rest elsewhere."""

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hybrid_attn.cache.layout import Group
from pallas_kernels.compressed_attention.api import compressed_attention
from pallas_kernels.softmax import Partial, merge
from pallas_kernels.sparse_attention.api import sparse_attention

# The verified payload uint8[group.nbytes] of a block, or None where it is lost.
Fetch = Callable[[str], np.ndarray | None]


class PagingError(RuntimeError):
    """A block that nobody has any more, or more blocks at once than there are slots."""


@dataclasses.dataclass(frozen=True)
class Pages:
    """Blocks as they lie in device slots: a version that later reads leave valid.

    Attributes:
      arrays: one [slots, *block shape] for each of the group's arrays.
      slots: int32[n], where each block that was asked for lies.
    """

    arrays: tuple[Array, ...]
    slots: Array


class BlockPager:
    """The blocks of one cache group behind ``slots`` device slots, least recent out.

    What is evicted is only forgotten: blocks are immutable, their host or disk version
    stays. Loading makes new arrays; those given out before stay as they are.

    Attributes:
      group: the cache group.
      counts: hits, misses, evictions.
    """

    def __init__(self, group: Group, fetch: Fetch, *, slots: int):
        if slots < 1:
            raise ValueError(f"slots={slots}: expected from 1")
        self.group = group
        self.counts: Counter[str] = Counter()
        self._fetch = fetch
        self._lying: OrderedDict[str, int] = OrderedDict()
        self._free = list(range(slots))
        self._arrays = tuple(
            jnp.zeros((slots, *array.shape), array.dtype) for array in group.arrays
        )

    @property
    def slots(self) -> int:
        return len(self._free) + len(self._lying)

    @property
    def device_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def read(self, keys: Sequence[str]) -> Pages:
        """Brings blocks in; at most as many different ones as there are slots.

        Raises:
          PagingError: more blocks than slots, or a block that ``fetch`` has not; what
            lies in the slots is then as before.
        """
        wanted = list(dict.fromkeys(keys))
        if len(wanted) > self.slots:
            raise PagingError(
                f"{self.group.name}: {len(wanted)} blocks at once, {self.slots} slots"
            )
        missing = [key for key in wanted if key not in self._lying]
        loaded = {}
        for key in missing:
            payload = self._fetch(key)
            if payload is None:
                raise PagingError(f"{self.group.name}: block {key} is lost")
            loaded[key] = self.group.unpack(payload)
        self.counts["hits"] += len(wanted) - len(missing)
        self.counts["misses"] += len(missing)
        for key in wanted:
            if key in self._lying:
                self._lying.move_to_end(key)
        for key in missing:
            if not self._free:
                old, slot = next(
                    (k, s) for k, s in self._lying.items() if k not in wanted
                )
                del self._lying[old]
                self._free.append(slot)
                self.counts["evictions"] += 1
            self._lying[key] = self._free.pop(0)
        if missing:
            where = np.array([self._lying[key] for key in missing], np.int32)
            self._arrays = tuple(
                _placed(array, where, np.stack([loaded[key][i] for key in missing]))
                for i, array in enumerate(self._arrays)
            )
        slots = jnp.asarray([self._lying[key] for key in keys], jnp.int32)
        return Pages(self._arrays, slots)

    def forget(self, keys: Sequence[str]) -> None:
        """Frees the slots of blocks, say after a quarantine; others are no error."""
        for key in keys:
            slot = self._lying.pop(key, None)
            if slot is not None:
                self._free.append(slot)


@jax.jit
def _placed(array: Array, slots: Array, blocks: Array) -> Array:
    return array.at[slots].set(blocks)


def attend_all(
    pager: BlockPager,
    keys: Sequence[str],
    query: Array,
    visible: Array,
    *,
    arrays: tuple[int, int],
    scale: float,
) -> Partial:
    """Softmax sums over every visible entry of a row, a slotful of blocks at a time.

    Args:
      keys: the row's blocks from 0 on; those that no query sees are not brought in.
      query: [1, t, n, h]; visible: int32[1, t], entries that each query may read.
      arrays: which of the group's arrays are key and value (the same where shared).
      scale: of the logits.

    Returns:
      As one `compressed_attention` over all entries; ROUNDING.
    """
    per_block = pager.group.arrays[arrays[0]].shape[0]
    used = -(-int(jnp.max(visible)) // per_block)
    total: Partial | None = None
    for first in range(0, max(used, 1), pager.slots):
        part = list(keys[first : min(first + pager.slots, used)])
        if not part:
            part = list(keys[:1])
        pages = pager.read(part)
        key, value = (_run(pages, i) for i in arrays)
        if arrays[0] == arrays[1]:
            value = key
        left = jnp.clip(visible - first * per_block, 0, key.shape[1])
        new = compressed_attention(
            query, key, value, left.astype(jnp.int32), scale=scale, static=False
        )
        total = new if total is None else merge(total, new)
    assert total is not None
    return total


def attend_chosen(
    pager: BlockPager,
    keys: Sequence[str],
    query: Array,
    chosen: Array,
    *,
    arrays: tuple[int, int],
    scale: float,
) -> Partial:
    """Softmax sums over chosen entries; only the blocks that hold them are brought in.

    Args: as `attend_all`; chosen: int32[1, t, c], entries of the row, -1 = none.

    Returns:
      As one `sparse_attention` over all entries; EXACT.

    Raises:
      PagingError: the choice touches more blocks than there are slots.
    """
    per_block = pager.group.arrays[arrays[0]].shape[0]
    index = np.asarray(chosen)
    touched = np.unique(index[index >= 0] // per_block)
    if not touched.size:
        touched = np.array([0])
    pages = pager.read([keys[int(i)] for i in touched])
    slot_of = np.full((touched.max() + 1,), 0, np.int32)
    slot_of[touched] = np.asarray(pages.slots)
    block = np.maximum(index, 0) // per_block
    moved = slot_of[np.minimum(block, touched.max())] * per_block
    moved = np.where(index >= 0, moved + np.maximum(index, 0) % per_block, -1)
    key, value = (
        pages.arrays[i].reshape(1, -1, *pages.arrays[i].shape[2:]) for i in arrays
    )
    if arrays[0] == arrays[1]:
        value = key
    return sparse_attention(
        query, key, value, jnp.asarray(moved, jnp.int32), scale=scale
    )


def _run(pages: Pages, i: int) -> Array:
    """[1, n·entries, k, h]: the pages one after another."""
    taken = jnp.take(pages.arrays[i], pages.slots, axis=0)
    return taken.reshape(1, -1, *taken.shape[2:])
