"""Transforms of a cache: plain functions, one a file, each of a stated class.

EXACT: bit-identical state on valid data. ROUNDING: same maths in another order of
reduction. LOSSY: an error that is measured and reported.
"""

from hybrid_attn.transforms.clear_faults import clear_faults
from hybrid_attn.transforms.fork import fork
from hybrid_attn.transforms.grow import grow
from hybrid_attn.transforms.rewind import rewind
from hybrid_attn.transforms.select_rows import select_rows

__all__ = ["clear_faults", "fork", "grow", "rewind", "select_rows"]
