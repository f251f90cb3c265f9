"""Bad input: a ValueError that names both sides, before any compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.testing import small_config

pytestmark = pytest.mark.xdist_group("small hybrid")
CONFIG = small_config("hca,csa")
TOKENS = np.arange(10, dtype=np.int32).reshape(2, 5)


@functools.cache
def model() -> ha.Model:
    return ha.Model(CONFIG, rngs=nnx.Rngs(0))


@functools.cache
def held() -> ha.Cache:
    return ha.step(model(), ha.init_cache(CONFIG, 2, 16, undo=4), TOKENS)[1]


CASES = {
    "capacity": (
        {"tokens": np.zeros((2, 12), int), "lengths": [1, 12]},
        r"row 1 holds 5 tokens and gets 12 more, beyond the capacity of 16",
    ),
    "token too large": (
        {"tokens": np.array([[0, 1], [2, 31]])},
        r"tokens\[1, 1\]=31: outside the vocabulary of 31",
    ),
    "token negative": (
        {"tokens": np.array([[0, -1], [2, 3]])},
        r"tokens\[0, 1\]=-1: outside the vocabulary of 31",
    ),
    "length too large": (
        {"lengths": [2, 6]},
        r"lengths\[1\]=6: expected 0\.\.5, the time axis",
    ),
    "length negative": ({"lengths": [-1, 2]}, r"lengths\[0\]=-1: expected 0\.\.5"),
    "fractional lengths": (
        {"lengths": np.array([1.5, 2.0])},
        "lengths are float64: expected integers",
    ),
    "fractional tokens": (
        {"tokens": TOKENS.astype(np.float32)},
        "tokens are float32: expected integers",
    ),
    "lengths for other rows": (
        {"lengths": [1, 2, 3]},
        r"lengths \(3,\): expected \(2,\), one per row",
    ),
    "one length for all": ({"lengths": 3}, r"lengths \(\): expected \(2,\)"),
    "batch": (
        {"tokens": np.zeros((3, 2), int)},
        "tokens have 3 rows, the cache has 2",
    ),
    "rank": ({"tokens": TOKENS[0]}, r"tokens \(5,\): expected \[batch, time\]"),
    "logits": ({"logits": "first"}, r"logits='first': expected one of \('all', 'la"),
}


@pytest.mark.parametrize("call", [ha.step, ha.prefill])
@pytest.mark.parametrize("name", CASES)
def test_refused_and_unharmed(name, call):
    changes, message = CASES[name]
    arguments = {"tokens": TOKENS, "lengths": None, **changes}
    if isinstance(arguments["lengths"], list):
        arguments["lengths"] = np.asarray(arguments["lengths"])
    cache = held()
    before = [np.array(x) for x in jax.tree.leaves(cache)]
    compiled = []

    def listen(event, seconds, **facts):
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.raises(ValueError, match=message):
            call(model(), cache, **arguments)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in compiled if "compile" in event]
    for leaf, old in zip(jax.tree.leaves(cache), before, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), old)


@pytest.mark.parametrize("call", [ha.step, ha.prefill])
def test_another_configs_cache(call):
    other = CONFIG.replace(name="other", window=16)
    cache = ha.init_cache(other, 2, 16)
    with pytest.raises(ValueError, match=r"config 'other'.*model has 'conform"):
        call(model(), cache, TOKENS)
    with pytest.raises(ValueError, match="expected a Cache, got tuple"):
        call(model(), (cache,), TOKENS)


def test_the_name_is_no_part_of_identity():
    cache = ha.init_cache(CONFIG.replace(name="renamed"), 2, 16, undo=4)
    assert np.asarray(ha.step(model(), cache, TOKENS)[1].length).tolist() == [5, 5]


def test_static_errors_inside_jit():
    step = jax.jit(lambda tokens: ha.step(model(), held(), tokens))
    with pytest.raises(ValueError, match="tokens have 3 rows, the cache has 2"):
        step(jnp.zeros((3, 2), jnp.int32))
    with pytest.raises(ValueError, match="tokens are float32: expected integers"):
        step(jnp.zeros((2, 2)))
    with pytest.raises(ValueError, match="prefill runs its own compiled blocks"):
        jax.jit(lambda tokens: ha.prefill(model(), held(), tokens))(TOKENS)


def test_padding_outside_the_vocabulary_is_no_error():
    tokens = TOKENS.copy()
    tokens[0, 3:] = [-7, 99]
    logits, cache = ha.step(model(), held(), tokens, np.array([3, 5]))
    assert np.isfinite(np.asarray(logits)).all()
    assert np.asarray(cache.faults).tolist() == [0, 0]


def test_up_to_the_last_place_of_the_capacity():
    _, cache = ha.step(model(), held(), np.zeros((2, 11), int))
    assert np.asarray(cache.length).tolist() == [16, 16]
    with pytest.raises(ValueError, match="row 0 holds 16 tokens and gets 1 more"):
        ha.step(model(), cache, np.zeros((2, 1), int))


def test_empty_steps():
    for call in (ha.step, ha.prefill):
        logits, cache = call(model(), held(), TOKENS[:, :0])
        assert logits.shape == (2, 0, 31)
        same = jax.tree.map(
            lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), cache, held()
        )
        assert all(jax.tree.leaves(same))
    with pytest.raises(ValueError, match="at least one token"):
        ha.forward(model(), jnp.zeros((2, 0), jnp.int32))


def test_logits_kinds_agree():
    lengths = np.array([5, 2])
    whole, _ = ha.step(model(), held(), TOKENS, lengths)
    want = np.asarray(whole)[np.arange(2), lengths - 1]
    for call in (ha.step, ha.prefill):
        last, cache = call(model(), held(), TOKENS, lengths, logits="last")
        np.testing.assert_allclose(np.asarray(last), want, atol=1e-5)
        none, other = call(model(), held(), TOKENS, lengths, logits="none")
        assert none is None
        assert np.asarray(other.length).tolist() == np.asarray(cache.length).tolist()
