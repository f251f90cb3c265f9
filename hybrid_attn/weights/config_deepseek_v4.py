"""DeepSeek-V4: `config.json` of Hugging Face's and of the official form."""

from typing import Any

from hybrid_attn.config import HyperConfig, ModelConfig, MoEConfig
from hybrid_attn.weights.fields import ConfigError, Fields, expect

_KINDS = {
    "sliding_attention": "swa",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
# Fields with one supported value; absent means that value.
_FIXED = {
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
}


def from_json(values: dict[str, Any]) -> ModelConfig:
    """The model that a config.json describes.

    Raises:
      ConfigError: names the field that is missing or not supported.
    """
    fields = Fields(values)
    for field, only in _FIXED.items():
        expect(field, fields.get(field, only), only)
    dtype = fields.get("dtype", fields.get("torch_dtype", "float32"))
    rates = _rates(fields)
    kinds = _layer_kinds(fields, rates)
    rope = _rope(fields)
    try:
        return ModelConfig(
            name=fields.get("_name_or_path") or "deepseek_v4",
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            pattern=",".join(kinds),
            feed_forward_size=fields["moe_intermediate_size"],
            swiglu_limit=fields.get("swiglu_limit"),
            moe=MoEConfig(
                experts=fields["n_routed_experts"],
                chosen=fields["num_experts_per_tok"],
                width=fields["moe_intermediate_size"],
                scale=fields["routed_scaling_factor"],
                score=expect(
                    "scoring_func",
                    fields.get("scoring_func", "sqrtsoftplus"),
                    "sqrtsoftplus",
                    "sigmoid",
                ),
                hash_layers=_hash_layers(fields, len(kinds)),
            ),
            hyper=HyperConfig(
                streams=fields["hc_mult"],
                iterations=fields["hc_sinkhorn_iters"],
                eps=fields["hc_eps"],
            ),
            heads=fields["num_attention_heads"],
            dense_kv_heads=1,
            head_dim=fields["head_dim"],
            query_rank=fields["q_lora_rank"],
            output_groups=fields["o_groups"],
            output_rank=fields["o_lora_rank"],
            window=fields["sliding_window"],
            csa_ratio=rates["compressed_sparse_attention"],
            hca_ratio=rates["heavily_compressed_attention"],
            top_k=fields["index_topk"],
            index_heads=fields["index_n_heads"],
            index_dim=fields["index_head_dim"],
            norm_eps=fields["rms_norm_eps"],
            tie_embeddings=fields.get("tie_word_embeddings", False),
            tied_scale=1.0,
            compute_dtype=expect("dtype", dtype, "float32", "bfloat16"),
            **rope,
        )
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"config.json: {error}") from error


def _rates(fields: Fields) -> dict[str, int]:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    given = fields.get("compress_rates", {})
    unknown = sorted(set(given) - set(rates))
    if unknown:
        raise ConfigError(
            f"config.json: compress_rates names {unknown}; expected {sorted(rates)}"
        )
    rates.update(given)
    for short, name in (("csa", "compressed_sparse"), ("hca", "heavily_compressed")):
        old = fields.get(f"compress_rate_{short}")
        if old is not None:
            rates[f"{name}_attention"] = old
    return rates


def _layer_kinds(fields: Fields, rates: dict[str, int]) -> list[str]:
    count = fields["num_hidden_layers"]
    types = fields.get("layer_types")
    if types is None:
        if fields.get("compress_ratios") is None:
            # The fallback of Hugging Face's port is not the published schedule.
            raise ConfigError(
                "config.json: layer_types is missing, and compress_ratios too"
            )
        names = {0: "sliding_attention"} | {rate: name for name, rate in rates.items()}
        # Draft layers follow the model's.
        types = [
            names[expect("compress_ratios", ratio, *names)]
            for ratio in fields["compress_ratios"][:count]
        ]
    if len(types) != count:
        raise ConfigError(
            f"config.json: layer_types has {len(types)} layers, "
            f"num_hidden_layers={count}"
        )
    return [_KINDS[expect("layer_types", name, *_KINDS)] for name in types]


def _hash_layers(fields: Fields, count: int) -> tuple[int, ...]:
    types = fields.get("mlp_layer_types")
    if types is None:
        return tuple(range(min(count, fields.get("num_hash_layers", 3))))
    if len(types) != count:
        raise ConfigError(
            f"config.json: mlp_layer_types has {len(types)} layers, "
            f"num_hidden_layers={count}"
        )
    for name in types:
        expect("mlp_layer_types", name, "hash_moe", "moe")
    return tuple(i for i, name in enumerate(types) if name == "hash_moe")


def _rope(fields: Fields) -> dict[str, Any]:
    """The rotary fields of `ModelConfig`, from nested or from flat parameters."""
    head = fields["head_dim"]
    default = fields.get("qk_rope_head_dim", 64) / head
    factor = fields.get("partial_rotary_factor", default)
    given = fields.get("rope_parameters", {}) or fields.get("rope_scaling", {})
    if "main" in given and "compress" in given:
        main, compress = given["main"], given["compress"]
        forced = {}
    else:
        main = {"rope_theta": fields["rope_theta"], "partial_rotary_factor": factor}
        compress = {
            **given,
            "rope_theta": fields["compress_rope_theta"],
            "partial_rotary_factor": factor,
        }
        # The official release applies no attention factor, whatever YaRN would say.
        forced = {"attention_factor": 1.0}
    where = "rope_parameters"
    expect(f"{where}.main.rope_type", _rope_type(main), "default")
    kind = expect(
        f"{where}.compress.rope_type", _rope_type(compress), "default", "yarn"
    )
    dims = [int(head * p.get("partial_rotary_factor", 1.0)) for p in (main, compress)]
    expect(f"{where}.compress.partial_rotary_factor (channels)", dims[1], dims[0])
    result = {
        "rope_dims": dims[0],
        "rope_theta": float(main.get("rope_theta", 1e4)),
        "compressed_rope_theta": float(compress.get("rope_theta", 1e4)),
    }
    if kind == "yarn":
        compress = {**forced, **compress}
        expect(f"{where}.compress.truncate", compress.get("truncate", True), True)
        expect(
            f"{where}.compress.attention_factor", compress.get("attention_factor"), 1.0
        )
        yarn = Fields({f"{where}.compress.{k}": v for k, v in compress.items()})
        positions = yarn[f"{where}.compress.original_max_position_embeddings"]
        stretch = compress.get("factor")
        if stretch is None:
            stretch = fields["max_position_embeddings"] / positions
        result |= {
            "yarn_factor": float(stretch),
            "yarn_original_positions": positions,
            "yarn_beta_fast": float(compress.get("beta_fast") or 32),
            "yarn_beta_slow": float(compress.get("beta_slow") or 1),
        }
    return result


def _rope_type(parameters: dict[str, Any]) -> str:
    return parameters.get("rope_type", parameters.get("type", "default"))


def to_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model that DeepSeek-V4's form can express.

    Raises:
      ConfigError: names the field that the form does not have.
    """
    moe, hyper = config.moe, config.hyper
    if moe is None or hyper is None:
        raise ConfigError(
            f"{config.name}: moe and hyper are {moe} and {hyper}; DeepSeek-V4 has both"
        )
    other = sorted({layer.kind for layer in config.layers} - set(_NAMES))
    if other:
        raise ConfigError(
            f"{config.name}: pattern={config.pattern!r} has layers {other}; "
            f"DeepSeek-V4 has {sorted(_NAMES)}"
        )
    count = len(config.layers)
    fraction = config.rope_dims / config.head_dim
    compress: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": config.compressed_rope_theta or config.rope_theta,
        "partial_rotary_factor": fraction,
    }
    if config.yarn_factor > 1:
        compress |= {
            "rope_type": "yarn",
            "factor": config.yarn_factor,
            "original_max_position_embeddings": config.yarn_original_positions,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "attention_factor": 1.0,
        }
    values = {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "_name_or_path": config.name,
        "dtype": config.compute_dtype,
        **_FIXED,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": count,
        "layer_types": [_NAMES[layer.kind] for layer in config.layers],
        "compress_rates": {
            "compressed_sparse_attention": config.csa_ratio,
            "heavily_compressed_attention": config.hca_ratio,
        },
        "moe_intermediate_size": moe.width,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.chosen,
        "routed_scaling_factor": moe.scale,
        "scoring_func": moe.score,
        "mlp_layer_types": [
            "hash_moe" if i in moe.hash_layers else "moe" for i in range(count)
        ],
        "swiglu_limit": config.swiglu_limit,
        "hc_mult": hyper.streams,
        "hc_sinkhorn_iters": hyper.iterations,
        "hc_eps": hyper.eps,
        "num_attention_heads": config.heads,
        "head_dim": config.head_dim,
        "q_lora_rank": config.query_rank,
        "o_groups": config.output_groups,
        "o_lora_rank": config.output_rank,
        "sliding_window": config.window,
        "index_topk": config.top_k,
        "index_n_heads": config.index_heads,
        "index_head_dim": config.index_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": compress["rope_theta"],
        "partial_rotary_factor": fraction,
        "qk_rope_head_dim": config.rope_dims,
        "rope_parameters": {
            "main": {
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": fraction,
            },
            "compress": compress,
        },
    }
    _check_expressed(config, values)
    return values


def _check_expressed(config: ModelConfig, values: dict[str, Any]) -> None:
    """What the JSON says must be the model, field by field."""
    again = from_json(values)
    # Fields that say nothing about a model of this form.
    free = {"pattern", "dense_kv_heads", "decay_rate", "decay_kinds", "slot_bias"}
    free |= {"block_multiple", "index_rope_dims", "compressed_rope_theta"}
    if not config.tie_embeddings:
        free.add("tied_scale")
    if config.yarn_factor <= 1:
        free |= {"yarn_original_positions", "yarn_beta_fast", "yarn_beta_slow"}
    wrong = [
        f"{field}={getattr(config, field)!r}"
        for field in type(config).__dataclass_fields__
        if field not in free and getattr(config, field) != getattr(again, field)
    ]
    if config.layers != again.layers:
        wrong.append(f"pattern={config.pattern!r}")
    if wrong:
        raise ConfigError(
            f"{config.name}: DeepSeek-V4's config.json cannot say {', '.join(wrong)}"
        )
