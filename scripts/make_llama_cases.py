"""Makes reference cases of the Llama family with transformers 5.24 and torch.

    python scripts/make_llama_cases.py [--to tests/data]

Each case is a folder as `save_pretrained` writes it (config.json, model.safetensors),
with case.safetensors: input_ids and the logits that transformers computed in float32.
Every parameter is random and non-trivial, norm weights included.
"""

import argparse
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file
from transformers import (  # pyright: ignore[reportMissingImports]
    LlamaConfig,
    LlamaForCausalLM,
)

TOKENS = 70
CASES = {
    # Grouped heads that are wider than hidden size / heads, its own head.
    "llama_tiny": dict(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-3,
        rope_theta=500.0,
    ),
    # Tied embeddings, one key/value head a query head, defaults elsewhere.
    "llama_tied": dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    ),
}


@torch.no_grad()
def make(directory: Path, seed: int, fields: dict) -> None:
    torch.manual_seed(seed)
    theta = fields.pop("rope_theta", 10000.0)
    rope = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(rope_parameters=rope, **fields)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    for name, p in model.named_parameters():
        noise = torch.randn_like(p)
        if "norm" in name:
            p.copy_(1 + 0.3 * noise)
        else:
            p.copy_((1.5 if "embed" in name else 1) * p.shape[-1] ** -0.5 * noise)
    tokens = torch.randint(0, config.vocab_size, (2, TOKENS))
    logits = model(tokens).logits
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    case = {"input_ids": tokens.to(torch.int32), "logits": logits.contiguous()}
    save_file(case, directory / "case.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("tests/data"))
    args = parser.parse_args()
    for seed, (name, fields) in enumerate(CASES.items()):
        make(args.to / name, seed, dict(fields))
        size = sum(path.stat().st_size for path in (args.to / name).iterdir())
        print(f"{args.to / name}: {size / 2**10:.0f} KiB")


if __name__ == "__main__":
    main()
