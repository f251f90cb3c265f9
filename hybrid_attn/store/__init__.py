"""Storage of caches: immutable, verified blocks under a TensorStore url."""

from hybrid_attn.store.blocks import Block, Header, Payload
from hybrid_attn.store.chain import Boundary, chain
from hybrid_attn.store.errors import (
    BlockError,
    IndexDamagedError,
    NotAStoreError,
    StoreClosedError,
    StoreError,
    StoreReadError,
    StoreWriteError,
)
from hybrid_attn.store.eviction import GcReport
from hybrid_attn.store.opening import open
from hybrid_attn.store.statistics import Event, Stats
from hybrid_attn.store.store import Store
from hybrid_attn.store.verification import Report

__all__ = [
    "Block",
    "BlockError",
    "Boundary",
    "Event",
    "GcReport",
    "Header",
    "IndexDamagedError",
    "NotAStoreError",
    "Payload",
    "Report",
    "Stats",
    "Store",
    "StoreClosedError",
    "StoreError",
    "StoreReadError",
    "StoreWriteError",
    "chain",
    "open",
]
