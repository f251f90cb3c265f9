"""One geometry for both sides, and the arithmetic that makes them equal.

The peer has a mixture of experts, ours a dense SwiGLU. They are equal where it
counts for time per token: the width that one token passes through.
"""

import dataclasses

from hybrid_attn.config import ModelConfig

# Both vocabulary matrices counted in full, the peer then stays near 12.6M
# parameters and below 6M active ones; a larger vocabulary would not.
VOCABULARY = 2048
ACTIVE_LIMIT = 6_000_000

_LAYER_TYPES = {
    "swa": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}


@dataclasses.dataclass(frozen=True)
class Experts:
    """The peer's mixture of experts: counts, and channels of one expert."""

    routed: int = 16
    per_token: int = 3
    width: int = 128
    # transformers builds exactly one shared expert, whatever the config says.
    shared: int = 1

    @property
    def active_width(self) -> int:
        """Channels that one token passes through."""
        return (self.per_token + self.shared) * self.width


def feed_forward_parameters(hidden_size: int, width: int, layers: int) -> int:
    """Weights of SwiGLU feed-forwards: gate, up and down of every layer."""
    return 3 * hidden_size * width * layers


def check_equal_active(config: ModelConfig, experts: Experts) -> None:
    """Checks that a token passes through the same width on both sides.

    Raises:
        ValueError: it does not; names both widths.
    """
    if config.feed_forward_size != experts.active_width:
        raise ValueError(
            f"feed_forward_size={config.feed_forward_size} of {config.name}: expected"
            f" the peer's active width ({experts.per_token} + {experts.shared})"
            f" × {experts.width} = {experts.active_width}"
        )


def torch_model_fields(
    config: ModelConfig, experts: Experts, hyper_connections: bool = True
) -> dict:
    """Translates our configuration into fields of transformers' `DeepseekV4Config`.

    Args:
        config: our model; only `swa`, `csa` and `hca` layers.
        experts: the peer's feed-forward.
        hyper_connections: False gives the control with one residual stream and one
            Sinkhorn iteration, for a model without hyper-connections.

    Returns:
        Keyword arguments, JSON-ready.

    Raises:
        ValueError: a layer kind that DeepSeek-V4 does not have, or unequal sizes.
    """
    check_equal_active(config, experts)
    kinds = [layer.kind for layer in config.layers]
    unknown = sorted(set(kinds) - set(_LAYER_TYPES))
    if unknown:
        raise ValueError(
            f"layer kinds {unknown} of {config.name}: expected {sorted(_LAYER_TYPES)}"
        )
    if config.query_rank is None or config.output_rank is None:
        raise ValueError(
            f"query_rank={config.query_rank}, output_rank={config.output_rank} of"
            f" {config.name}: expected whole numbers, as DeepSeek-V4 has"
        )
    streams = {} if hyper_connections else {"hc_mult": 1, "hc_sinkhorn_iters": 1}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "q_lora_rank": config.query_rank,
        "o_groups": config.output_groups,
        "o_lora_rank": config.output_rank,
        "partial_rotary_factor": config.rope_dims / config.head_dim,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compressed_rope_theta or config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "layer_types": [_LAYER_TYPES[kind] for kind in kinds],
        "compress_rates": {
            _LAYER_TYPES["csa"]: config.csa_ratio,
            _LAYER_TYPES["hca"]: config.hca_ratio,
        },
        "sliding_window": config.window,
        "index_n_heads": config.index_heads,
        "index_head_dim": config.index_dim,
        "index_topk": config.top_k,
        # Hash routing needs a trained table; every layer routes by its scores.
        "mlp_layer_types": ["moe"] * len(kinds),
        "moe_intermediate_size": experts.width,
        "n_routed_experts": experts.routed,
        "num_experts_per_tok": experts.per_token,
        "n_shared_experts": experts.shared,
        "max_position_embeddings": 16384,
        **streams,
    }
