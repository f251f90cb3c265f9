"""Modules hold parameters and static config only, in NNX's tree mode."""

import functools

import jax
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.config import HyperConfig, MoEConfig
from hybrid_attn.testing import small_config

CONFIGS = {
    # The published models are too large to make; a small one of their form does.
    **{
        n: ha.presets.get(n) for n in ha.presets.names() if not n.startswith("deepseek")
    },
    "deepseek_v4": small_config(
        "swa,hca,csa",
        moe=MoEConfig(experts=4, chosen=2, width=8),
        hyper=HyperConfig(streams=3),
    ),
    "all": small_config("dense,swa,hca,csa", query_rank=16, output_rank=8),
}


@functools.cache
def model(name: str) -> ha.Model:
    return ha.Model(CONFIGS[name], rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_only(name):
    graph, parameters, rest = nnx.split(model(name), nnx.Param, ...)
    assert jax.tree.leaves(parameters)
    assert not jax.tree.leaves(rest)
    hash(graph)
    for path, leaf in jax.tree.leaves_with_path(parameters):
        assert leaf.dtype == "float32", jax.tree_util.keystr(path)
        assert not leaf.weak_type, jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", CONFIGS)
def test_eval_shape(name):
    config = CONFIGS[name]
    abstract = nnx.eval_shape(lambda: ha.Model(config, rngs=nnx.Rngs(0)))
    got, want = nnx.state(abstract), nnx.state(model(name))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(a, jax.ShapeDtypeStruct)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_tree_mode():
    """A model is a pytree of its parameters, and no parameter serves two places."""
    if hasattr(nnx, "get_graph_mode"):
        assert not nnx.get_graph_mode()
    leaves = jax.tree.leaves(model("all"))
    assert len(leaves) == len(jax.tree.leaves(nnx.state(model("all"))))
    pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    assert len(pointers) == len(leaves)


def test_same_seed_same_parameters():
    again = ha.Model(CONFIGS["all"], rngs=nnx.Rngs(0))
    other = ha.Model(CONFIGS["all"], rngs=nnx.Rngs(1))
    pairs = [jax.tree.leaves(m) for m in (model("all"), again, other)]
    assert all((a == b).all() for a, b in zip(pairs[0], pairs[1], strict=True))
    assert any((a != b).any() for a, b in zip(pairs[0], pairs[2], strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_no_array_serves_two_leaves_of_a_cache(name):
    leaves = jax.tree.leaves(ha.init_cache(CONFIGS[name], 1, 16))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    assert not any(leaf.weak_type for leaf in leaves)


def test_cache_trees_follow_the_spec():
    config = CONFIGS["all"]
    one, two = (ha.init_cache(config, 2, 32) for _ in range(2))
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert hash(one.spec) == hash(two.spec)
    assert jax.tree.structure(one) != (jax.tree.structure(ha.init_cache(config, 2, 64)))
