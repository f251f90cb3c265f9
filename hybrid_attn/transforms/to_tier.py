"""Moves a cache between memories. EXACT."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax.typing import ArrayLike

from hybrid_attn.cache.states import Cache, DiskPrefix
from hybrid_attn.config import ModelConfig
from hybrid_attn.transforms.offload import check_tokens, disk_prefix, offload
from hybrid_attn.transforms.restore import restore

if TYPE_CHECKING:
    from hybrid_attn.store.store import Store

Tier = Literal["device", "host", "disk"]
TIERS = ("device", "host", "disk")


@dataclasses.dataclass(frozen=True)
class Parked:
    """A cache on disk: what brings it back, and nothing of its states.

    Attributes:
      tokens: int[b, t], what the rows were fed; lengths int[b].
      prefix: which blocks the store holds of it.
      capacity, undo, dtypes: of the cache.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prefix: DiskPrefix
    capacity: int
    undo: int
    dtypes: object


def to_tier(
    cache: Cache | Parked,
    tier: Tier,
    *,
    store: "Store | None" = None,
    tokens: ArrayLike | None = None,
    config: ModelConfig | None = None,
) -> Any:
    """The same cache in another memory; the one given stays valid.

    Args:
      cache: a cache in device or host memory, or one that was parked.
      tier: "device"; "host", in pinned host memory where the backend has it, which no
        step reads from; "disk", in a store.
      store, tokens: to "disk", where to and what the rows were fed (int[b, t]); of a
        parked cache only the store.
      config: for a parked cache, its model's configuration.

    Returns:
      A `Cache`; a `Parked` for "disk". On disk a cache keeps whole blocks: back from
      there, each row stands at its last verified boundary, and the caller reads on
      from ``cache.length``.

    Raises:
      ValueError: an unknown tier, or an argument that this way needs.
    """
    if tier not in TIERS:
        raise ValueError(f"tier={tier!r}: expected one of {TIERS}")
    if isinstance(cache, Parked):
        if tier == "disk":
            return cache
        if store is None or config is None:
            raise ValueError("a parked cache comes back with store= and config=")
        back = restore(
            store,
            config,
            cache.tokens,
            cache.lengths,
            capacity=cache.capacity,
            undo=cache.undo,
            dtypes=cache.dtypes,
        )
        return to_tier(back, tier)
    if tier == "disk":
        if store is None or tokens is None:
            raise ValueError("tier='disk' needs store= and tokens=")
        ids = check_tokens(tokens, cache.batch)
        offload(to_tier(cache, "device"), store, ids)
        return Parked(
            tokens=ids,
            lengths=np.asarray(cache.length),
            prefix=disk_prefix(cache, store, ids),
            capacity=cache.spec.capacity,
            undo=cache.spec.undo,
            dtypes=cache.spec.dtypes,
        )
    return jax.tree.map(lambda x: _moved(x, tier), cache)


def host_memory_kind(device: Any) -> str:
    """The best host memory that a device can address."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    for kind in ("pinned_host", "unpinned_host"):
        if kind in kinds:
            return kind
    return device.default_memory().kind


def _moved(array: jax.Array, tier: Tier) -> jax.Array:
    device = next(iter(array.devices()))
    kind = (
        device.default_memory().kind if tier == "device" else host_memory_kind(device)
    )
    if array.sharding.memory_kind == kind:
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(kind))
