"""report.md and the figure of a benchmark, from the files of its directory alone.

python -m experiments.bench_kernels.report DIR      writes them anew
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.bench_kernels.config import Config
from experiments.peers.report import BUSY
from experiments.reporting import save_figure, table
from experiments.workdir import write_atomic

COLUMNS = (
    "",
    "",
    "time",
    "median",
    "MB",
    "GFLOP",
    "% of copy",
    "% of matmul",
    "time / ours",
)
TERMINAL = (0, 1, 2, 6, 7, 8)
"""Columns that a terminal has room for."""
PREFIX = "bench"
BARS = {
    "window_attention.prefill_16k_w128.ratio": (8.0, "at least"),
    "sparse_attention.decode_256k_m4_k512.ratio": (20.0, "at least"),
    "indexer_topk.256k_4x32.ratio": (2.0, "at least"),
    "indexer_topk.256k_64x128.ratio": (1.0, "at least"),
    "indexer_topk.peak_memory_ratio": (0.1, "at most"),
    "window_attention.decay.ratio": (1.05, "at most"),
    "compressed_attention.mass.ratio": (1.05, "at most"),
    "compressed_attention.mass_prefill.ratio": (1.05, "at most"),
    "sparse_attention.mass.ratio": (1.05, "at most"),
    "sparse_attention.mass_prefill.ratio": (1.05, "at most"),
    "sparse_attention.mass_small.ratio": (1.05, "at most"),
}
"""What has to be reached on two CPU cores, under ``bench.``."""


def summarise(results: Mapping[str, Any]) -> dict[str, Any]:
    """The flat keys of summary.json, all under ``bench.``.

    Args:
      results: by stage: "ceilings", cases as `measure.measure` gives them, and others
        whose keys are taken as they are.
    """
    keys: dict[str, Any] = {}
    peak = results["ceilings"]
    keys["ceilings.copy_gb_per_s"] = peak["copy"] / 1e9
    keys["ceilings.matmul_gflop_per_s"] = peak["matmul"] / 1e9
    for stage, result in results.items():
        if stage == "ceilings":
            continue
        if "contenders" not in result:
            op = stage.partition(".")[0]
            keys |= {
                f"{op}.{key}": value
                for key, value in result.items()
                if key not in ("seconds", "other_load")
            }
            continue
        for name, each in result["contenders"].items():
            where = f"{stage}.{slug(name)}"
            keys[f"{where}.us"] = 1e6 * each["seconds"]
            keys[f"{where}.median_us"] = 1e6 * each["median"]
            keys[f"{where}.bytes"] = each["bytes"]
            keys[f"{where}.flops"] = each["flops"]
            copy, product = fractions(each, peak)
            keys[f"{where}.copy_fraction"] = copy
            keys[f"{where}.matmul_fraction"] = product
        keys |= {f"{stage}.{key}": value for key, value in result["ratios"].items()}
        reference = result["contenders"].get("xla")
        others = [name for name, each in result["contenders"].items() if each["ours"]]
        # Where all contenders of ours compute the same.
        if reference is not None and not any(" " in name for name in others):
            # On a CPU this is 1: XLA's implementation is the only one.
            keys[f"{stage}.xla_ratio"] = reference["seconds"] / _own(result)
    loads = [
        (result["seconds"], result["other_load"])
        for result in results.values()
        if result["other_load"] is not None
    ]
    total = sum(seconds for seconds, _ in loads)
    keys["other_load"] = (
        sum(seconds * load for seconds, load in loads) / total if loads else None
    )
    return {f"{PREFIX}.{key}": value for key, value in keys.items()}


def caution(keys: Mapping[str, Any]) -> str | None:
    """What speaks against the figures: cores that others used meanwhile."""
    load = keys[f"{PREFIX}.other_load"]
    if load is None or load <= BUSY:
        return None
    return (
        f"Caution: other processes used {100 * load:.0f} % of the cores meanwhile; "
        "times are too long, ratios less sure."
    )


def slug(name: str) -> str:
    """A contender's name as part of a key."""
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return "_".join(words)


def fractions(each: Mapping[str, Any], peak: Mapping[str, float]) -> tuple:
    """(of the copy's, of the matrix product's) ceiling that a contender reaches."""
    seconds = each["seconds"]
    return (
        each["bytes"] / seconds / peak["copy"],
        each["flops"] / seconds / peak["matmul"],
    )


def table_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows under `COLUMNS`, as text."""
    rows = []
    for stage, result in results.items():
        if "contenders" not in result:
            continue
        contenders = result["contenders"]
        own = _own(result)
        for number, (name, each) in enumerate(contenders.items()):
            copy, product = fractions(each, results["ceilings"])
            rows.append(
                (
                    "" if number else stage,
                    name,
                    _time(each["seconds"]),
                    _time(each["median"]),
                    f"{each['bytes'] / 1e6:,.3g}",
                    f"{each['flops'] / 1e9:,.3g}",
                    f"{100 * copy:.3g}",
                    f"{100 * product:.3g}",
                    f"{each['seconds'] / own:.3g}",
                )
            )
    return rows


def bar_rows(keys: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """(key, measured, bar, verdict) of the bars that were measured."""
    rows = []
    for key, (bar, side) in BARS.items():
        value = keys.get(f"{PREFIX}.{key}")
        if value is None:
            continue
        met = value >= bar if side == "at least" else value <= bar
        rows.append(
            (key, f"{value:.3g}", f"{side} {bar:g}", "met" if met else "NOT MET")
        )
    return rows


def write_report(workdir: str | Path) -> Path:
    """Writes report.md and figures/bench_kernels.png; returns the report."""
    workdir = Path(workdir)
    keys = json.loads((workdir / "summary.json").read_text("utf-8"))
    env = json.loads((workdir / "env.json").read_text("utf-8"))
    results = {}
    for path in sorted((workdir / "stages").glob("*.json")):
        stage = json.loads(path.read_text("utf-8"))
        if not stage["stage"].startswith("process."):
            results[stage["stage"]] = stage["result"]
    results = {name: results[name] for name in in_order(results)}
    peak = results["ceilings"]
    _figure(results, workdir / "figures" / "bench_kernels.png")
    parts = [
        "# Kernels beside what a user would write",
        f"{env['device_kind']} ({env['device_platform']}, {env['cpu_available']} CPU "
        f"cores), JAX {env['jax']}. Copy ceiling {peak['copy'] / 1e9:,.3g} GB/s (read "
        f"and written), matrix products {peak['matmul'] / 1e9:,.4g} GFLOP/s, measured "
        "in this run.",
        "Times are the least of samples that were taken in turn; ratios are of those "
        "times. MB and GFLOP are what a contender has to read, write and multiply, "
        "each number once, so that more than 100 % of the copy means that a cache "
        "served the reads. `xla` is our implementation that runs anywhere and the "
        "reference of the kernels.",
    ]
    if doubt := caution(keys):
        parts.append(doubt)
    rows = bar_rows(keys) if keys[f"{PREFIX}.profile"] == "cpu" else []
    if rows:
        parts += [table(("", "measured", "wanted on two CPU cores", ""), rows)]
    parts += [
        table(COLUMNS, table_rows(results)),
        "![Times beside ours](figures/bench_kernels.png)",
        "## What each side reads",
        "\n".join(_reads(results)),
        *_alignment(results.get("alignment.records")),
        *_memory(keys),
        *_tuning(results),
    ]
    report = workdir / "report.md"
    write_atomic(report, "\n\n".join(parts) + "\n")
    return report


def in_order(names: Mapping[str, Any]) -> list[str]:
    """Stages in the order of operations, by name within one."""
    ops = ("ceilings", *Config().ops)

    def place(stage: str) -> tuple[int, str]:
        op = stage.partition(".")[0]
        return (ops.index(op) if op in ops else len(ops)), stage

    return sorted(names, key=place)


def _reads(results: Mapping[str, Any]) -> list[str]:
    lines = []
    for stage, result in results.items():
        if "contenders" not in result:
            continue
        reads: dict[str, list[str]] = {}
        for name, each in result["contenders"].items():
            reads.setdefault(each["reads"], []).append(name)
        text = "; ".join(f"{', '.join(names)}: {read}" for read, names in reads.items())
        if result["difference"] is not None:
            text += f". Results differ by {result['difference']:.1g}"
        lines.append(f"- `{stage}` ({result['shape']}): {text}.")
        for name, reason in result["refused"].items():
            lines.append(f"  - not there: {name}: {reason}")
        for name, reason in result["failed"].items():
            lines.append(f"  - **failed**: {name}: {reason}")
    return lines


def _alignment(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    rows = [
        [
            "unpadded" if alignment == 1 else f"{alignment} bytes",
            str(0 if alignment == 1 else found[f"padding_bytes_{alignment}"]),
            f"{found[f'us_{alignment}']:,.1f}",
            f"{found[f'gather_us_{alignment}']:,.1f}",
        ]
        for alignment in (1, 64, 128, 256)
    ]
    verdict = (
        "no gain beyond the noise: a null result"
        if found["null"]
        else "a gain beyond the noise"
    )
    return [
        "## Alignment of packed records",
        f"{found['chosen']} records of 584 bytes, chosen at random among "
        f"{found['records']}, every call others.",
        table(
            ("alignment", "padding bytes", "gather + unpack, us", "gather alone, us"),
            rows,
        ),
        f"Tuned to these reads: {found['tuned']} bytes, {found['padding_bytes']} bytes "
        f"of padding a record. It is {found['gain']:.3g} × as fast as unpadded records "
        f"(gather alone {found['gather_gain']:.3g} ×); two timings of equal bytes "
        f"differ by a factor of {found['noise']:.3g} (gather alone "
        f"{found['gather_noise']:.3g}): {verdict}.",
    ]


def _memory(keys: Mapping[str, Any]) -> list[str]:
    lines = []
    window = f"{PREFIX}.window_attention"
    if f"{window}.memory_growth" in keys:
        sizes = ", ".join(
            f"{value:,.0f} MiB at {key.rpartition('_')[2]}"
            for key, value in keys.items()
            if key.startswith(f"{window}.memory_mib_")
        )
        lines.append(
            f"- Window attention: {sizes}; × {keys[f'{window}.memory_growth']:.3g} for "
            f"× {keys[f'{window}.length_growth']:.3g} tokens."
        )
    indexer = f"{PREFIX}.indexer_topk"
    if f"{indexer}.peak_memory_ratio" in keys:
        lines.append(
            f"- Choice for many queries: {keys[f'{indexer}.peak_memory_mib']:,.1f} MiB "
            f"beside {keys[f'{indexer}.peak_memory_mib_scores']:,.1f} MiB of scores + "
            f"top_k, {keys[f'{indexer}.peak_memory_ratio']:.3g} ×."
        )
    if not lines:
        return []
    return ["## Memory beside the arguments, as compiled", "\n".join(lines)]


def _tuning(results: Mapping[str, Any]) -> list[str]:
    lines = [
        f"- `{stage.removeprefix('tune.')}`: {text}"
        for stage, result in results.items()
        if stage.startswith("tune.")
        for text in result["text"]
    ]
    return ["## Tuned configurations", "\n".join(lines)] if lines else []


def _figure(results: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    points = [
        (stage, name, each["seconds"] / own)
        for stage, result in results.items()
        if "contenders" in result
        for own in [
            min(c["seconds"] for c in result["contenders"].values() if c["ours"])
        ]
        for name, each in result["contenders"].items()
        if not each["ours"]
    ]
    figure = Figure(figsize=(8, 1 + 0.24 * max(len(points), 1)), layout="constrained")
    axis = figure.subplots()
    places = range(len(points))
    axis.barh(places, [ratio for *_, ratio in points], color="#0072B2", left=0)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(places, [f"{stage}: {name}" for stage, name, _ in points], size=7)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("time of the alternative / time of ours")
    save_figure(figure, path)


def _own(result: Mapping[str, Any]) -> float:
    """Seconds of our fastest implementation."""
    return min(
        each["seconds"] for each in result["contenders"].values() if each["ours"]
    )


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e6 * seconds:.3g} us"


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    print(write_report(arguments[0]))
