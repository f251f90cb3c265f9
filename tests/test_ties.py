"""Equal scores: the lowest index wins, however the tokens are cut.

Other ties of the operation: tests/pallas_kernels/test_indexer_topk.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.config import MoEConfig
from hybrid_attn.layers.moe import Router
from hybrid_attn.mixers.sparse import top_k_mask
from hybrid_attn.testing import small_config, tolerance
from hybrid_attn.testing.subject import randomise
from pallas_kernels.indexer_topk import xla
from pallas_kernels.indexer_topk.reference import reference_choice
from pallas_kernels.indexer_topk.xla import indexer_topk

ZEROS = (0.0, -0.0)
# As many entries as channels, so that keys lie alike whichever axis is which.
ENTRIES = 21


@pytest.mark.parametrize("block", [4096, 8])
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0])
def test_all_scores_equal(value, columns, block, monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", block)
    monkeypatch.setattr(xla, "DECODE_BLOCK", block)
    k = 6
    query = np.ones((2, columns, 1, ENTRIES), np.float32)
    weight = np.full((2, columns, 1), np.copysign(0.5, value), np.float32)
    # relu(query · key) is a multiple of |value|: the score has its sign, zeros too.
    key = np.full((2, ENTRIES, ENTRIES), abs(value), np.float32)
    visible = np.full((2, columns), ENTRIES, np.int32)
    visible[1] = 4
    index, _ = indexer_topk(*map(jnp.asarray, (query, weight, key, visible)), k=k)
    index = np.asarray(index)
    assert (index[0] == np.arange(k)).all()
    assert (index[1] == [0, 1, 2, 3, -1, -1]).all()


@pytest.mark.parametrize("block", [4096, 8])
def test_zeros_of_both_signs_are_equal(block, monkeypatch):
    """A score of -0.0 before +0.0, and between a better and a worse one."""

    def scores_of(query, weight, key):
        return jnp.max(key, axis=1 if key.shape[1] == ENTRIES else 2)[:, None]

    monkeypatch.setattr(xla, "BLOCK", block)
    monkeypatch.setattr(xla, "DECODE_BLOCK", block)
    monkeypatch.setattr(xla, "indexer_scores", scores_of)
    choose = jax.jit(indexer_topk, static_argnames="k")
    rng = np.random.default_rng(0)
    for turn in range(20):
        scores = rng.choice([0.0, -0.0, -0.0, 1.0, -1.0], ENTRIES).astype(np.float32)
        key = np.full((1, ENTRIES, ENTRIES), -np.inf, np.float32)
        key[0, range(ENTRIES), range(ENTRIES)] = scores
        index, _ = choose(
            jnp.zeros((1, 1, 1, ENTRIES)),
            jnp.zeros((1, 1, 1)),
            jnp.asarray(key),
            jnp.full((1, 1), ENTRIES, jnp.int32),
            k=9,
        )
        want = reference_choice(scores[None, None], np.full((1, 1), ENTRIES), 9)
        assert (np.asarray(index) == want).all(), turn


def test_training_mask():
    rng = np.random.default_rng(0)
    for turn in range(20):
        scores = rng.choice([0.0, -0.0, 1.0, -1.0], (2, 3, 11)).astype(np.float32)
        visible = rng.integers(0, 12, (2, 3))
        seen = np.arange(11) < visible[..., None]
        mask = np.asarray(top_k_mask(jnp.asarray(scores), jnp.asarray(seen), 4))
        chosen = reference_choice(scores, visible, 4)
        want = (chosen[..., None] == np.arange(11)).any(axis=2)
        assert (mask == want).all(), turn


@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid"])
def test_router(score):
    moe = MoEConfig(experts=8, chosen=3, width=4, score=score)
    router = Router(16, 31, moe, hashed=False, rngs=nnx.Rngs(0))
    tokens = np.zeros(5, np.int32)
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    for zero in ZEROS:
        router.score.weight.set_value(jnp.full((16, 8), zero))
        chosen, weights = router(x, tokens)
        assert (np.asarray(chosen) == [0, 1, 2]).all()
        assert np.ptp(np.asarray(weights)) == 0
    # Scores that underflow to zero, and a bias of either zero.
    router.score.weight.set_value(jnp.full((16, 8), -1e3))
    for zero in ZEROS:
        router.bias.set_value(jnp.asarray([zero, 0.0] * 4, jnp.float32))
        chosen, _ = router(np.ones_like(x), tokens)
        assert (np.asarray(chosen) == [0, 1, 2]).all()


def test_a_model_whose_scores_all_tie():
    """An indexer that says nothing chooses the oldest entries: in a step, in chunks,
    and in the training form.
    """
    config = small_config("csa*2", name="ties")
    model = randomise(ha.Model(config, rngs=nnx.Rngs(0)))
    for block in model.blocks:
        query = block.mixer.indexer.query.weight
        query.set_value(jnp.zeros_like(query[...]))
    tokens = np.random.default_rng(0).integers(0, 31, (2, 32)).astype(np.int32)
    cache = ha.init_cache(config, 2, 32)
    want, _, aux = ha.step(model, cache, tokens, aux=True)
    visible = (np.arange(32) + 1) // 4
    first = np.where(np.arange(3) < visible[:, None], np.arange(3), -1)
    for layer in aux:
        assert (np.asarray(layer["chosen"]) == first).all()
    allowed = tolerance().relative * max(1.0, np.abs(want).max())
    trained = jax.jit(ha.forward)(model, tokens)
    assert np.abs(np.asarray(trained) - want).max() <= allowed
    logits = []
    for begin in range(32):
        out, cache = ha.step(model, cache, tokens[:, begin : begin + 1])
        logits.append(np.asarray(out))
    assert np.abs(np.concatenate(logits, 1) - want).max() <= allowed
