"""A row's bits do not depend on the other rows: blocks, experts, numbers, faults.

Every mixer kind meets `rows_keep_their_bits` in tests/test_conformance.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.config import HyperConfig, MoEConfig
from hybrid_attn.layers.moe import MoE
from hybrid_attn.testing import Subject, check_invariant, small_config
from hybrid_attn.testing.rows import rows_keep_their_bits
from hybrid_attn.testing.subject import randomise
from pallas_kernels.compressed_attention import xla as compressed_xla
from pallas_kernels.indexer_topk import xla as indexer_xla

MOE = MoEConfig(experts=8, chosen=3, width=12, hash_layers=(0,))
CONFIGS = {
    "experts": small_config("swa,csa,hca", moe=MOE, token_shift=False),
    "experts, bfloat16": small_config(
        "swa,csa,hca",
        moe=MOE,
        hyper=HyperConfig(streams=2, iterations=4),
        compute_dtype="bfloat16",
    ),
    "a long group": small_config("hca:32", token_shift=False),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if "bfloat16" in name else name
        for name in CONFIGS
    ],
)
def test_rows_keep_their_bits(name):
    check_invariant(rows_keep_their_bits, Subject(name, CONFIGS[name]))


def test_block_loops_run_as_far_as_the_longest_row(monkeypatch):
    """A short row beside one that makes every loop run over many blocks."""
    for module, name, block in (
        (compressed_xla, "BLOCK", 8),
        (indexer_xla, "BLOCK", 8),
        (indexer_xla, "DECODE_BLOCK", 8),
    ):
        monkeypatch.setattr(module, name, block)
    config = small_config("dense,hca,csa", name="rows in blocks", hca_ratio=4)
    model = randomise(ha.Model(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, 31, (4, 160)).astype(np.int32)
    run = ha.compile_step(model, donate=False)
    short = np.array([3, 50, 90, 17], np.int32)
    results = {}
    for name, lengths in (("short", short), ("long", np.array([3, 150, 90, 0]))):
        cache = ha.init_cache(config, 4, 192)
        first, cache = run(cache, tokens, lengths.astype(np.int32))
        second, cache = run(cache, tokens[:, :1])
        third, cache = run(cache, tokens[:, :9], np.array([9, 9, 1, 0], np.int32))
        results[name] = jax.tree.map(np.asarray, (second, third[:, :1], cache))
        results[name] += tuple(np.asarray(first)[row, : short[row]] for row in (0, 2))
    for a, b in zip(*map(jax.tree.leaves, results.values()), strict=True):
        rows = slice(None) if a.shape[0] != 4 else np.array([0, 2])
        assert a[rows].tobytes() == b[rows].tobytes()


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [1, 9])
def test_experts_sort_rows_and_keep_their_bits(hashed, dtype, columns):
    """The router chooses; where the others crowd, a row's place in a block moves."""
    moe = MoEConfig(experts=8, chosen=3, width=24, hash_layers=(0,))
    config = small_config("swa", hidden_size=32, moe=moe, compute_dtype=dtype)
    layer = MoE(config, hashed=hashed, rngs=nnx.Rngs(0))
    run = jax.jit(lambda x, tokens: layer(x, tokens, static=False))
    rows = 12
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, columns, 32)).astype(np.float32)
    tokens = rng.integers(0, 31, (rows, columns)).astype(np.int32)
    want = np.asarray(run(x, tokens), np.float32)
    kept = np.arange(rows) % 4 == 2
    first = np.flatnonzero(kept)[0]
    for case in range(4):
        other_x = rng.standard_normal(x.shape).astype(np.float32)
        other_tokens = rng.integers(0, 31, tokens.shape).astype(np.int32)
        if case == 1:  # every other row goes where the first kept one goes
            other_x[:], other_tokens[:] = x[first, 0], tokens[first, 0]
        elif case == 2:
            other_x[:] = np.nan
        elif case == 3:
            other_x[:] = np.inf
        got = run(
            np.where(kept[:, None, None], x, other_x),
            np.where(kept[:, None], tokens, other_tokens),
        )
        got = np.asarray(got, np.float32)
        assert got[kept].tobytes() == want[kept].tobytes(), case


def test_a_mixer_that_looks_across_rows_is_found():
    ha.register_mixer("across_rows", AcrossRows)
    subject = Subject("across_rows", small_config("across_rows"))
    with pytest.raises(AssertionError, match="rows_keep_their_bits: single tokens"):
        check_invariant(rows_keep_their_bits, subject)


class AcrossRows(ha.Mixer):
    """A fault: keys are centred over the batch, by a hair."""

    kind = "across_rows"

    def attend(self, inputs, states, span, *, dense):
        centre = 1e-3 * jnp.mean(inputs.x, axis=0, keepdims=True)
        inputs = inputs._replace(key_input=inputs.key_input - centre)
        partial, new = self.window_partial(inputs, states, span)
        return partial, new, {}
