"""Routed experts: both forms against a loop over tokens; rows do not meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hybrid_attn.config import HyperConfig, MoEConfig
from hybrid_attn.layers.moe import Experts, Router
from hybrid_attn.testing import conformance, small_config
from hybrid_attn.training.trainer import TrainConfig, Trainer

MOE = MoEConfig(experts=8, chosen=3, width=12, scale=1.5, hash_layers=(0,))


def experts(moe=MOE, size=16, limit=None):
    return Experts(size, moe, rngs=nnx.Rngs(0), dtype="float32", limit=limit, scale=1.0)


def plain(layer, x, chosen, weights, limit) -> np.ndarray:
    """Token by token, float64."""
    gate_up = np.asarray(layer.gate_up[...], np.float64)
    down = np.asarray(layer.down[...], np.float64)
    out = np.zeros(x.shape)
    for r, k in np.ndindex(chosen.shape):
        e = chosen[r, k]
        gate, up = np.split(x[r].astype(np.float64) @ gate_up[e], 2)
        if limit is not None:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        out[r] += weights[r, k] * (gate / (1 + np.exp(-gate)) * up @ down[e])
    return out


def draw(rows, rng, moe=MOE, size=16):
    x = rng.standard_normal((rows, size)).astype(np.float32)
    chosen = np.argsort(rng.random((rows, moe.experts)))[:, : moe.chosen]
    weights = rng.random((rows, moe.chosen)).astype(np.float32)
    return x, chosen.astype(np.int32), weights


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 100])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_against_a_loop(rows, static, limit):
    layer = experts(limit=limit)
    x, chosen, weights = draw(rows, np.random.default_rng(rows))
    got = jax.jit(lambda *a: layer(*a, static=static))(x, chosen, weights)
    np.testing.assert_allclose(got, plain(layer, x, chosen, weights, limit), atol=2e-5)


@pytest.mark.parametrize("rows", [1, 5])
def test_gathered(rows):
    """The form of short steps where blocks do not run at once."""
    layer = experts()
    x, chosen, weights = draw(rows, np.random.default_rng(rows))
    got = np.einsum("rk,rkd->rd", weights, layer._gathered(jnp.asarray(x), chosen))
    np.testing.assert_allclose(got, plain(layer, x, chosen, weights, None), atol=2e-5)


@pytest.mark.parametrize("static", [True, False])
def test_all_rows_to_the_same_experts(static):
    """No expert has a capacity."""
    layer = experts()
    x, chosen, weights = draw(200, np.random.default_rng(0))
    chosen[:] = [7, 2, 0]
    got = layer(x, chosen, weights, static=static)
    np.testing.assert_allclose(got, plain(layer, x, chosen, weights, None), atol=2e-5)


@pytest.mark.parametrize("rows", [2, 64, 200])
def test_rows_do_not_meet(rows):
    """A row's bits are the same whatever the others are, non-finite included."""
    layer = experts()
    run = jax.jit(lambda *a: layer(*a, static=False))
    x, chosen, weights = draw(rows, np.random.default_rng(0))
    want = np.asarray(run(x, chosen, weights))
    for seed in range(1, 6):
        other = draw(rows, np.random.default_rng(seed))
        kept = np.random.default_rng(seed).random(rows) < 0.3
        mixed = [
            np.where(kept[:, None], a, b)
            for a, b in zip((x, chosen, weights), other, strict=True)
        ]
        mixed[0][~kept] *= np.nan if seed == 5 else 1
        got = np.asarray(run(*mixed))
        assert got[kept].tobytes() == want[kept].tobytes()


def test_gradients_of_the_static_form():
    layer = experts()
    x, chosen, weights = draw(20, np.random.default_rng(0))

    def looped(layer, x, weights):
        y = 0.0
        for k in range(MOE.chosen):
            gate_up, down = (p[...][chosen[:, k]] for p in (layer.gate_up, layer.down))
            gate, up = jnp.split(jnp.einsum("rd,rdw->rw", x, gate_up), 2, axis=-1)
            hidden = jax.nn.silu(gate) * up
            y += weights[:, k, None] * jnp.einsum("rw,rwd->rd", hidden, down)
        return jnp.sum(jnp.sin(y))

    def ours(layer, x, weights):
        return jnp.sum(jnp.sin(layer(x, chosen, weights, static=True)))

    want = jax.grad(looped, argnums=(0, 1, 2))(layer, x, weights)
    got = jax.grad(ours, argnums=(0, 1, 2))(layer, x, weights)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_router():
    router = Router(16, 31, MOE, hashed=False, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((9, 16)).astype(np.float32)
    bias = np.zeros(8, np.float32)
    bias[5] = 100.0
    router.bias.set_value(jnp.asarray(bias))
    chosen, weights = router(x, np.zeros(9, np.int32))
    scores = np.sqrt(np.log1p(np.exp(x @ np.asarray(router.score.weight[...]))))
    assert (np.asarray(chosen)[:, 0] == 5).all()
    for r in range(9):
        assert set(chosen[r].tolist()) == set(np.argsort(-(scores + bias)[r])[:3])
        picked = scores[r][chosen[r]]
        np.testing.assert_allclose(weights[r], 1.5 * picked / picked.sum(), rtol=1e-5)


def test_hash_router():
    router = Router(16, 31, MOE, hashed=True, rngs=nnx.Rngs(0))
    table = np.asarray(router.table[...])
    assert table.shape == (31, 3)
    assert all(len(set(row)) == 3 for row in table.tolist())
    assert set(table.ravel().tolist()) == set(range(8))
    tokens = np.array([4, 30, 4])
    chosen, _ = router(np.ones((3, 16), np.float32), tokens)
    assert (np.asarray(chosen) == table[tokens]).all()


def test_training_leaves_what_is_fixed():
    config = small_config("hca,swa", moe=MOE, hyper=HyperConfig(streams=2))
    trainer = Trainer(config, TrainConfig(steps=3, batch=2, length=16))
    state = trainer.init()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(state.params))
    tokens = np.random.default_rng(0).integers(0, 31, (2, 16))
    for _ in range(3):
        state, metrics = trainer.update(state, tokens, tokens)
    assert np.isfinite(float(metrics["loss"]))
    after = nnx.to_pure_dict(state.params)
    for path, old in jax.tree.leaves_with_path(before):
        name = jax.tree_util.keystr(path)
        new = at(after, path)
        fixed = "'table'" in name or ("router" in name and "'bias'" in name)
        assert (np.asarray(new) == old).all() == fixed, name


def at(tree, path):
    for key in path:
        tree = tree[key.key]
    return tree


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["hca,swa,csa"])
def test_conformance(pattern):
    config = small_config(pattern, moe=MOE, hyper=HyperConfig(streams=3))
    conformance(config)
