"""Parameters that no gradient trains."""

from flax import nnx


class Fixed(nnx.Param):
    """A number that belongs to the model and is not trained by its gradient.

    Such are the token → experts table of hash routing (int32) and the bias by which
    a router balances its experts. They are parameters to everything that stores,
    loads or counts; `trainable` is what an optimiser filters by.
    """


def trainable(path, value) -> bool:
    """An NNX filter: every parameter but the fixed ones."""
    return isinstance(value, nnx.Param) and not isinstance(value, Fixed)
