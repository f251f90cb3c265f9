"""What tests of every family of checkpoints share."""

import tracemalloc
from pathlib import Path

import jax
from flax import nnx

import hybrid_attn as ha


def leaves(model):
    return jax.tree.leaves(nnx.state(model))


def same(a, b) -> bool:
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def check_streamed(config: ha.ModelConfig, directory: Path, *, parts: int) -> None:
    """Saving holds one tensor, loading the model and one tensor.

    ``parts``: the largest tensor must be less than that part of the model, or the
    check would prove nothing.
    """
    model = ha.Model(config, rngs=nnx.Rngs(0))
    sizes = [x.nbytes for x in leaves(model)]
    largest = max(sizes)
    assert largest < sum(sizes) / parts
    tracemalloc.start()
    ha.weights.save(directory, config, model)
    saving = tracemalloc.get_traced_memory()[1]
    del model
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    ha.weights.load(directory)
    loading = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert saving < 1.2 * largest + 4e6
    assert loading < sum(sizes) + 1.2 * largest + 4e6
