"""report.md and figures/ of an ablation, from the files of its directory alone.

    python -m experiments.ablate_report DIR      writes them anew

The program stores what only it knows as the result of the stage `TEXT_STAGE`:
{"command": "...", "notes": ["...", ...]}.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.ablate_figures import write_figures
from experiments.ablate_results import (
    BASELINE,
    BUCKETS,
    DistanceBin,
    VariantResult,
    by_variant,
    contexts,
    decode_at,
    distance_bins,
    load_results,
    mean,
    prefill_at,
    recall_of,
    summary_keys,
    values,
)
from experiments.reporting import table
from experiments.workdir import write_atomic

__all__ = [
    "TEXT_STAGE",
    "DistanceBin",
    "VariantResult",
    "distance_bins",
    "load_results",
    "summary_keys",
    "table_rows",
    "write_report",
]

TEXT_STAGE = "report_text"

_COLUMNS = (
    "variant",
    "parameters",
    "in window",
    "beyond window",
    "beyond reach",
    "bits per byte",
    "cache bytes",
    "decode, ms",
)


def write_report(workdir: str | Path) -> Path:
    """Writes report.md and figures/*.png.

    Args:
      workdir: a run's directory with at least one finished variant.

    Returns:
      The path of report.md.

    Raises:
      ValueError: no variant is finished.
    """
    workdir = Path(workdir)
    results = load_results(workdir)
    environment = json.loads((workdir / "env.json").read_text(encoding="utf-8"))
    device = _device(environment)
    figures = write_figures(results, workdir / "figures", device)
    path = workdir / "stages" / f"{TEXT_STAGE}.json"
    text = (
        json.loads(path.read_text(encoding="utf-8"))["result"] if path.exists() else {}
    )
    parts = [
        "# What each attention mode costs and forgets",
        *_head(text, environment, device),
        *_main_table(results),
        *_recall(results, [f.name for f in figures]),
        *_costs(results, [f.name for f in figures], device),
        *_seeds(results),
    ]
    report = workdir / "report.md"
    write_atomic(report, "\n\n".join(parts) + "\n")
    return report


def table_rows(results: Sequence[VariantResult]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the main table, for the terminal too: means over seeds."""
    lengths = contexts(results, "decode_ms")
    longest = lengths[-1] if lengths else 0
    columns: list[str] = list(_COLUMNS)
    columns[-1] = f"decode at {_count(longest)}, ms" if lengths else columns[-1]
    rows: list[list[str]] = []
    for name, group in by_variant(results).items():
        recall = [
            _spread(values(group, recall_of("offset", bucket)), ".2f")
            for bucket in BUCKETS
        ]
        rows.append(
            [
                name,
                f"{group[0].parameters:,}",
                *recall,
                _spread(values(group, lambda r: r.bits_per_byte), ".3f"),
                _number(mean(values(group, lambda r: r.cache_bytes_per_token)), ",.1f"),
                _number(mean(values(group, decode_at(longest))), ".3g"),
            ]
        )
    return columns, rows


def _head(text: dict[str, Any], environment: dict[str, Any], device: str) -> list[str]:
    parts = []
    if text.get("command"):
        parts.append(f"```\n{text['command']}\n```")
    revision = (environment.get("git_revision") or "unknown")[:12]
    modified = " with local changes" if environment.get("git_modified") else ""
    parts.append(
        f"Device: {device}. JAX {environment.get('jax')}, Python "
        f"{environment.get('python')}, {environment.get('platform')}; revision "
        f"{revision}{modified}. The config is in `config.json`."
    )
    if environment.get("resumed"):
        parts.append(
            "**The run was resumed in another environment** (`env.json`, `resumed`): "
            "times measured before and after it do not compare."
        )
    if text.get("notes"):
        parts.append("## Read this first")
        parts.append("\n".join(f"- {note}" for note in text["notes"]))
    return parts


def _main_table(results: Sequence[VariantResult]) -> list[str]:
    groups = by_variant(results)
    counts = sorted({len(group) for group in groups.values()})
    seeds = " or ".join(map(str, counts))
    columns, rows = table_rows(results)
    for row in rows:
        stack = groups[row[0]][0].stack
        row[0] += f" (`{stack}`)" if stack else ""
    parts = [
        "## The result",
        f"Means over {seeds} seed{'s' if counts != [1] else ''}"
        + (", with the standard deviation behind ±. " if counts != [1] else ". ")
        + "Recall is the share of queries answered with the right value, on the layout "
        "with a random offset. In window: the value stands at most "
        f"{results[0].window - 1} tokens before the query; beyond reach: more than "
        f"{results[0].reach}, where no stack of windows sees it. Cache bytes are "
        "per token at 64k tokens. In the figures a band or bar reaches from the "
        "lowest seed to the highest.",
        table(columns, rows),
    ]
    if BASELINE not in groups:
        return parts
    keys = summary_keys(results)
    ratios = [
        [name]
        + [
            _number(keys.get(f"{name}.{key}_to_dense"), ".3f")
            for key in (
                "bits_per_byte",
                "cache_bytes_per_token",
                "decode_ms_64k",
                "prefill_tokens_per_s",
            )
        ]
        for name in groups
    ]
    parts += [
        f"Ratios to {BASELINE}, measured in the same run (below 1 is better, for the "
        "last column above 1):",
        table(
            ["variant", "bits per byte", "cache bytes", "decode at 64k", "prefill"],
            ratios,
        ),
    ]
    return parts


def _recall(results: Sequence[VariantResult], figures: list[str]) -> list[str]:
    groups = by_variant(results)
    names = [bucket.replace("_", " ") for bucket in BUCKETS]
    rows = [
        [name]
        + [
            _spread(values(group, recall_of(layout, bucket)), ".2f")
            for layout in ("offset", "aligned")
            for bucket in BUCKETS
        ]
        for name, group in groups.items()
    ]
    header = ["variant", *(f"offset: {n}" for n in names)]
    header += [f"aligned: {n}" for n in names]
    parts = [
        "## Recall",
        "The textbook (aligned) layout puts the pairs on the grid of the compressed "
        "groups and flatters compression that is trained on it; these models were "
        "trained on the offset layout.",
        table(header, rows),
        _picture("recall_by_distance.png", figures, "Recall against distance"),
    ]
    some = next(iter(groups.values()))[0].recall_by_distance
    bins = [
        [f"{low}–{high}" if high > low else f"{low}", f"{some[i].queries:,}"]
        + [
            _number(mean([r.recall_by_distance[i].accuracy for r in group]), ".2f")
            for group in groups.values()
        ]
        for i, (low, high) in enumerate((b.low, b.high) for b in some)
    ]
    parts.append(table(["distance", "queries a seed", *groups], bins))
    return parts


def _costs(
    results: Sequence[VariantResult], figures: list[str], device: str
) -> list[str]:
    groups = by_variant(results)
    parts = [
        "## Cost",
        _picture("quality_vs_cache_bytes.png", figures, "Quality against cache bytes"),
    ]
    kinds: list[tuple[str, str, Callable[[int], Any], str]] = [
        ("decode_ms", "Decode, ms per token, batch of one", decode_at, ".3g"),
        ("prefill_tokens_per_s", "Prefill, tokens per second", prefill_at, ",.0f"),
    ]
    for field, title, reader, form in kinds:
        lengths = contexts(results, field)
        if not lengths:
            continue
        base = {n: mean(values(groups.get(BASELINE, ()), reader(n))) for n in lengths}
        rows = [
            [name]
            + [
                _with_ratio(mean(values(group, reader(n))), base[n], form)
                for n in lengths
            ]
            for name, group in groups.items()
        ]
        parts.append(f"{title} on {device}, by context (in brackets × {BASELINE}):")
        parts.append(table(["variant", *map(_count, lengths)], rows))
    parts.append(_picture("decode_vs_context.png", figures, "Decode against context"))
    return [part for part in parts if part]


def _seeds(results: Sequence[VariantResult]) -> list[str]:
    rows = [
        [r.name, str(r.seed)]
        + [f"{r.recall['offset'][bucket]:.3f}" for bucket in BUCKETS]
        + [f"{r.recall['aligned'][bucket]:.3f}" for bucket in BUCKETS]
        + [f"{r.bits_per_byte:.4f}", _number(r.seconds, ".0f")]
        for r in results
    ]
    names = [bucket.replace("_", " ") for bucket in BUCKETS]
    header = ["variant", "seed", *names, *(f"aligned: {n}" for n in names)]
    return ["## Every seed", table([*header, "bits per byte", "seconds"], rows)]


def _device(environment: dict[str, Any]) -> str:
    if environment.get("device_platform") == "cpu":
        cores = environment.get("cpu_available") or environment.get("cpu_count")
        return f"{cores} CPU core{'s' if cores != 1 else ''}"
    return f"{environment.get('devices')} × {environment.get('device_kind')}"


def _picture(name: str, figures: list[str], text: str) -> str:
    return f"![{text}](figures/{name})" if name in figures else ""


def _spread(numbers: Sequence[float], form: str) -> str:
    """Mean, and the standard deviation of a sample where there is one."""
    if len(numbers) < 2:
        return _number(mean(numbers), form)
    return f"{mean(numbers):{form}}±{statistics.stdev(numbers):{form}}"


def _number(number: float | None, form: str) -> str:
    return "–" if number is None else f"{number:{form}}"


def _with_ratio(number: float | None, base: float | None, form: str) -> str:
    if number is None:
        return "–"
    return f"{number:{form}}" + (f" ({number / base:.2f} ×)" if base else "")


def _count(number: int) -> str:
    return (
        f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else f"{number}"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m experiments.ablate_report DIR")
    print(write_report(sys.argv[1]))
