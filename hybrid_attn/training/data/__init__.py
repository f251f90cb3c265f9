"""Training data: numpy only, every batch a pure function of (seed, step)."""

from hybrid_attn.training.data.batch import IGNORE, Batch
from hybrid_attn.training.data.needle import NeedleTask
from hybrid_attn.training.data.recall import BUCKETS, RecallTask, buckets
from hybrid_attn.training.data.text import NoTextError, TextData

__all__ = [
    "BUCKETS",
    "IGNORE",
    "Batch",
    "NeedleTask",
    "NoTextError",
    "RecallTask",
    "TextData",
    "buckets",
]
