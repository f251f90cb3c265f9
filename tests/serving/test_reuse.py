"""Prefill through a store: cold bits, and nothing computed twice."""

import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.serving.reuse import prefill_through
from hybrid_attn.testing import small_config

CONFIG = small_config("swa,csa")


@pytest.fixture(scope="module")
def model():
    return ha.Model(CONFIG, rngs=nnx.Rngs(0))


def cold(model, tokens, lengths):
    cache = ha.init_cache(CONFIG, len(tokens), 96)
    logits, _ = ha.prefill(model, cache, tokens, lengths, logits="last")
    return np.asarray(logits)


@pytest.mark.parametrize("recent", [0, 1, 2])
def test_prompts_that_part(model, recent):
    store = ha.store.open(f"memory://reuse{recent}/", model_id=ha.model_id(model))
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 80))
    tokens[1, :41] = tokens[0, :41]
    lengths = np.array([80, 75])
    restored = []
    for turn in range(2):
        for rows in ([0], [1], [0, 1]):
            logits, cache, reuse = prefill_through(
                store, model, tokens[rows], lengths[rows], capacity=96, recent=recent
            )
            want = cold(model, tokens[rows], lengths[rows])
            if recent:
                np.testing.assert_array_equal(logits, want)
            else:
                np.testing.assert_allclose(logits, want, atol=2e-5, rtol=2e-5)
            assert np.asarray(cache.length).tolist() == lengths[rows].tolist()
            restored.append(reuse.restored.tolist())
            assert (reuse.blocks == 0) == (turn > 0 or rows == [0, 1])
    if recent:
        # The second prompt shares 41 tokens: two blocks, kept or not kept at 32.
        assert restored[0] == [0] and restored[1] == [32]
        assert restored[2] == [64, 64]
    else:
        assert 0 < restored[2][0] < 64


def test_refuses(model):
    store = ha.store.open("memory://reuse/", model_id=ha.model_id(model))
    with pytest.raises(ValueError, match="expected at least 1 in every row"):
        prefill_through(store, model, np.zeros((1, 4), int), [0], capacity=16)
