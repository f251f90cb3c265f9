"""Llama: `config.json` of Hugging Face's form, and the metadata of GGUF files."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hybrid_attn.config import ModelConfig
from hybrid_attn.weights.fields import ConfigError, Fields, expect
from hybrid_attn.weights.files import Stored

# Fields with one supported value; absent means that value.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "quantization_config": None,
}
# The same for GGUF, without the architecture's prefix.
_FIXED_GGUF = {
    "rope.scaling.type": "none",
    "rope.scale_linear": 1.0,
    "expert_count": 0,
    "use_parallel_residual": False,
}
_DTYPES = ("float32", "bfloat16", "float16")


def from_json(values: dict[str, Any]) -> ModelConfig:
    """The model that a config.json describes.

    Raises:
      ConfigError: names the field that is missing or not supported.
    """
    fields = Fields(values)
    for field, only in _FIXED.items():
        expect(field, fields.get(field, only), only)
    heads = fields["num_attention_heads"]
    return _config(
        fields,
        name=fields.get("_name_or_path") or "llama",
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        layers=fields["num_hidden_layers"],
        width=fields["intermediate_size"],
        heads=heads,
        kv_heads=fields.get("num_key_value_heads", heads),
        head_dim=fields.get("head_dim"),
        theta=_theta(fields),
        eps=fields.get("rms_norm_eps", 1e-6),
        tied=fields.get("tie_word_embeddings", False),
        dtype=expect(
            "dtype",
            fields.get("dtype", fields.get("torch_dtype", "float32")),
            *_DTYPES,
        ),
    )


def _theta(fields: Fields) -> float:
    for where in ("rope_parameters", "rope_scaling"):
        given = fields.get(where, {})
        if not isinstance(given, dict):
            raise ConfigError(f"config.json: {where}={given!r}: expected an object")
        kind = given.get("rope_type", given.get("type", "default"))
        expect(f"{where}.rope_type", kind, "default")
        expect(
            f"{where}.partial_rotary_factor",
            given.get("partial_rotary_factor", 1.0),
            1.0,
        )
    nested = fields.get("rope_parameters", {}).get("rope_theta")
    return fields.get("rope_theta", 1e4) if nested is None else nested


def from_gguf(
    values: Mapping[str, Any], tensors: Mapping[str, Stored], where: str
) -> ModelConfig:
    """The model that the metadata of a GGUF file describes.

    Args:
      values: the metadata.
      tensors: by name; without ``output.weight`` the embeddings are tied.
      where: names the file in errors.

    Raises:
      ConfigError: names the file and the field that is missing or not supported.
    """
    fields = Fields(dict(values), where)
    expect(
        "general.architecture",
        fields.get("general.architecture"),
        "llama",
        where=where,
    )
    for field, only in _FIXED_GGUF.items():
        field = f"llama.{field}"
        expect(field, fields.get(field, only), only, where=where)
    heads = fields["llama.attention.head_count"]
    embedding = tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else None
    config = _config(
        fields,
        name=fields.get("general.name", "llama"),
        vocab_size=fields.get("llama.vocab_size", rows),
        hidden_size=fields["llama.embedding_length"],
        layers=fields["llama.block_count"],
        width=fields["llama.feed_forward_length"],
        heads=heads,
        kv_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=fields.get("llama.attention.key_length"),
        # Stored as float32: the shortest decimal is what was meant.
        theta=_shortest(fields.get("llama.rope.freq_base", 1e4)),
        eps=_shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        tied="output.weight" not in tensors,
        dtype="float32",
    )
    for field in ("llama.attention.value_length", "llama.rope.dimension_count"):
        value = fields.get(field, config.head_dim)
        expect(field, value, config.head_dim, where=where)
    return config


def _shortest(value: Any) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _config(fields: Fields, **given: Any) -> ModelConfig:
    where = fields.where
    for name in ("vocab_size", "hidden_size", "layers", "width", "heads", "kv_heads"):
        value = given[name]
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{where}: {name}={value!r}: expected a number from 1")
    heads, size, head_dim = given["heads"], given["hidden_size"], given["head_dim"]
    if head_dim is None:
        if size % heads:
            raise ConfigError(
                f"{where}: hidden size {size} is not a multiple of {heads} heads, and "
                "no head_dim is given"
            )
        head_dim = size // heads
    try:
        return ModelConfig(
            name=given["name"],
            vocab_size=given["vocab_size"],
            hidden_size=size,
            pattern=f"dense*{given['layers']}",
            feed_forward_size=given["width"],
            heads=heads,
            head_dim=head_dim,
            # Layers that are swapped for others keep the heads.
            kv_heads=given["kv_heads"],
            dense_kv_heads=given["kv_heads"],
            shared_kv=False,
            query_norm=False,
            key_norm=False,
            sink=False,
            index_dim=head_dim,
            rope_dims=head_dim,
            rope_theta=float(given["theta"]),
            norm_eps=float(given["eps"]),
            tie_embeddings=given["tied"],
            tied_scale=1.0,
            compute_dtype=given["dtype"],
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def to_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model that Llama's form can express.

    Raises:
      ConfigError: names the fields that the form does not have.
    """
    other = sorted({layer.kind for layer in config.layers} - {"dense"})
    if other:
        raise ConfigError(
            f"{config.name}: pattern={config.pattern!r} has layers {other}; Llama has "
            "'dense' alone"
        )
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "_name_or_path": config.name,
        "dtype": config.compute_dtype,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.feed_forward_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.dense_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
    _check_expressed(config, values)
    return values


# What a layer of this form depends on.
_EXPRESSED = (
    "name vocab_size hidden_size feed_forward_size heads head_dim dense_kv_heads "
    "rope_dims rope_theta norm_eps tie_embeddings compute_dtype moe hyper swiglu_limit "
    "query_rank output_groups output_rank query_norm key_norm sink token_shift"
).split()


def _check_expressed(config: ModelConfig, values: dict[str, Any]) -> None:
    """What the JSON says must be the model, field by field."""
    again = from_json(values)
    compared = [*_EXPRESSED, *(["tied_scale"] if config.tie_embeddings else [])]
    wrong = [
        f"{field}={getattr(config, field)!r}"
        for field in compared
        if getattr(config, field) != getattr(again, field)
    ]
    for layer in config.layers:
        rope = layer.rope
        stretched = rope.theta != config.rope_theta or rope.yarn_factor > 1
        if layer.ratio != 1 or layer.decay != "none" or stretched:
            wrong.append(f"pattern={config.pattern!r}")
            break
    if wrong:
        raise ConfigError(
            f"{config.name}: Llama's config.json cannot say {', '.join(wrong)}"
        )
