"""report.md and figures/ of an evaluation, from the files of its directory alone.

python -m experiments.evaluate_report DIR      writes them anew
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.reporting import save_figure, table
from experiments.workdir import write_atomic

MODEL_STAGE = "model"
COMMAND = "python -m experiments.evaluate --config=configs/evaluate.py --workdir=DIR"
_BLUE = "#0072B2"


def write_report(workdir: str | Path) -> Path:
    """Writes report.md and figures/*.png from summary.json and the stages.

    Returns:
      The path of report.md.

    Raises:
      FileNotFoundError: the evaluation is not finished.
    """
    workdir = Path(workdir)
    keys = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    environment = json.loads((workdir / "env.json").read_text(encoding="utf-8"))
    model = _stage(workdir, MODEL_STAGE)
    figures = workdir / "figures"
    figures.mkdir(exist_ok=True)
    parts = [
        f"# {model['model']}",
        f"```\n{COMMAND}\n```",
        f"{model['parameters']:,} parameters, layers `{model['layers']}`, from "
        f"`{model['file']}`. JAX {environment['jax']}, Python "
        f"{environment['python']}, {environment['device_kind']}; "
        f"{keys['total_seconds']:.0f} s. The config is in `config.json`.",
    ]
    if "text.perplexity" in keys:
        parts += _text(keys, figures)
    if "needle.recall" in keys:
        parts += _needle(workdir, keys, figures)
    if "generate.text" in keys:
        prompt = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
        prompt = prompt["config"]["generate"]["prompt"]
        quoted = "\n".join(
            f"    {line}" for line in (prompt + keys["generate.text"]).splitlines()
        )
        parts += [
            "## Greedy text",
            f"{keys['generate.tokens']} tokens after `{prompt}`:",
            quoted,
        ]
    report = workdir / "report.md"
    write_atomic(report, "\n\n".join(parts) + "\n")
    return report


def _text(keys: dict[str, Any], figures: Path) -> list[str]:
    bins = [
        (int(match[1]), int(match[2]), value)
        for key, value in keys.items()
        if (match := re.fullmatch(r"text\.nats\.(\d+)_(\d+)", key))
    ]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    edges = [bins[0][0], *(high for _, high, _ in bins)]
    axes.stairs([value for *_, value in bins], edges, color=_BLUE, linewidth=2)
    axes.set_xscale("symlog", base=2, linthresh=64)
    axes.set_xticks(edges, [str(edge) for edge in edges])
    axes.set_xlabel("position in the window, tokens")
    axes.set_ylabel("nats per token")
    axes.set_title("How context helps", loc="left")
    save_figure(figure, figures / "nats_by_position.png")
    return [
        "## Perplexity",
        f"{keys['text.perplexity']:.2f} per token ({keys['text.nats_per_token']:.3f} "
        f"nats), {keys['text.bits_per_byte']:.3f} bits per byte, over "
        f"{keys['text.tokens']:,} tokens of held-out text that the model may or may "
        "not have been trained on.",
        table(
            ["position", "nats per token"],
            [[f"{low}–{high - 1}", f"{value:.3f}"] for low, high, value in bins],
        ),
        "![Nats by position](figures/nats_by_position.png)",
    ]


def _needle(workdir: Path, keys: dict[str, Any], figures: Path) -> list[str]:
    cells = {
        (int(match[1]), int(match[2])): value
        for key, value in keys.items()
        if (match := re.fullmatch(r"needle\.recall\.(\d+)\.(\d+)", key))
    }
    lengths = sorted({length for length, _ in cells})
    depths = sorted({depth for _, depth in cells})
    grid = [[cells[length, depth] for length in lengths] for depth in depths]
    figure = Figure(
        figsize=(2.5 + 1.1 * len(lengths), 1.6 + 0.5 * len(depths)),
        layout="constrained",
    )
    axes = figure.subplots()
    axes.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            colour = "white" if value > 0.6 else "black"
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth} %" for depth in depths])
    axes.set_xlabel("length, tokens")
    axes.set_ylabel("depth of the needle")
    axes.set_title("Needles recalled", loc="left")
    save_figure(figure, figures / "needle_recall.png")
    trials = len(list((workdir / "stages").glob(f"needle.{lengths[0]}.*.json")))
    first = _stage(workdir, f"needle.{lengths[0]}.0")["asked"]
    digits = len(first[0]["answer"].strip())
    return [
        "## Needles",
        f"A sentence with a number of {digits} digits, hidden in held-out text and "
        "asked for at its end: recalled when every token of the number is the model's "
        f"first choice (guessing: {10.0**-digits:g}). Each cell is {trials} "
        f"haystack(s); over all of them {keys['needle.recall']:.2f}.",
        table(
            ["length", *(f"{depth} %" for depth in depths), "all", "nats per token"],
            [
                [
                    f"{length}",
                    *(f"{cells[length, depth]:.2f}" for depth in depths),
                    f"{keys[f'needle.recall.{length}']:.2f}",
                    f"{keys[f'needle.nats.{length}']:.3f}",
                ]
                for length in lengths
            ],
        ),
        "![Needles recalled](figures/needle_recall.png)",
    ]


def _stage(workdir: Path, name: str) -> dict[str, Any]:
    path = workdir / "stages" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["result"]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m experiments.evaluate_report DIR")
    print(write_report(sys.argv[1]))
