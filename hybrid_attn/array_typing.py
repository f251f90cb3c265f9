"""Shape aliases shared by the library.

Axes: b batch, t query, s key, n query heads, k key/value heads, g group,
d model, h head dim, v vocabulary, e entries.
"""

from jaxtyping import Array, Bool, Float, Int, UInt8

Tokens = Int[Array, "b t"]
Rows = Int[Array, " b"]
RowFaults = UInt8[Array, " b"]
RowMask = Bool[Array, " b"]
Positions = Int[Array, "b t"]
Hidden = Float[Array, "b t d"]
Heads = Float[Array, "b t n h"]
KeyValueHeads = Float[Array, "b s k h"]
Logits = Float[Array, "b t v"]

__all__ = [
    "Heads",
    "Hidden",
    "KeyValueHeads",
    "Logits",
    "Positions",
    "RowFaults",
    "RowMask",
    "Rows",
    "Tokens",
]
