"""Transforms of a cache: plain functions, one a file, each of a stated class.

EXACT: bit-identical state on valid data. ROUNDING: same maths in another order of
reduction. LOSSY: an error that is measured and reported.
"""

from hybrid_attn.transforms.clear_faults import clear_faults
from hybrid_attn.transforms.fork import fork
from hybrid_attn.transforms.grow import grow
from hybrid_attn.transforms.offload import Offloaded, offload
from hybrid_attn.transforms.restore import Prefetch, prefetch, restore
from hybrid_attn.transforms.rewind import rewind
from hybrid_attn.transforms.select_rows import select_rows
from hybrid_attn.transforms.to_tier import Parked, to_tier

__all__ = [
    "Offloaded",
    "Parked",
    "Prefetch",
    "clear_faults",
    "fork",
    "grow",
    "offload",
    "prefetch",
    "restore",
    "rewind",
    "select_rows",
    "to_tier",
]
