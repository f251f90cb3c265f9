"""Writes GGUF files of small Llama models with the package gguf, for tests."""

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight").replace("model.layers.", "blk.")
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name + ".weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of half-split heads in the order of pairs, element by element."""
    out, size = np.empty_like(weight), len(weight) // heads
    for head in range(heads):
        for pair in range(size // 2):
            for member in (0, 1):
                row = head * size + member * (size // 2) + pair
                out[head * size + 2 * pair + member] = weight[row]
    return out


def metadata(config: dict) -> dict:
    """Fields of a GGUF file, from those of a config.json."""
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": 2048,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": head,
        "vocab_size": config["vocab_size"],
    }


def write(path: Path, fields: dict, tensors: dict, extra: dict | None = None) -> None:
    """Writes a file.

    Args:
      fields: without their prefix "llama.".
      tensors: array, or (bytes [rows, n], quantised type).
      extra: fields with their whole names.
    """
    writer = gguf.GGUFWriter(path, "llama")
    named = {f"llama.{name}": value for name, value in fields.items()}
    for name, value in (named | (extra or {})).items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_case(config: dict, tensors: dict) -> dict:
    """The tensors of a Hugging Face directory as a GGUF file has them."""
    out = {}
    for name, value in tensors.items():
        if name.endswith("q_proj.weight"):
            value = interleaved(value, config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            value = interleaved(value, config["num_key_value_heads"])
        out[gguf_name(name)] = value
    return out


def byte_level(texts: list[str], size: int = 600) -> tuple[tokenizers.Tokenizer, dict]:
    """A byte-level BPE as the package builds it, and its vocabulary and merges."""
    built = tokenizers.Tokenizer(BPE())
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(texts, trainer)
    return built, json.loads(built.to_str())["model"]


def tokenizer_fields(model: dict) -> dict:
    """The metadata that describes such a tokenizer."""
    order = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": order,
        "tokenizer.ggml.token_type": [3 if t == "<|end|>" else 1 for t in order],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
    }
