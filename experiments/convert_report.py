"""report.md and the figure of a conversion, from the files of its directory alone.

python -m experiments.convert_report DIR      writes them anew
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.reporting import save_figure, table
from experiments.workdir import write_atomic

COMMAND = "python -m experiments.convert --config=configs/convert.py --workdir=DIR"
_BLUE, _ORANGE = "#0072B2", "#D55E00"


def write_report(workdir: str | Path) -> Path:
    """Writes report.md and figures/quality_by_bytes.png from the summary and stages.

    Returns:
      The path of report.md.

    Raises:
      FileNotFoundError: the conversion is not finished.
    """
    workdir = Path(workdir)
    keys = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    environment = json.loads((workdir / "env.json").read_text(encoding="utf-8"))
    config = json.loads((workdir / "config.json").read_text(encoding="utf-8"))["config"]
    figures = workdir / "figures"
    figures.mkdir(exist_ok=True)
    _figure(keys, figures / "quality_by_bytes.png")
    needle, text = config["needle"], config["text"]
    needles = len(needle["lengths"]) * len(needle["depths"]) * needle["trials"]
    first = keys["original"]
    parts = [
        f"# {keys['model']}, converted without training",
        f"```\n{COMMAND}\n```",
        f"Perplexity of {text['windows']} windows of {text['length']} tokens; "
        f"{needles} needles in haystacks of {_listed(needle['lengths'])} tokens, so "
        f"one needle is {1 / needles:.2f} of recall. Bytes are those of a float32 "
        f"cache of {keys['context']} tokens (one row, no undo span), the states at the "
        "last boundary included, which count a window twice. "
        f"JAX {environment['jax']}, Python {environment['python']}, "
        f"{environment['device_kind']}; {keys['total_seconds']:.0f} s.",
        table(
            [
                "variant",
                "bytes/token",
                f"of {first}",
                "perplexity",
                f"over {first}",
                "recall",
                "nats of an answer's token",
            ],
            [
                [
                    name,
                    f"{keys[f'{name}.bytes_per_token']:,.0f}",
                    f"{keys[f'{name}.cache_share']:.3f}",
                    f"{keys[f'{name}.perplexity']:.3f}",
                    f"{keys[f'{name}.perplexity_ratio']:.3f}",
                    f"{keys[f'{name}.recall']:.2f}",
                    f"{keys[f'{name}.answer_nats']:.3f}",
                ]
                for name in keys["variants"]
            ],
        ),
        "![Quality against cache bytes](figures/quality_by_bytes.png)",
        "## Best of their size",
        _best(keys),
        "## Patterns",
        table(
            ["variant", "window", "sinks", "entries", "top k", "layers"],
            [_described(config, name) for name in keys["variants"]],
        ),
        *_saved(workdir, config),
    ]
    report = workdir / "report.md"
    write_atomic(report, "\n\n".join(parts) + "\n")
    return report


def _best(keys: dict[str, Any]) -> str:
    """Which variants no other beats in bytes, perplexity and the answers' nats."""
    measures = ("bytes_per_token", "perplexity", "answer_nats")
    points = {v: [keys[f"{v}.{m}"] for m in measures] for v in keys["variants"]}

    def beaten_by(name: str) -> list[str]:
        own = points[name]
        return [
            other
            for other, point in points.items()
            if point != own and all(a <= b for a, b in zip(point, own, strict=True))
        ]

    best = [name for name in points if not beaten_by(name)]
    lines = [
        "No other variant has fewer bytes, a lower perplexity and fewer nats for "
        f"answers: {_listed(best)}."
    ]
    lines += [
        f"- {name} is beaten in all three by {_listed(beaten_by(name))}."
        for name in points
        if name not in best
    ]
    return "\n".join([lines[0], "", *lines[1:]]).rstrip()


def _described(config: dict[str, Any], name: str) -> list[str]:
    variant = config["variants"][name]
    pattern = variant["pattern"]
    return [
        name,
        str(variant["window"] or config["window"]),
        variant["sinks"],
        variant["entries"],
        str(variant["top_k"] or config["top_k"]) if "csa" in pattern else "",
        f"`{pattern}`",
    ]


def _saved(workdir: Path, config: dict[str, Any]) -> list[str]:
    if not config["save"]:
        return []
    lines = []
    for name in config["save"]:
        path = workdir / "stages" / f"{name}.saved.json"
        result = json.loads(path.read_text(encoding="utf-8"))["result"]
        where = result.get("directory")
        lines.append(
            f"- {name}: `{where}`" if where else f"- {name}: {result['refused']}"
        )
    return ["## Saved", "\n".join(lines)]


def _figure(keys: dict[str, Any], path: Path) -> None:
    names = keys["variants"]
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, measure, label in (
        (panels[0], "perplexity", "perplexity of a token"),
        (panels[1], "answer_nats", "nats of a token of the answer"),
    ):
        for name in names:
            x, y = keys[f"{name}.bytes_per_token"], keys[f"{name}.{measure}"]
            found = keys[f"{name}.recall"] >= 0.5
            axes.plot(x, y, "o", color=_BLUE if found else _ORANGE)
            axes.annotate(
                name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_xlabel(f"cache bytes per token at {keys['context']} tokens")
        axes.set_ylabel(label)
        axes.margins(x=0.2)
    panels[0].set_title("Text", loc="left")
    panels[1].set_title("Needles (blue: at least half recalled)", loc="left")
    save_figure(figure, path)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(str(value) for value in values)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m experiments.convert_report DIR")
    print(write_report(sys.argv[1]))
