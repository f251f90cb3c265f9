"""Identity: of token chains, and of models."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.store import Boundary, chain


def test_golden_digests():
    """Stored data is found by these."""
    digests = chain("m", "00000001", None, [1, 2, 3, 4, 5, 6, 7], 3)
    assert list(digests) == GOLDEN


GOLDEN = ["df4bdb55bee1f316c9237d35a8b84c49", "63c1b2318bfdab94892684c78d33464c"]


def test_a_digest_covers_every_token_up_to_its_boundary():
    ids = np.arange(40)
    base = chain("m", "00000001", None, ids, 8)
    assert len(base) == 5 and len(set(base)) == 5
    for position in range(40):
        other = ids.copy()
        other[position] += 1
        changed = chain("m", "00000001", None, other, 8)
        first = position // 8
        assert changed[:first] == base[:first]
        assert not set(changed[first:]) & set(base)


def test_ids_count_not_their_dtype_and_not_the_rest():
    ids = [5, 0, 7, 9, 11]
    base = chain("m", "00000001", None, ids, 2)
    assert len(base) == 2
    for same in (np.int32(ids), np.uint16(ids), jnp.array(ids), ids[:4], [*ids[:4], 1]):
        assert chain("m", "00000001", None, same, 2) == base


def test_no_two_settings_share_a_digest():
    ids = np.arange(8)
    settings = [
        ("m", "00000001", None, 4),
        ("n", "00000001", None, 4),
        ("m", "00000002", None, 4),
        ("m", "00000001", "", 4),
        ("m", "00000001", "tenant", 4),
        ("m0", "0000001", None, 4),
        ("m", "00000001", None, 8),
    ]
    found = [digest for m, c, s, b in settings for digest in chain(m, c, s, ids, b)]
    assert len(set(found)) == len(found)
    assert chain("m", "00000001", b"x", ids, 4) == chain("m", "00000001", "x", ids, 4)


def test_boundaries_know_their_place():
    first, second = chain("m", "00000001", None, np.arange(8), 4)
    assert (first.parent, first.index, first.length) == ("", 0, 4)
    assert (second.parent, second.index, second.length) == (first, 1, 8)
    copied = pickle.loads(pickle.dumps(second))
    assert isinstance(copied, Boundary)
    assert vars(copied) == vars(second) and copied == second
    # Own tokens alone: the same block after another one has the same digest.
    twice = chain("m", "00000001", None, [1, 2, 1, 2], 2)
    assert twice[0] != twice[1] and twice[0].tokens == twice[1].tokens


@pytest.mark.parametrize(
    "ids, block, message",
    [
        ([[1, 2]], 2, "one row of integer ids"),
        ([1.0, 2.0], 2, "one row of integer ids"),
        ([1, -2], 2, "ids from 0"),
        ([1, 2], 0, "block_tokens=0"),
    ],
)
def test_what_is_no_chain(ids, block, message):
    with pytest.raises(ValueError, match=message):
        chain("m", "00000001", None, ids, block)
    assert chain("m", "00000001", None, [], 4) == ()


def test_a_model_is_its_config_and_every_weight_byte():
    config = ha.presets.get("tiny_hybrid")
    model = ha.Model(config, rngs=nnx.Rngs(0))
    base = ha.model_id(model)
    assert base == ha.model_id(ha.Model(config, rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(model)
    for number in range(0, len(leaves), 7):
        changed = list(leaves)
        flat = np.array(leaves[number]).reshape(-1)
        flat[-1] = np.nextafter(flat[-1], np.float32(9))
        changed[number] = jnp.asarray(flat.reshape(leaves[number].shape))
        assert ha.model_id(jax.tree.unflatten(tree, changed)) != base
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    assert ha.model_id(half) != base


def test_an_abstract_model_has_no_identity():
    config = ha.presets.get("tiny_hybrid")
    model = nnx.eval_shape(lambda: ha.Model(config, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="is abstract"):
        ha.model_id(model)
    with pytest.raises(TypeError, match=r"expected a model with config\.identity"):
        ha.model_id({"weight": jnp.ones(2)})
