"""The configuration: errors, resolved layers, identity; and the presets."""

import dataclasses
from typing import Any

import jax
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.config import HyperConfig, MoEConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0: expected a whole number from 1"),
        ({"hidden_size": 1.5}, "hidden_size=1.5: expected a whole number"),
        ({"window": -1}, "window=-1: expected"),
        ({"top_k": 0}, "top_k=0: expected"),
        ({"heads": 4, "kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"dense_kv_heads": 3}, "heads=4 is not a multiple of dense_kv_heads=3"),
        ({"output_groups": 3}, "heads=4 is not a multiple of output_groups=3"),
        ({"output_groups": 2}, "output_groups above 1 needs output_rank"),
        ({"rope_dims": 3}, r"rope_dims=3: expected an even number in 0\.\.16"),
        ({"rope_dims": 18}, r"rope_dims=18: expected an even number in 0\.\.16"),
        ({"index_rope_dims": 34}, r"index_rope_dims=34: .* in 0\.\.32"),
        ({"decay": "some"}, "decay='some': expected 'none', 'fixed' or 'learned'"),
        ({"decay_kinds": ("swa", "dense")}, "'dense' has no window to decay over"),
        ({"pattern": "swa,"}, "layer pattern 'swa,'"),
        ({"sink_key": True}, "sink_key needs values of their own"),
        (
            {"entries_in_window": False, "pattern": "csa,hca:256"},
            "hca:256 with entries_in_window=False: .* at most window=128",
        ),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        ha.ModelConfig(**changes)


def test_resolved_layers():
    config = ha.ModelConfig(
        pattern="dense,swa,hca,csa:8,swa:2",
        compressed_rope_theta=1.6e5,
        yarn_factor=4.0,
        decay="learned",
        decay_kinds=("swa", "csa"),
    )
    dense, swa, hca, csa, _ = config.layers
    assert (dense.window, dense.ratio, dense.kv_heads, dense.shared_kv) == (
        (0, 1, 2, False)
    )
    assert dense.features == 2 * 2 * 16
    assert (swa.window, swa.ratio, swa.features) == (128, 0, 16)
    assert (hca.ratio, hca.overlap, hca.top_k) == (128, False, 0)
    assert (csa.ratio, csa.overlap, csa.top_k) == (8, True, 64)
    assert [layer.decay for layer in config.layers[:4]] == [
        "none",
        "learned",
        "none",
        "learned",
    ]
    # As V4: plain theta in window layers, stretched theta where there are entries.
    assert (swa.rope.theta, swa.rope.yarn_factor) == (1e4, 1.0)
    assert (csa.rope.theta, csa.rope.yarn_factor) == (1.6e5, 4.0)


def test_identity():
    config = ha.ModelConfig()
    assert config.identity == config.replace(name="another").identity
    assert hash(config) == hash(ha.ModelConfig())
    for field in dataclasses.fields(config):
        if field.name == "name":
            continue
        old = getattr(config, field.name)
        new = {
            "rope_dims": 4,
            "kv_heads": 2,
            "dense_kv_heads": 4,
            "moe": MoEConfig(experts=4, chosen=2, width=8),
            "hyper": HyperConfig(),
        }.get(field.name)
        if new is None:
            if isinstance(old, bool):
                new = not old
            elif isinstance(old, int):
                new = old * 2
            elif isinstance(old, float):
                new = old + 0.5
            elif old is None:
                new = 2
            else:
                new = {
                    "pattern": "swa",
                    "decay": "fixed",
                    "decay_kinds": ("csa",),
                    "compute_dtype": "bfloat16",
                }.get(field.name)
        if new is None:
            pytest.fail(f"{field.name}: say how this test shall change it")
        needs = {"output_groups": {"output_rank": 4}, "sink_key": {"shared_kv": False}}
        extra: Any = needs.get(field.name, {})
        reference = config.replace(**extra)
        changed = config.replace(**extra, **{field.name: new})
        assert changed.identity != reference.identity, field.name


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ha.ModelConfig().heads = 2  # type: ignore[misc]


def test_unknown_kind():
    config = ha.ModelConfig(pattern="swa,cssa")
    with pytest.raises(ValueError, match=r"unknown mixer kind 'cssa'.*mean 'csa'"):
        ha.Model(config, rngs=nnx.Rngs(0))


def test_registering():
    with pytest.raises(ValueError, match="'my kind': expected an identifier"):
        ha.register_mixer("my kind", ha.Mixer)
    with pytest.raises(ValueError, match="'swa' is already SlidingMixer, got Mixer"):
        ha.register_mixer("swa", ha.Mixer)


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"preset 'huge': expected one of tiny_dense"):
        ha.presets.get("huge")


def _parameters(name: str) -> int:
    config = ha.presets.get(name)
    model = nnx.eval_shape(lambda: ha.Model(config, rngs=nnx.Rngs(0)))
    return sum(x.size for x in jax.tree.leaves(nnx.state(model)))


def test_tiny_presets_have_equal_size():
    counts = {n: _parameters(n) for n in ha.presets.names() if n.startswith("tiny_")}
    assert max(counts.values()) <= 1.05 * min(counts.values()), counts
    kinds = {n: {s.kind for s in ha.presets.get(n).layers} for n in counts}
    for kind in ("dense", "swa", "hca", "csa"):
        assert kinds[f"tiny_{kind}"] == {kind}
    assert [s.kind for s in ha.presets.get("tiny_hybrid").layers] == (
        ["hca", "swa", "csa"]
    )
