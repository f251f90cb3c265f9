"""Makes reference cases of unusual DeepSeek-V4 shapes with transformers 5.24 and torch.

    python scripts/make_odd_cases.py DIRECTORY

Then `scripts/make_oracle_data.py DIRECTORY --cases odd_clamp odd_least odd_tied` makes
the copies in tests/data. Every parameter is random and non-trivial; the model is
written by transformers itself, in its release form (experts one by one).
"""

import argparse
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file
from transformers.models.deepseek_v4 import (  # pyright: ignore[reportMissingImports]
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
)

SWA = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
TOKENS = 150


def yarn(factor: float, positions: int) -> dict:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": positions,
        "beta_fast": 32,
        "beta_slow": 1,
    }


CASES = {
    # A clamp that bites, top-k above the entries, hash layers in between.
    "odd_clamp": dict(
        hidden_size=40,
        moe_intermediate_size=24,
        num_attention_heads=6,
        head_dim=24,
        q_lora_rank=20,
        o_groups=3,
        o_lora_rank=10,
        n_routed_experts=7,
        num_experts_per_tok=3,
        layer_types=[CSA, HCA, SWA, CSA],
        mlp_layer_types=["moe", "hash_moe", "moe", "hash_moe"],
        compress_rates={CSA: 2, HCA: 16},
        hc_mult=2,
        hc_sinkhorn_iters=3,
        sliding_window=5,
        index_n_heads=3,
        index_head_dim=12,
        index_topk=64,
        swiglu_limit=0.7,
        partial_rotary_factor=1 / 3,
        rope_parameters=yarn(4.0, 32),
        routed_scaling_factor=2.5,
    ),
    # One stream, one iteration, a window of one, all experts, one entry; no YaRN.
    "odd_least": dict(
        hidden_size=48,
        moe_intermediate_size=16,
        num_attention_heads=8,
        head_dim=16,
        q_lora_rank=24,
        o_groups=1,
        o_lora_rank=8,
        n_routed_experts=6,
        num_experts_per_tok=6,
        layer_types=[HCA, CSA, CSA],
        mlp_layer_types=["moe"] * 3,
        compress_rates={CSA: 6, HCA: 10},
        hc_mult=1,
        hc_sinkhorn_iters=1,
        hc_eps=1e-3,
        sliding_window=1,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=1,
        scoring_func="sigmoid",
        partial_rotary_factor=0.5,
        compress_rope_theta=5e3,
        rms_norm_eps=1e-3,
    ),
    # Tied embeddings, six streams, one expert of many, a window above the text.
    "odd_tied": dict(
        hidden_size=32,
        moe_intermediate_size=20,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=16,
        o_groups=4,
        o_lora_rank=6,
        n_routed_experts=16,
        num_experts_per_tok=1,
        layer_types=[SWA, HCA, CSA, HCA, CSA],
        compress_rates={CSA: 8, HCA: 4},
        hc_mult=6,
        sliding_window=200,
        index_n_heads=5,
        index_head_dim=8,
        index_topk=7,
        partial_rotary_factor=0.25,
        rope_parameters=yarn(40.0, 128),
        tie_word_embeddings=True,
    ),
}


def stable_topk(x, k, dim=-1, **_):
    """Ties go to the lowest index."""
    values, index = torch.sort(x + 0.0, dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), index.narrow(dim, 0, k)))


def randomise(model, config) -> None:
    for name, p in model.named_parameters():
        noise = torch.randn_like(p)
        if "norm" in name:
            p.copy_(1 + 0.3 * noise)
        elif p.ndim == 1:
            p.copy_(0.5 * noise)
        else:
            p.copy_((1.5 if "embed" in name else 1) * p.shape[-1] ** -0.5 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            for row in buffer:
                chosen = torch.randperm(config.n_routed_experts)
                row.copy_(chosen[: config.num_experts_per_tok])
        elif name.endswith("correction_bias"):
            buffer.copy_(0.2 * torch.randn_like(buffer))


@torch.no_grad()
def make(directory: Path, seed: int, fields: dict) -> None:
    torch.manual_seed(seed)
    config = DeepseekV4Config(
        vocab_size=61,
        max_position_embeddings=4096,
        num_hidden_layers=len(fields["layer_types"]),
        **fields,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    model = DeepseekV4ForCausalLM(config).eval()
    randomise(model, config)
    hidden, case = [], {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, args, out: hidden.append(out))
        if config.layer_types[i] == CSA:
            layer.self_attn.compressor.indexer.register_forward_hook(
                lambda _, args, out, i=i: case.update({f"topk.{i}": out.int()})
            )
    tokens = torch.randint(0, config.vocab_size, (2, TOKENS))
    case["logits"] = model(tokens, use_cache=False).logits
    case["input_ids"] = tokens.int()
    embedded = model.model.embed_tokens(tokens)
    case["hidden.0"] = embedded.unsqueeze(2).expand(-1, -1, config.hc_mult, -1)
    for i, x in enumerate(hidden[:-1], 1):
        case[f"hidden.{i}"] = x
    case[f"hidden.{len(hidden)}"] = model.model.norm(model.model.hc_head(hidden[-1]))
    model.save_pretrained(directory)
    whole = {name: value.contiguous() for name, value in case.items()}
    save_file(whole, directory / "case.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    torch.topk = stable_topk
    torch.Tensor.topk = stable_topk
    for seed, (name, fields) in enumerate(CASES.items()):
        make(directory / name, seed, fields)
        print(directory / name)


if __name__ == "__main__":
    main()
