"""Caches that outlive their process: Orbax snapshots and a log between them."""

from hybrid_attn.checkpoint.checkpointer import Checkpointer, Statistics, save
from hybrid_attn.checkpoint.errors import (
    CheckpointError,
    CheckpointWriteError,
    DamagedError,
    FencedError,
    NothingToRestoreError,
)
from hybrid_attn.checkpoint.recovery import Report, Restored, restore
from hybrid_attn.checkpoint.snapshots import Snapshot, latest

__all__ = [
    "CheckpointError",
    "CheckpointWriteError",
    "Checkpointer",
    "DamagedError",
    "FencedError",
    "NothingToRestoreError",
    "Report",
    "Restored",
    "Snapshot",
    "Statistics",
    "latest",
    "restore",
    "save",
]
