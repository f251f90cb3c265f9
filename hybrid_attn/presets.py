"""Named configurations.

The ``tiny_*`` presets have equal parameter counts within 5 %: the feed-forward
width makes up for what a mixer does not have.
"""

from typing import Any

from hybrid_attn.config import HyperConfig, ModelConfig, MoEConfig

_TINY = ModelConfig(
    name="tiny",
    vocab_size=256,
    hidden_size=64,
    heads=4,
    head_dim=16,
    kv_heads=4,
    dense_kv_heads=4,
    window=8,
    csa_ratio=4,
    hca_ratio=16,
    top_k=8,
    index_heads=4,
    index_dim=16,
    rope_dims=8,
    token_shift=True,
    slot_bias=4.0,
    decay="learned",
)


def _tiny(name: str, pattern: str, feed_forward_size: int) -> ModelConfig:
    return _TINY.replace(
        name=name, pattern=pattern, feed_forward_size=feed_forward_size
    )


def _deepseek_v4(
    name: str, *, experts: int, width: int, scale: float, **fields: Any
) -> ModelConfig:
    """The published configuration (arXiv 2606.19348, section 4.2.1; layer lists of
    the official config.json).
    """
    return ModelConfig(
        name=name,
        vocab_size=129280,
        feed_forward_size=width,
        swiglu_limit=10.0,
        moe=MoEConfig(
            experts=experts, chosen=6, width=width, scale=scale, hash_layers=(0, 1, 2)
        ),
        hyper=HyperConfig(streams=4, iterations=20, eps=1e-6),
        dense_kv_heads=1,
        head_dim=512,
        output_rank=1024,
        window=128,
        csa_ratio=4,
        hca_ratio=128,
        index_heads=64,
        index_dim=128,
        rope_dims=64,
        rope_theta=1e4,
        compressed_rope_theta=1.6e5,
        yarn_factor=16.0,
        yarn_original_positions=65536,
        compute_dtype="bfloat16",
        **fields,
    )


# Widths from `hybrid_attn.sizes.equal_size` with 128 for the largest, tiny_csa; a test
# holds them together.
_PRESETS = {
    "tiny_dense": lambda: _tiny("tiny_dense", "dense*3", 240),
    "tiny_swa": lambda: _tiny("tiny_swa", "swa*3", 260),
    "tiny_hca": lambda: _tiny("tiny_hca", "hca*3", 212),
    "tiny_csa": lambda: _tiny("tiny_csa", "csa*3", 128),
    "tiny_hybrid": lambda: _tiny("tiny_hybrid", "hca,swa,csa", 200),
    "peers_v4": lambda: ModelConfig(
        name="peers_v4",
        vocab_size=2048,
        hidden_size=256,
        pattern="swa*2,(csa,hca)*2",
        heads=8,
        head_dim=64,
        query_rank=128,
        output_groups=2,
        output_rank=64,
        window=128,
        csa_ratio=4,
        hca_ratio=128,
        top_k=64,
        index_heads=4,
        index_dim=32,
        rope_dims=16,
        compressed_rope_theta=1.6e5,
        feed_forward_size=512,
    ),
    "deepseek_v4_flash": lambda: _deepseek_v4(
        "deepseek_v4_flash",
        # 2 sliding, 21 sparse and 20 full-history layers.
        pattern="swa*2,(csa,hca)*20,csa",
        hidden_size=4096,
        heads=64,
        query_rank=1024,
        output_groups=8,
        top_k=512,
        experts=256,
        width=2048,
        scale=1.5,
    ),
    "deepseek_v4_pro": lambda: _deepseek_v4(
        "deepseek_v4_pro",
        # 30 sparse and 31 full-history layers.
        pattern="hca*2,(csa,hca)*29,csa",
        hidden_size=7168,
        heads=128,
        query_rank=1536,
        output_groups=16,
        top_k=1024,
        experts=384,
        width=3072,
        scale=2.5,
    ),
}


def names() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(_PRESETS)


def get(name: str) -> ModelConfig:
    """Returns the named configuration.

    Raises:
      ValueError: no such preset; names those there are.
    """
    if name not in _PRESETS:
        raise ValueError(f"preset {name!r}: expected one of {', '.join(_PRESETS)}")
    return _PRESETS[name]()
