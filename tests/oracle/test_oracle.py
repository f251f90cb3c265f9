"""The library against the float64 oracle: training form and stepwise decoding."""

import numpy as np
import pytest

from hybrid_attn.testing import Subject, small_config

from .model import Oracle, frequencies, rotate

CONFIGS = {
    "dense": small_config("dense*2"),
    "swa": small_config("swa*2"),
    "hca": small_config("hca*2"),
    "csa": small_config("csa*2"),
    "hybrid": small_config("hca,swa,csa"),
    "ranks, own values, fixed decay, yarn": small_config(
        "hca:4,csa",
        kv_heads=2,
        shared_kv=False,
        query_rank=16,
        output_groups=2,
        output_rank=8,
        tie_embeddings=True,
        decay="fixed",
        yarn_factor=4.0,
        yarn_original_positions=16,
        compressed_rope_theta=1e3,
        index_rope_dims=8,
        hca_overlap=True,
    ),
    "bare": small_config(
        "swa,csa",
        query_norm=False,
        key_norm=False,
        sink=False,
        token_shift=False,
        decay="none",
        csa_overlap=False,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_against_oracle(name):
    subject = Subject(name, CONFIGS[name], rows=2, sequences=2, time=29)
    oracle = Oracle(subject.model)
    want = np.stack([oracle(row) for row in subject.tokens])
    limit = subject.table.relative * max(1.0, np.abs(want).max())
    np.testing.assert_allclose(subject.full, want, rtol=0, atol=limit)
    trained = subject.forward(subject.tokens)
    np.testing.assert_allclose(trained, want, rtol=0, atol=limit)
    cache, stepwise = subject.cache(), []
    for t in range(subject.time):
        logits, cache = subject.step(cache, subject.tokens[:, t : t + 1])
        stepwise.append(np.asarray(logits))
    stepwise = np.concatenate(stepwise, axis=1)
    np.testing.assert_allclose(stepwise, want, rtol=0, atol=limit)
    np.testing.assert_array_equal(stepwise.argmax(-1), want.argmax(-1))


def test_visibility_rule():
    """Entry j is read from position m·j + m - 1 on, and not before."""
    subject = Subject("hca", small_config("hca"), rows=1, sequences=1, time=17)
    oracle = Oracle(subject.model)
    base = oracle(subject.tokens[0])
    # Window 8 and ratio 8: at 15 the tokens 0..7 are heard through entry 0 alone.
    tokens = subject.tokens[0].copy()
    tokens[0] = (tokens[0] + 1) % 31
    moved = np.abs(subject.forward(tokens[None])[0] - subject.full[0]).max(-1)
    assert (moved[7:] > 1e-4).all()
    assert np.abs(oracle(tokens) - base).max(-1)[15] > 1e-4


def test_rotation_depends_on_distance_alone():
    rope = CONFIGS["swa"].layers[0].rope
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 8))
    angles = frequencies(rope, 4)
    near = rotate(q, 5, angles) @ rotate(k, 2, angles)
    far = rotate(q, 1005, angles) @ rotate(k, 1002, angles)
    np.testing.assert_allclose(near, far, atol=1e-12)
