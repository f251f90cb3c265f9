"""Shape annotations that are checked when a function is called or traced.

What does not fit raises `jaxtyping.TypeCheckError`, which names the function, the
parameter, what was given and what was expected.

Axes: b batch, t query, s key, n query heads, k key/value heads, g group, h head dim,
e entries, c channels, i indexer heads.
"""

from beartype import beartype
from jaxtyping import Array, Float, Int, jaxtyped

typed = jaxtyped(typechecker=beartype)

Queries = Float[Array, "b t n h"]
Keys = Float[Array, "b s k h"]
Entries = Float[Array, "b e k h"]
Positions = Int[Array, "b t"]
Visible = Int[Array, "b t"]
# Attention mass of blocks of entries.
Mass = Float[Array, "b t blocks"]

__all__ = ["Entries", "Keys", "Mass", "Positions", "Queries", "Visible", "typed"]
