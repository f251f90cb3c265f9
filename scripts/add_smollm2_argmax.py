"""Adds transformers' choices at every position to the case tests/data/smollm2.

    python -c "import hybrid_attn as ha; ha.weights.save('DIRECTORY', *ha.weights.load(
        'SmolLM2-135M-Instruct.Q4_1.gguf'))"
    python scripts/add_smollm2_argmax.py DIRECTORY [--case tests/data/smollm2]

The second command needs transformers 5.24 and torch. It refuses a model whose negative
log-likelihoods are not those of the case, and writes ``argmax`` int32[t].
"""

import argparse
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM  # pyright: ignore[reportMissingImports]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--case", type=Path, default=Path("tests/data/smollm2"))
    args = parser.parse_args()
    path = args.case / "case.safetensors"
    case = load_file(path)
    model = LlamaForCausalLM.from_pretrained(args.directory, dtype=torch.float32)
    tokens = case["input_ids"].long()
    logits = model.eval()(tokens).logits[0]
    nll = torch.nn.functional.cross_entropy(
        logits[:-1], tokens[0, 1:], reduction="none"
    )
    error = float((nll - case["nll"]).abs().max())
    print(f"largest error of a negative log-likelihood: {error:.2g} nats")
    if error > 1e-3:
        raise SystemExit("this is not the model of the case")
    case["argmax"] = logits.argmax(dim=-1).int()
    save_file(case, path)


if __name__ == "__main__":
    main()
