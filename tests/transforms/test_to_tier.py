"""Moving between memories keeps every bit; disk keeps whole blocks."""

import jax
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn import transforms
from hybrid_attn.testing import small_config

CONFIG = small_config("swa,csa")


@pytest.fixture(scope="module")
def model():
    return ha.Model(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def filled(model):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 40))
    cache = ha.init_cache(CONFIG, 2, 64)
    _, cache = ha.prefill(model, cache, tokens, np.array([40, 9]), logits="none")
    return tokens, cache


def test_host_and_back(filled):
    _, cache = filled
    host = transforms.to_tier(cache, "host")
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(host)}
    assert kinds == {"pinned_host"}
    assert ha.cache_bytes(host).by_tier == {"host": ha.cache_bytes(cache).total}
    back = transforms.to_tier(host, "device")
    assert ha.diff(back, cache) is None
    assert ha.cache_bytes(back).by_tier == {"device": ha.cache_bytes(cache).total}
    # The version on the host stays valid beside the new one.
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(host))


def test_disk_and_back(model, filled):
    tokens, cache = filled
    store = ha.store.open("memory://tiers/", model_id=ha.model_id(model))
    parked = transforms.to_tier(cache, "disk", store=store, tokens=tokens)
    assert np.asarray(parked.prefix.verified).tolist() == [32, 0]
    assert (np.asarray(parked.prefix.generation)[0] >= 0).sum() > 0
    back = transforms.to_tier(parked, "host", store=store, config=CONFIG)
    assert np.asarray(back.length).tolist() == [32, 0]
    assert transforms.to_tier(parked, "disk") is parked
    _, want = ha.prefill(
        model, ha.init_cache(CONFIG, 2, 64), tokens, np.array([32, 0]), logits="none"
    )
    device = transforms.to_tier(back, "device")
    assert ha.diff(device, want.replace(floor=device.floor)) is None


def test_refusals(filled):
    tokens, cache = filled
    with pytest.raises(ValueError, match="tier='tape': expected one of"):
        transforms.to_tier(cache, "tape")
    with pytest.raises(ValueError, match="needs store= and tokens="):
        transforms.to_tier(cache, "disk", tokens=tokens)
