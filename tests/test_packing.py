"""Packed documents: the training form, its gradients and its errors.

Every mixer kind also meets `packed_equals_separate` in tests/test_conformance.py.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.config import HyperConfig, MoEConfig
from hybrid_attn.model import forward_with_aux
from hybrid_attn.testing import Subject, check_invariant, small_config, tolerance
from hybrid_attn.testing.documents import Packing, packed_equals_separate
from hybrid_attn.testing.subject import randomise
from hybrid_attn.training.loss import model_loss, token_loss
from pallas_kernels.compressed_attention import xla as compressed_xla

# What the small conformance models leave out.
CONFIGS = {
    "own values, more heads": small_config("hca,csa", kv_heads=2, shared_kv=False),
    "other overlaps": small_config(
        "hca,csa", hca_overlap=True, csa_overlap=False, token_shift=False, sink=False
    ),
    "ratios": small_config("swa,csa:2,hca:4,hca:1,csa:1", decay="fixed", window=3),
    "deepseek_v4": small_config(
        "swa,csa,hca",
        query_rank=16,
        output_groups=2,
        output_rank=8,
        token_shift=False,
        decay="none",
        compressed_rope_theta=1.6e5,
        yarn_factor=4.0,
        yarn_original_positions=16,
        swiglu_limit=10.0,
        moe=MoEConfig(experts=4, chosen=2, width=16, hash_layers=(0,)),
        hyper=HyperConfig(streams=2, iterations=4),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_separate(name, record_property):
    result = check_invariant(packed_equals_separate, Subject(name, CONFIGS[name]))
    record_property("error", result.error)


@functools.cache
def long_model():
    config = small_config("dense,swa,hca,csa", hca_ratio=32, window=40, top_k=8)
    return randomise(ha.Model(config, rngs=nnx.Rngs(0)))


def test_long_rows(monkeypatch, record_property):
    """Windows read in bands and entries in blocks, edges anywhere in them."""
    monkeypatch.setattr(compressed_xla, "BLOCK", 16)
    run = functools.partial(jax.jit(ha.forward), long_model())
    time, rows = 200, 4
    packing = Packing(rows, time, [(200,), (33, 96, 1, 70), (65, 31), (32, 8)])
    tokens = np.random.default_rng(0).integers(0, 31, (rows, time)).astype(np.int32)
    want = np.zeros((rows, time, 31), np.float32)
    for single, _, place in packing.apart(tokens):
        place(np.asarray(run(single)), want)
    error = np.abs(np.asarray(run(tokens, packing.segment_ids)) - want).max()
    record_property("error", float(error))
    assert error <= tolerance().relative * max(1.0, np.abs(want).max())


@functools.cache
def small_model(pattern: str = "dense,swa,hca,csa"):
    return randomise(ha.Model(small_config(pattern), rngs=nnx.Rngs(0)))


DOCUMENTS = ((9, 9), (9, 3, 3, 3))


def _summed_loss(state, graph, tokens, targets, dense):
    """Σ over targets of nats + Σ over queries of the indexers' KL, of separate rows."""
    model = nnx.merge(graph, state)
    logits, aux = forward_with_aux(model, tokens, dense=dense)
    nats = token_loss(logits, targets)[0] * np.sum(targets >= 0)
    ratio = model.config.csa_ratio
    queries = tokens.shape[0] * max(0, tokens.shape[1] - ratio + 1)
    index = sum(layer["indexer_loss"] for layer in aux if "indexer_loss" in layer)
    return nats, index * queries


def test_gradients(record_property):
    """Those of packed rows are finite, and the sum over separate documents.

    With sparse layers that choose, and that read everything (indexer warm-up).
    """
    graph, state = nnx.split(small_model())
    packing = Packing(2, sum(DOCUMENTS[0]), DOCUMENTS)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 31, packing.segment_ids.shape).astype(np.int32)
    targets = np.roll(tokens, -1, axis=1)
    for row, begin, length in packing.documents:
        targets[row, begin + length - 1] = -1

    def loss(state, dense):
        model = nnx.merge(graph, state)
        return model_loss(model, tokens, targets, packing.segment_ids, dense=dense)

    queries = sum(max(0, n - 3) for _, _, n in packing.documents)
    counts = np.sum(targets >= 0), queries
    separate = []
    for length in sorted({n for _, _, n in packing.documents}):
        cut = [(r, slice(b, b + n)) for r, b, n in packing.documents if n == length]
        alone = [np.stack([x[where] for where in cut]) for x in (tokens, targets)]

        def summed(state, dense, alone=alone):
            parts = _summed_loss(state, graph, *alone, dense)
            return parts[0] / counts[0] + parts[1] / counts[1], parts

        separate.append(_gradient(summed))
    packed, worst = _gradient(loss), 0.0
    for dense in (jnp.asarray(False), jnp.asarray(True)):
        got, metrics = packed(state, dense)
        parts = [run(state, dense) for run in separate]
        nats, index = (sum(float(p[1][i]) for p in parts) for i in range(2))
        np.testing.assert_allclose(metrics.cross_entropy, nats / counts[0], rtol=1e-5)
        np.testing.assert_allclose(metrics.indexer_loss, index / counts[1], rtol=1e-5)
        want = jax.tree.map(lambda *leaves: sum(leaves), *(p[0] for p in parts))
        leaves = jax.tree.leaves_with_path(got), jax.tree.leaves(want)
        for (path, a), b in zip(*leaves, strict=True):
            a, b = np.asarray(a), np.asarray(b)
            assert np.isfinite(a).all()
            error = np.abs(a - b).max() / max(1.0, np.abs(b).max())
            assert error <= tolerance().relative, jax.tree_util.keystr(path)
            worst = max(worst, float(error))
    record_property("error", worst)


def _gradient(loss):
    return jax.jit(jax.grad(loss, has_aux=True))


@functools.cache
def forward(pattern: str = "hca,swa,csa"):
    return functools.partial(jax.jit(ha.forward), small_model(pattern))


TOKENS = np.random.default_rng(2).integers(0, 31, (4, 20)).astype(np.int32)


def test_one_document_is_none():
    got = forward()(TOKENS, np.full_like(TOKENS, 7))
    np.testing.assert_allclose(got, forward()(TOKENS), atol=2e-5)


def test_short_rows():
    """Fewer tokens than a group has: no entries at all."""
    tokens, ids = TOKENS[:, :3], np.array([[0, 1, 1]] * 4)
    got = np.asarray(forward("csa")(tokens, ids))
    want = forward("csa")(tokens[:, 1:])
    np.testing.assert_allclose(got[:, 1:], want, atol=2e-5)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros((4, 19), int), "segment_ids (4, 19): expected (4, 20)"),
        (np.zeros((20,), int), "segment_ids (20,): expected (4, 20)"),
        (jnp.zeros((4, 20)), "segment_ids are float32: expected integers"),
        (np.zeros((4, 20), bool), "segment_ids are bool: expected integers"),
    ],
)
def test_errors(ids, message):
    model = small_model("hca,swa,csa")
    calls = (
        lambda: ha.forward(model, TOKENS, ids),
        lambda: forward_with_aux(model, jnp.asarray(TOKENS), ids),
        lambda: model_loss(model, jnp.asarray(TOKENS), TOKENS, ids),
        lambda: jax.eval_shape(lambda x: ha.forward(model, TOKENS, x), ids),
    )
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
