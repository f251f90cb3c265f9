"""The published configurations of DeepSeek-V4 (arXiv 2606.19348)."""

import functools

import jax
import pytest

import hybrid_attn as ha
from hybrid_attn.cache.states import CompressedKV, IndexerState
from hybrid_attn.sizes import count_parameters

LAYERS = {
    "deepseek_v4_flash": [0, 0] + [4, 128] * 20 + [4],
    "deepseek_v4_pro": [128, 128] + [4, 128] * 29 + [4],
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    config = ha.presets.get(name)
    assert [layer.ratio for layer in config.layers] == LAYERS[name]
    kinds = {0: "swa", 4: "csa", 128: "hca"}
    for layer, ratio in zip(config.layers, LAYERS[name], strict=True):
        assert layer.kind == kinds[ratio]
        assert layer.window == 128
        assert layer.overlap == (ratio == 4)
        yarn = layer.rope.yarn_factor, layer.rope.theta
        assert yarn == ((16.0, 1.6e5) if ratio else (1.0, 1e4))


def test_parameters():
    """Published: 284B, and 1.6T to two digits, which one draft layer would fill up."""
    flash, pro = (ha.presets.get(name) for name in LAYERS)
    assert count_parameters(flash) == pytest.approx(284e9, rel=0.01)
    count = count_parameters(pro)
    assert round(count / 1e12, 1) == 1.6
    drafted = count_parameters(pro.replace(pattern=pro.pattern + ",swa"))
    assert drafted == pytest.approx(1.6e12, rel=0.01)


@pytest.mark.parametrize(
    ("name", "expected"), [("deepseek_v4_flash", 6880), ("deepseek_v4_pro", 9848)]
)
def test_history_bytes_per_token(name, expected):
    config = ha.presets.get(name)
    make = functools.partial(
        ha.init_cache,
        config,
        1,
        1 << 20,
        dtypes={"entries": "bfloat16", "index": "bfloat16"},
    )
    cache = jax.eval_shape(make)
    total = 0
    for layer in cache.layers:
        for state in layer.states.values():
            if isinstance(state, CompressedKV | IndexerState):
                for field in state.growing:
                    array = getattr(state, field)
                    total += 0 if array is None else array.size * array.dtype.itemsize
    assert total == expected * cache.spec.capacity
