"""Makes tests/data from reference cases.

    python scripts/make_oracle_data.py DIRECTORY [--to tests/data] [--cases NAME ...]

DIRECTORY holds a folder for each case: config.json and model.safetensors in Hugging
Face's form, and case.safetensors with what transformers computed in float32 (input_ids,
logits, hidden.i, topk.i). The copies keep the model, the logits and the chosen sets
whole, and the hidden states at every `_STRIDE`-th position, in ``positions``.

The case smollm2 has real weights, which stay in the package that holds them: its
case.safetensors (input_ids, nll, last_logits) and tokens.json are copied, and
`scripts/add_smollm2_argmax.py` adds what only transformers can tell.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

_CASES = ("flash_tiny", "pro_tiny", "short_rates", "smollm2")
# Odd, so that every phase of the ratios is met.
_STRIDE = 25


def make(source: Path, target: Path) -> int:
    """Copies one case; returns its bytes."""
    target.mkdir(parents=True, exist_ok=True)
    if not (source / "model.safetensors").exists():
        for name in ("case.safetensors", "tokens.json"):
            (target / name).write_bytes((source / name).read_bytes())
        return sum(path.stat().st_size for path in target.iterdir())
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source / name, target / name)
    case = load_file(source / "case.safetensors")
    time = case["input_ids"].shape[1]
    positions = np.arange(0, time, _STRIDE)
    small = {"positions": positions.astype(np.int32)}
    for name, value in case.items():
        hidden = name.startswith("hidden.")
        small[name] = np.ascontiguousarray(value[:, positions]) if hidden else value
    # hidden.0 is the embedding, copied into every stream.
    small.pop("hidden.0")
    save_file(small, target / "case.safetensors")
    return sum(path.stat().st_size for path in target.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--to", type=Path, default=Path("tests/data"))
    parser.add_argument("--cases", nargs="*", default=_CASES)
    args = parser.parse_args()
    for name in args.cases:
        size = make(args.directory / name, args.to / name)
        print(f"{args.to / name}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
