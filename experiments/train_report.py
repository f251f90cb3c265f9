"""report.md and the figures of a training, from the files of its directory alone.

python -m experiments.train_report DIR      writes them anew
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.reporting import save_figure, table
from experiments.workdir import write_atomic

COMMAND = "python -m experiments.train --config=configs/{}.py --workdir=DIR"
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#666666"


def write_report(workdir: str | Path) -> Path:
    """Writes report.md and figures/ from the summary, the config and the metrics.

    Returns:
      The path of report.md.

    Raises:
      FileNotFoundError: the training is not finished.
    """
    workdir = Path(workdir)
    keys = _load(workdir / "summary.json")
    environment = _load(workdir / "env.json")
    config = _load(workdir / "config.json")["config"]
    lines = [
        json.loads(line)
        for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    ran = (
        f"JAX {environment['jax']}, Python {environment['python']}, "
        f"{environment['device_kind']}; {keys['total_seconds']:.0f} s."
    )
    write = _scratch if config["scratch"] else _distilled
    parts = write(keys, config, lines, ran, workdir / "figures")
    report = workdir / "report.md"
    write_atomic(report, "\n\n".join(parts) + "\n")
    return report


# -- from scratch ----------------------------------------------------------------------


def _scratch(keys, config, lines, ran: str, figures: Path) -> list[str]:
    train = config["scratch"]["train"]
    _curves(
        {"train": _points(lines, "train", "cross_entropy")},
        "nats per byte",
        figures / "loss.png",
    )
    return [
        f"# {keys['model']}, trained from scratch",
        f"```\n{COMMAND.format('train')}\n```",
        f"Layers `{keys['pattern']}`, {keys['parameters']:,} parameters; "
        f"{keys['steps']} steps of {train['batch']} rows of {train['length']} bytes. "
        f"{ran}",
        table(
            ["", "before", "after"],
            [
                [
                    f"bits per byte of {keys['text_bytes']:,} held-out bytes",
                    f"{keys['before.bits_per_byte']:.3f}",
                    f"{keys['after.bits_per_byte']:.3f}",
                ],
                [
                    "nats per byte of a batch, first and last line of the metrics",
                    f"{keys['loss_first']:.3f}",
                    f"{keys['loss_last']:.3f}",
                ],
            ],
        ),
        "![Loss by step](figures/loss.png)",
    ]


# -- distilled -------------------------------------------------------------------------


def _distilled(keys, config, lines, ran: str, figures: Path) -> list[str]:
    settings = config["distill"]
    text, needle, train = (settings[key] for key in ("text", "needle", "distill"))
    names, first = keys["variants"], keys["original"]
    needles = len(needle["lengths"]) * len(needle["depths"]) * needle["trials"]
    _curves(
        {name: _points(lines, f"{name}.train", "output_error") for name in names},
        "squared error over the square of the output",
        figures / "loss.png",
    )
    _quality(keys, figures / "quality_by_bytes.png")
    return [
        f"# {keys['model']}, converted and distilled",
        f"```\n{COMMAND.format('distill')}\n```",
        "Every converted layer learns to give what the dense layer gave on the same "
        f"input: {train['steps']} steps of {settings['rows']} x {settings['length']} "
        f"tokens; {', '.join(train['parts'])} are trained, where a layer has them, and "
        f"nothing else. Perplexity of {text['windows']} windows of {text['length']} "
        f"held-out tokens; {needles} needles, so one is {1 / needles:.2f} of recall. "
        f"{ran}",
        table(
            [
                "variant",
                f"bytes of {first}",
                "perplexity",
                "distilled",
                "after / before",
                "recall",
                "distilled",
                "nats of an answer's token",
                "distilled",
            ],
            [_dense_row(keys), *(_row(keys, name) for name in names)],
        ),
        "![Quality by cache bytes](figures/quality_by_bytes.png)",
        "## What distillation was worth",
        "\n".join(_verdicts(keys)),
        "## Losses",
        "Of a layer, on texts that no step trains on, before and after; "
        "Kullback-Leibler in nats.",
        table(
            [
                "variant",
                "trained parameters",
                "output error",
                "after",
                "indexer KL",
                "after",
            ],
            [_loss_row(keys, name) for name in names],
        ),
        "![Error by step](figures/loss.png)",
        "## Patterns",
        table(
            ["variant", "layers"],
            [[name, f"`{keys[f'{name}.pattern']}`"] for name in names],
        ),
    ]


def _dense_row(keys: dict[str, Any]) -> list[str]:
    name = keys["original"]
    return [
        name,
        "1.000",
        f"{keys[f'{name}.perplexity']:.3f}",
        "",
        "",
        f"{keys[f'{name}.recall']:.2f}",
        "",
        f"{keys[f'{name}.answer_nats']:.3f}",
        "",
    ]


def _row(keys: dict[str, Any], name: str) -> list[str]:
    def of(key: str) -> Any:
        return keys[f"{name}.{key}"]

    return [
        name,
        f"{of('cache_share'):.3f}",
        f"{of('before.perplexity'):.3f}",
        f"{of('after.perplexity'):.3f}",
        f"{of('perplexity_gain'):.3f}",
        f"{of('before.recall'):.2f}",
        f"{of('after.recall'):.2f}",
        f"{of('before.answer_nats'):.3f}",
        f"{of('after.answer_nats'):.3f}",
    ]


def _loss_row(keys: dict[str, Any], name: str) -> list[str]:
    losses = [
        f"{keys[key]:.4f}" if (key := f"{name}.{loss}_{when}") in keys else ""
        for loss in ("output_error", "indexer_loss")
        for when in ("first", "last")
    ]
    return [name, f"{keys[f'{name}.trained_parameters']:,}", *losses]


def _verdicts(keys: dict[str, Any]) -> list[str]:
    """A line a variant: what got better, what did not, and who beats it still."""
    names = keys["variants"]
    lines = []
    for name in names:
        perplexity = keys[f"{name}.perplexity_gain"]
        recall = keys[f"{name}.recall_gain"]
        said = "lowers" if perplexity < 1 else "does not lower"
        line = f"- {name}: distillation {said} perplexity (x {perplexity:.3f})"
        line += f", recall changes by {recall:+.2f}."
        better = [
            other
            for other in names
            if keys[f"{other}.cache_share"] < keys[f"{name}.cache_share"]
            and keys[f"{other}.after.perplexity"] <= keys[f"{name}.after.perplexity"]
            and keys[f"{other}.after.answer_nats"] <= keys[f"{name}.after.answer_nats"]
        ]
        if better:
            line += (
                " Better still in perplexity and in nats of answers, with fewer bytes: "
                f"{', '.join(better)}."
            )
        lines.append(line)
    return lines


# -- figures ---------------------------------------------------------------------------


def _points(lines, stage: str, key: str) -> list[tuple[int, float]]:
    return [
        (line["step"], line[key])
        for line in lines
        if line["stage"] == stage and line.get(key) is not None
    ]


def _curves(curves: dict[str, list[tuple[int, float]]], label: str, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    if len(curves) > 1:
        axes.legend(fontsize=8)
    save_figure(figure, path)


def _quality(keys: dict[str, Any], path: Path) -> None:
    """Perplexity and nats of answers by cache share, an arrow from before to after."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    first = keys["original"]
    for axes, measure, label in zip(
        figure.subplots(1, 2),
        ("perplexity", "answer_nats"),
        ("perplexity of a token", "nats of a token of the answer"),
        strict=True,
    ):
        axes.axhline(keys[f"{first}.{measure}"], color=_GREY, lw=0.8, label=first)
        for name in keys["variants"]:
            x = keys[f"{name}.cache_share"]
            y = [keys[f"{name}.{when}.{measure}"] for when in ("before", "after")]
            axes.plot([x, x], y, "-", color=_GREY, lw=1)
            axes.plot(x, y[0], "o", color=_ORANGE)
            axes.plot(x, y[1], "o", color=_BLUE)
            axes.annotate(
                name, (x, y[0]), xytext=(5, 4), textcoords="offset points", fontsize=8
            )
        axes.set_xlabel(f"cache bytes, of {first}'s")
        axes.set_ylabel(label)
        axes.margins(x=0.25, y=0.1)
        axes.legend(fontsize=8)
        axes.set_title("Orange: converted, blue: distilled", loc="left", fontsize=9)
    save_figure(figure, path)


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m experiments.train_report DIR")
    print(write_report(sys.argv[1]))
