"""report.md and the figure of a plan, from the files of its directory alone.

python -m experiments.plan_report DIR      writes them anew
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.plan_config import SHARDINGS
from experiments.plan_count import FLOP_PARTS
from experiments.reporting import save_figure, table
from experiments.workdir import write_atomic

STAGE = "plan"

# The published totals, as printed: the digits say how far they were rounded.
PUBLISHED = {
    "pro": (1.6e12, "1.6T", "49B"),
    "flash": (284e9, "284B", "13B"),
}
_COLOURS = ("#0072B2", "#009E73", "#D55E00")
_STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
}


def write_report(workdir: str | Path) -> Path:
    """Writes report.md and figures/plan.png of a finished plan; returns the report."""
    workdir = Path(workdir)
    config = json.loads((workdir / "config.json").read_text("utf-8"))["config"]
    path = workdir / "stages" / f"{STAGE}.json"
    models = json.loads(path.read_text("utf-8"))["result"]["models"]
    _figure(models, workdir / "figures" / "plan.png")
    columns, rows = table_rows(models)
    parts = [
        f"# {config['model']} at {config['context']:,} tokens on "
        f"{config['devices']} devices",
        "Counted from abstract shapes; nothing was measured. GiB are 2^30 bytes.",
        table(columns, rows),
        "![Cache bytes and FLOPs against context](figures/plan.png)",
        *_parameters(models, config),
        *_flops(models),
        *_cache(models, config),
        *_devices(models, config),
        *_dense(models),
    ]
    report = workdir / "report.md"
    write_atomic(report, "\n\n".join(parts) + "\n")
    return report


def table_rows(models: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the main table, for the terminal too."""
    columns = [
        "model",
        "parameters",
        "active",
        "GFLOPs a token",
        "cache B/token, bf16",
        "fp8 + fp4",
        "cache GiB, bf16",
        "device: weights GiB",
        "cache GiB",
    ]
    rows = []
    for name, model in models.items():
        f = model["figures"]
        records = f.get("cache_bytes_per_token_records")
        rows.append(
            [
                name,
                _count(f["parameters"]),
                _count(f["active_parameters"]),
                f"{f['flops_per_token'] / 1e9:,.1f}",
                f"{f['cache_bytes_per_token_bf16']:,.0f}",
                "–" if records is None else f"{records:,.0f}",
                f"{f['cache_gib_at_context_bf16']:,.2f}",
                f"{f['device_weight_gib']:,.1f}",
                f"{f['device_cache_gib']:,.1f}",
            ]
        )
    return columns, rows


def _parameters(models: dict[str, Any], config: dict[str, Any]) -> list[str]:
    lines = []
    for name, (value, text, active) in PUBLISHED.items():
        if name not in models:
            continue
        f = models[name]["figures"]
        own, drafted = f["parameters"], f["parameters_with_draft"]
        lines.append(
            f"- {name}: {_count(own)} without draft layers, "
            f"{100 * (own / value - 1):+.2f} % of the published {text}; "
            f"{_count(drafted)} with {config['draft_layers']}, "
            f"{100 * (drafted / value - 1):+.2f} %. Active "
            f"{_count(f['active_parameters'])}, published {active}."
        )
    if not lines:
        return []
    return [
        "## Parameters beside the published counts",
        "\n".join(lines),
        "A draft layer is counted as one more window-only layer with its own routed "
        "experts; the projections that join it to the model are not. 284B has three "
        "digits and agrees with the model alone; 1.6T has two, and within 1 % of it "
        "only the count with a draft layer lies, while that of the model alone rounds "
        "to it (1.57T). By every published size (layers, projections, compressors, "
        "indexers, experts, streams, tables) no part of the model is left out, and "
        "its active parameters agree.",
        "Active are those multiplied for one token: all but the experts not chosen, "
        "and but the table of embeddings, of which one row is read.",
    ]


def _flops(models: dict[str, Any]) -> list[str]:
    rows = []
    for name, model in models.items():
        f = model["figures"]
        parts = [f[f"flops_per_token.{part}"] for part in FLOP_PARTS]
        cells = [f"{value / 1e9:,.2f}" for value in (*parts, f["flops_per_token"])]
        rows.append([name, *cells])
    return [
        "## FLOPs of one decoded token at the context",
        table(["GFLOPs", *FLOP_PARTS, "sum"], rows),
        "Matrix products alone, two FLOPs a multiplication and addition: norms, "
        "rotations, softmax, pooling and the mixing of residual streams are left out. "
        "Projections are those of attention, compressors, indexers and residual "
        "streams; experts are the chosen and the shared one with the router (or the "
        "feed-forward); the indexer scores every visible entry; attention reads the "
        "window and the chosen (csa) or all (hca, dense) entries.",
    ]


def _cache(models: dict[str, Any], config: dict[str, Any]) -> list[str]:
    parts = [
        "## Cache of one row, by state, layer kind and dtype",
        "Allocated bytes, undo of 16 tokens included. B/token stands where the array "
        f"grows with the context ({config['context']:,} tokens here). A record in fp8 "
        "and fp4 holds what the published caches do: 8-bit channels, rotated ones in "
        "bfloat16, block scales, padding; index keys in 4 bits.",
    ]
    for name, model in models.items():
        if name.endswith("_dense"):
            continue
        rows = [
            [
                f"{line['state']}.{line['field']}",
                line["kind"],
                line["dtype"],
                f"{line['bytes'] / config['context']:,.1f}"
                if line["per_token"]
                else "–",
                f"{line['bytes'] / 2**20:,.2f}",
            ]
            for line in model["cache"]
        ]
        f = model["figures"]
        parts += [
            f"### {name} (`{model['layers']}`)",
            table(["state", "layers", "dtype", "B/token", "MiB"], rows),
            f"Grows by {f['cache_bytes_per_token_bf16']:,.1f} B/token in bfloat16 "
            f"({f['cache_gib_at_context_bf16']:,.2f} GiB) or "
            f"{f['cache_bytes_per_token_records']:,.1f} in records "
            f"({f['cache_gib_at_context_records']:,.2f} GiB); fixed "
            f"{f['cache_fixed_mib']:,.2f} MiB.",
        ]
    return parts


def _devices(models: dict[str, Any], config: dict[str, Any]) -> list[str]:
    rows = [
        [
            name,
            f"{f['device_weight_gib']:,.1f}",
            f"{f['device_cache_gib']:,.1f}",
            f"{f['device_weight_gib'] + f['device_cache_gib']:,.1f}",
            f"{f['device_rows_that_fit']:,}",
        ]
        for name, f in ((name, model["figures"]) for name, model in models.items())
    ]
    return [
        f"## One of {config['devices']} devices, {config['rows']} rows in all",
        f"Sharding `{config['sharding']}`: {SHARDINGS[config['sharding']]}. Weights of "
        f"{config['weight_bits']} bits, routed experts of {config['expert_bits']}; "
        "caches in bfloat16. The fullest device, without activations:",
        table(
            [
                "GiB",
                "weights",
                "cache",
                "both",
                f"rows that fit {config['device_gib']:g} GiB",
            ],
            rows,
        ),
    ]


def _dense(models: dict[str, Any]) -> list[str]:
    lines = []
    for name, model in models.items():
        if f"{name}_dense" not in models:
            continue
        f, twin = model["figures"], models[f"{name}_dense"]
        d = twin["figures"]
        cache = d["cache_bytes_per_token_bf16"]
        lines.append(
            f"- {name}: {f['cache_bytes_per_token_bf16'] / cache:.4f} × the cache of "
            f"{name}_dense, both in bfloat16, "
            f"{f['cache_bytes_per_token_records'] / cache:.4f} × with records against "
            f"bfloat16; {f['flops_per_token'] / d['flops_per_token']:.4f} × the FLOPs. "
            f"{name}_dense has {twin['heads'][0]} query heads of {twin['heads'][1]}."
        )
    return [
        "## Beside dense attention",
        "A model's dense twin has its layers, hidden size, vocabulary, feed-forward "
        "and residual streams. Each of its layers attends to all tokens with 8 "
        "key/value heads of 128 channels, separate keys and values, query heads of "
        "128 channels to make up the hidden size (a multiple of 8), and full query "
        "and output projections.",
        "\n".join(lines),
    ]


def _figure(models: dict[str, Any], path: Path) -> None:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, key, title, scale in (
            (panels[0], "cache_bytes", "Cache of one row, GiB (bfloat16)", 2**30),
            (panels[1], "flops", "GFLOPs of a decoded token", 1e9),
        ):
            hybrids = [name for name in models if not name.endswith("_dense")]
            for name, model in models.items():
                own = name.removesuffix("_dense")
                axes.plot(
                    model["curve"]["context"],
                    [value / scale for value in model["curve"][key]],
                    label=name,
                    color=_COLOURS[hybrids.index(own) % len(_COLOURS)],
                    linestyle="-" if own == name else "--",
                )
            axes.set(xscale="log", yscale="log", xlabel="context, tokens")
            axes.set_xscale("log", base=2)
            axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
        panels[0].legend(frameon=False, fontsize=9)
        save_figure(figure, path)


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:,.1f}{unit}"
    return f"{number:,}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m experiments.plan_report DIR")
    print(write_report(sys.argv[1]))
