"""Drafts verified by one step and taken back by `rewind`: what the kinds leave out.

Every mixer kind meets `verified_drafts` in tests/test_conformance.py.
"""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.cache.states import UncompressedTail
from hybrid_attn.config import HyperConfig, MoEConfig
from hybrid_attn.testing import Subject, check_invariant, small_config
from hybrid_attn.testing.drafts import PAIRS, draft_phases, verified_drafts
from hybrid_attn.testing.states import map_states

CONFIGS = {
    "other overlaps": small_config(
        "hca,csa", hca_overlap=True, csa_overlap=False, token_shift=False, sink=False
    ),
    "a long group": small_config("hca:32", token_shift=False),
    "a window longer than a draft": small_config("swa,csa", window=24),
    "deepseek_v4": small_config(
        "swa,csa,hca",
        query_rank=16,
        output_groups=2,
        output_rank=8,
        token_shift=False,
        decay="none",
        compressed_rope_theta=1.6e5,
        swiglu_limit=10.0,
        moe=MoEConfig(experts=4, chosen=2, width=16, hash_layers=(0,)),
        hyper=HyperConfig(streams=2, iterations=4),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "a long group" else pytest.param(name, marks=pytest.mark.slow)
        for name in CONFIGS
    ],
)
def test_verified_drafts(name):
    check_invariant(verified_drafts, Subject(name, CONFIGS[name]))


def test_the_grid_is_whole():
    assert PAIRS[0] == (1, 0) and PAIRS[-1] == (16, 16)
    assert len(PAIRS) == len(set(PAIRS)) == sum(k + 1 for k in range(1, 17))
    assert draft_phases(Subject("long", CONFIGS["a long group"])) == 32


def test_default_undo():
    assert inspect.signature(ha.init_cache).parameters["undo"].default == 16
    assert ha.init_cache(ha.presets.get("tiny_hybrid"), 1, 64).spec.undo == 16


def test_a_frontier_without_undo_is_found(monkeypatch):
    """The invariant fails where a ring forgets what a draft wrote over."""
    rewind = ha.transforms.rewind

    def forgetful(cache, length):
        """Two rows of every frontier are lost."""
        back = rewind(cache, length)
        moved = np.asarray(cache.length) != np.asarray(back.length)

        def forget(array, grows):
            if grows or array.ndim != 3:
                return array
            lost = jnp.zeros_like(array[:, :2])
            return jnp.where(moved[:, None, None], array.at[:, :2].set(lost), array)

        return map_states(back, forget)

    subject = Subject("csa", small_config("csa"))
    tails = [
        state
        for layer in subject.cache().layers
        for state in layer.states.values()
        if isinstance(state, UncompressedTail)
    ]
    assert tails and all(tail.content.ndim == 3 for tail in tails)
    monkeypatch.setattr(ha.transforms, "rewind", forgetful)
    with pytest.raises(AssertionError, match="csa: verified_drafts: turn 0: "):
        check_invariant(verified_drafts, subject)


def test_rewind_beyond_the_floor_is_refused():
    config = small_config("hca,swa,csa")
    model = ha.Model(config, rngs=nnx.Rngs(0))
    tokens = np.arange(60).reshape(2, 30) % config.vocab_size
    cache = ha.init_cache(config, 2, 64)
    _, cache = ha.step(model, cache, tokens, np.array([30, 20]))
    assert np.asarray(cache.floor).tolist() == [14, 4]
    back = ha.transforms.rewind(cache, np.array([14, 4]))
    assert np.asarray(back.length).tolist() == [14, 4]
    with pytest.raises(ValueError, match=r"row 1 to 3: it holds 20 .* by 16 .* to 4"):
        ha.transforms.rewind(cache, np.array([14, 3]))
    # Floors do not fall: what was taken back may not be taken back again from there.
    with pytest.raises(ValueError, match=r"row 0 to 13: it holds 14 .* by 0 .* to 14"):
        ha.transforms.rewind(back, np.array([13, 4]))
