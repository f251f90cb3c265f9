"""Conversion of a tiny dense model: exact cases, mean pooling in float64, refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.weights import convert
from hybrid_attn.weights.conversion import _index_queries

TIME = 41
CONFIG = ha.ModelConfig(
    name="tiny",
    vocab_size=50,
    hidden_size=24,
    pattern="dense*3",
    feed_forward_size=32,
    heads=4,
    head_dim=8,
    kv_heads=2,
    dense_kv_heads=2,
    shared_kv=False,
    query_norm=False,
    key_norm=False,
    sink=False,
    rope_dims=8,
    tie_embeddings=True,
    tied_scale=1.0,
)


@pytest.fixture(scope="module")
def dense():
    return ha.Model(CONFIG, rngs=nnx.Rngs(3))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 50, (2, TIME)).astype(np.int32)


@pytest.fixture(scope="module")
def logits(dense, tokens):
    return np.asarray(ha.forward(dense, tokens))


def both_forms(config, model, tokens):
    """Logits of the training form, after a check that ragged steps give the same."""
    whole = np.asarray(ha.forward(model, tokens))
    cache, parts = ha.init_cache(config, tokens.shape[0], TIME), []
    for piece in np.split(tokens, [5, 6, 29], axis=1):
        part, cache = ha.step(model, cache, piece)[:2]
        parts.append(np.asarray(part))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-5)
    return whole


def test_a_window_as_long_as_the_text_is_dense(dense, tokens, logits):
    config, model = convert(CONFIG, dense, "swa*3", window=TIME)
    np.testing.assert_allclose(both_forms(config, model, tokens), logits, atol=1e-5)


@pytest.mark.parametrize("sinks", ["none", "logit", "key"])
def test_sinks_start_where_the_window_ends(dense, tokens, logits, sinks):
    """And they change what comes after, and layers that stay dense never."""
    window = 16
    config, model = convert(
        CONFIG, dense, "dense*2,swa", window=window, sinks=sinks, calibration=tokens
    )
    got = both_forms(config, model, tokens)
    if sinks != "logit":
        np.testing.assert_allclose(got[:, :window], logits[:, :window], atol=1e-5)
    bare = ha.forward(
        *[convert(CONFIG, dense, "dense*2,swa", window=window)[1], tokens]
    )
    changed = np.abs(got - np.asarray(bare)).max(axis=(0, 2))
    assert (changed[window:] > 1e-4).all() == (sinks != "none")


def test_the_sink_key_is_the_first_tokens_own(dense, tokens):
    """Window and first token make one softmax: in float64, of the first layer."""
    window, first = 8, np.repeat(tokens[:1], 2, axis=0)
    _, model = convert(
        CONFIG, dense, "swa,dense*2", window=window, calibration=first[:, :1]
    )
    read = lambda t: [0, *range(max(1, t - window + 1), t + 1)]  # noqa: E731
    want = _attention(dense, first[0], lambda t: [([s], s) for s in read(t)])
    _compare_first_layer(model, first[:1], want)


def test_means_of_single_tokens_are_dense(dense, tokens, logits):
    """Window and entries are then the tokens themselves, each read once."""
    config, model = convert(CONFIG, dense, "hca:1*3", window=5)
    np.testing.assert_allclose(both_forms(config, model, tokens), logits, atol=1e-5)


@pytest.mark.parametrize("ratio", [1, 3])
def test_plain_means_in_float64(dense, tokens, ratio):
    """The window, and the means of all closed groups, in one softmax."""
    window = 5
    _, model = convert(
        CONFIG, dense, f"hca:{ratio},dense*2", window=window, entries="plain"
    )

    def read(t):
        near = [([s], s) for s in range(max(0, t - window + 1), t + 1)]
        groups = range((t + 1) // ratio)
        return near + [(range(g * ratio, (g + 1) * ratio), g * ratio) for g in groups]

    _compare_first_layer(model, tokens[:1], _attention(dense, tokens[0], read))


@pytest.mark.parametrize("ratio", [2, 5])
def test_means_of_tokens_read_once_in_float64(dense, tokens, ratio):
    """Groups whose first token left the window, the tokens after them, no others."""
    window = 5
    _, model = convert(CONFIG, dense, f"hca:{ratio},dense*2", window=window)

    def read(t):
        groups = [g for g in range(TIME) if g * ratio <= t - window]
        near = range(len(groups) * ratio, t + 1)
        return [([s], s) for s in near] + [
            (range(g * ratio, (g + 1) * ratio), g * ratio) for g in groups
        ]

    want = _attention(dense, tokens[0], read, counted=True)
    _compare_first_layer(model, tokens[:1], want)


def test_packed_documents_read_tokens_once(dense, tokens):
    _, model = convert(
        CONFIG, dense, "hca:3,csa:2,swa", window=5, top_k=3, calibration=tokens
    )
    split = 19
    segments = (np.arange(TIME) >= split).astype(np.int32)[None]
    packed = np.asarray(ha.forward(model, tokens[:1], segments))
    apart = [ha.forward(model, part) for part in np.split(tokens[:1], [split], axis=1)]
    np.testing.assert_allclose(packed, np.concatenate(apart, axis=1), atol=1e-5)


def test_routing_to_every_entry_is_hca(dense, tokens):
    pooled, routed = (
        convert(
            CONFIG,
            dense,
            f"dense,{kind}:4,{kind}:2",
            window=6,
            top_k=TIME,
            calibration=tokens,
        )
        for kind in ("hca", "csa")
    )
    np.testing.assert_allclose(
        both_forms(*routed, tokens), both_forms(*pooled, tokens), atol=1e-5
    )


def test_routing_reads_the_entries_of_the_best_products(dense, tokens):
    """Unrotated queries times mean keys, positive parts summed over heads."""
    ratio, top_k = 3, 2
    config, model = convert(
        CONFIG, dense, f"csa:{ratio},dense*2", window=4, top_k=top_k
    )
    cache = ha.init_cache(config, 1, TIME)
    report: Any = ha.step(model, cache, tokens[:1], aux=True)[-1]
    chosen = np.asarray(report[0]["chosen"])[0]
    query, key, _ = _projections(dense, tokens[0])
    for t in range(ratio - 1, TIME):
        # Groups whose first token has left the window.
        groups = max(0, t - 1) // ratio
        means = key[: groups * ratio].reshape(-1, ratio, 2, 8).mean(1)
        heads = np.repeat(means, 2, axis=1)
        scores = np.maximum(np.einsum("nh,enh->en", query[t], heads), 0).sum(1)
        best = np.argsort(-scores, kind="stable")[:top_k]
        assert set(best) == set(chosen[t][chosen[t] >= 0])


def test_caches_are_smaller(dense):
    capacity = 4096
    total = {
        pattern: ha.cache_bytes(
            ha.init_cache(convert(CONFIG, dense, pattern)[0], 1, capacity, undo=0)
        ).total
        for pattern in ("dense*3", "dense,csa:4*2", "dense,hca:8*2", "dense,swa*2")
    }
    assert list(total.values()) == sorted(total.values(), reverse=True)
    assert total["dense,swa*2"] < 0.5 * total["dense*3"]


def test_arrays_are_shared(dense):
    _, model = convert(CONFIG, dense, "swa,dense,hca:2")
    assert model.embedding[...] is dense.embedding[...]
    assert not any(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)
    )


def test_index_queries_lie_on_their_key_heads():
    weight = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 12)
    placed = np.asarray(_index_queries(jnp.asarray(weight), 4, 2)).reshape(2, 4, 2, 3)
    for head in range(4):
        own = weight.reshape(2, 4, 3)[:, head]
        np.testing.assert_array_equal(placed[:, head, head // 2], own)
        assert not placed[:, head, 1 - head // 2].any()


@pytest.mark.parametrize(
    ("changes", "pattern", "kwargs", "message"),
    [
        ({}, "swa*2", {}, "has 2 layers, the model 3"),
        ({}, "swa*2,mine", {}, r"\['mine'\]: expected kinds of dense, swa, hca, csa"),
        ({"pattern": "dense,swa*2"}, "swa*3", {}, r"has layers \['swa'\]"),
        ({"key_norm": True}, "hca:4*3", {}, "key_norm: its layers cannot be pooled"),
        ({}, "swa*3", {"sinks": "key"}, "'key' needs calibration tokens"),
        ({}, "swa*3", {"sinks": "some"}, "sinks='some': expected"),
        ({}, "swa*3", {"entries": "some"}, "entries='some': expected"),
        ({}, "hca:8*3", {"window": 4}, "hca:8 .* groups of at most window=4"),
        (
            {},
            "swa*3",
            {"sinks": "logit", "window": 8, "calibration": np.zeros((1, 8), int)},
            "at least 9 tokens",
        ),
    ],
)
def test_refuses(dense, changes, pattern, kwargs, message):
    with pytest.raises(ValueError, match=message):
        convert(CONFIG.replace(**changes), dense, pattern, **kwargs)


def test_no_family_has_the_converted_form(dense, tmp_path):
    with pytest.raises(ValueError, match="Llama has 'dense' alone"):
        ha.weights.save(tmp_path, *convert(CONFIG, dense, "dense*2,swa"))


# -- the first layer in float64 --------------------------------------------------------


def _projections(model, tokens):
    """Unrotated query [t, n, h], key and value [t, k, h] of the first layer."""
    x = np.asarray(model.embedding[...], np.float64)[tokens]
    block = model.blocks[0]
    scale = np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm_eps)
    y = x / scale * np.asarray(block.mixer_norm.weight[...], np.float64)
    query = y @ np.asarray(block.mixer.query_up.weight[...], np.float64)
    both = y @ np.asarray(block.mixer.key_value.project.weight[...], np.float64)
    key, value = np.split(both, 2, axis=1)
    return query.reshape(-1, 4, 8), key.reshape(-1, 2, 8), value.reshape(-1, 2, 8)


def _turn(x, position):
    """Interleaved rotation of [n, h] by the angles of a position."""
    angle = position / CONFIG.rope_theta ** (np.arange(0, 8, 2) / 8)
    z = (x[:, ::2] + 1j * x[:, 1::2]) * np.exp(1j * angle)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def _attention(model, tokens, read, *, counted=False):
    """float64[t, d] of the first mixer; read(t): [(tokens of a mean, its position)].

    Where ``counted``, a mean has the weight of its tokens.
    """
    query, key, value = _projections(model, tokens)
    out = np.zeros((len(tokens), 4, 8))
    for t in range(len(tokens)):
        sources = read(t)
        keys = [_turn(key[list(group)].mean(0), at) for group, at in sources]
        values = np.stack([value[list(group)].mean(0) for group, _ in sources])
        for head in range(4):
            logit = np.stack(keys)[:, head // 2] @ _turn(query[t], t)[head] / 8**0.5
            weight = np.exp(logit - logit.max())
            if counted:
                weight = weight * [len(group) for group, _ in sources]
            out[t, head] = weight / weight.sum() @ values[:, head // 2]
    up = np.asarray(model.blocks[0].mixer.output_up.weight[...], np.float64)
    return out.reshape(len(tokens), -1) @ up


def _compare_first_layer(model, tokens, want):
    from hybrid_attn.cache.span import Span

    block = model.blocks[0]
    y = block.mixer_norm(model.embed(tokens))
    got, _, _ = block.mixer(y, None, Span.training(1, tokens.shape[1]))
    np.testing.assert_allclose(np.asarray(got)[0], want, atol=1e-5)
