"""report.md and figures/ of a run, from the files of its directory alone.

python -m experiments.recover.report DIR      writes them anew
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.reporting import save_figure, table
from experiments.workdir import write_atomic

_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"
_STORMS = {
    "": "a process, paced",
    "_burst": "a process, all at once",
    "_threads": "threads of the decoder, paced",
}
PLACES = ("header", "payload", "padding", "index", "seal", "marker", "usage")


@dataclasses.dataclass(frozen=True)
class Bar:
    """What a key has to be: ``sign`` is "=", "<=", ">=" or ">"; ``limit`` a number or
    another key.
    """

    key: str
    sign: str
    limit: float | str
    text: str

    def holds(self, keys: Mapping[str, Any]) -> bool:
        value = keys[self.key]
        limit = keys[self.limit] if isinstance(self.limit, str) else self.limit
        return {
            "=": value == limit,
            "<=": value <= limit,
            ">=": value >= limit,
            ">": value > limit,
        }[self.sign]


BARS = (
    Bar("flips_detected", "=", "flips_injected", "flips on disk that were detected"),
    Bar("wrong_logits", "=", 0, "rows with wrong logits after a flip"),
    Bar("rebuilt", "=", "flips_injected", "flips after which all is verified again"),
    Bar("naive_reuse_wrong", ">", 0, "control: wrong prompts, entries alone"),
    Bar("ours_reuse_wrong", "=", 0, "wrong prompts, restored with recent states"),
    Bar(
        "resident_flips_detected",
        "=",
        "resident_flips_injected",
        "flips in memory that the scrubber found",
    ),
    Bar("rebuild_stall_ratio", "<=", 1.2, "p99 of a step in a storm over idle"),
    Bar("storm_bad_reads", "=", 0, "reads in a storm without the right bytes"),
    Bar("rebuild_pipeline_gain", ">", 1, "serial rebuilding over the pipeline"),
    Bar("recomputed_without_copy", ">=", 1, "blocks remade without a second copy"),
    Bar("graph_violations", "=", 0, "reads over a stale dependency"),
    Bar("verify_overhead", "<=", 0.15, "CRC32C's share of offload + restore"),
    Bar("ttft_speedup_16k", ">=", 20, "first token, recomputed over restored, 16k"),
    Bar("ttft_logits_equal", "=", True, "restored logits equal bit for bit"),
    Bar("tokens_lost", "=", 0, "acknowledged tokens lost in kill -9"),
    Bar("tokens_wrong", "=", 0, "tokens other than in a run never killed"),
    Bar("recovery_speedup", ">=", 10, "first token, recomputed over recovered"),
    Bar("recovery_logits_equal", "=", True, "recovered logits equal bit for bit"),
    Bar("incremental_bytes_ratio", "<=", 0.05, "log of 64 tokens over a snapshot"),
)


def table_rows(keys: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(text, measured, bar, "met" or "NOT met") of each bar that was measured."""
    rows = []
    for bar in BARS:
        if bar.key in keys:
            limit = keys[bar.limit] if isinstance(bar.limit, str) else bar.limit
            met = "met" if bar.holds(keys) else "NOT met"
            wanted = f"{bar.sign} {number(limit)}"
            rows.append((bar.text, number(keys[bar.key]), wanted, met))
    return rows


def number(value: Any) -> str:
    """A value for a table."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if type(value) is int else str(value)


def write_report(workdir: str | Path) -> Path:
    """Writes report.md and figures/*.png from summary.json.

    Returns:
      The path of report.md.

    Raises:
      FileNotFoundError: the run is not finished.
    """
    workdir = Path(workdir)
    keys = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    env = json.loads((workdir / "env.json").read_text(encoding="utf-8"))
    config = json.loads((workdir / "config.json").read_text(encoding="utf-8"))["config"]
    figures = workdir / "figures"
    figures.mkdir(exist_ok=True)
    parts = [
        "# A cache under faults",
        f"Times on the model `{config['model']}`; flips, control and graph on a small "
        f"one. {env['cpu_count']} CPU cores, {env['device_kind']}, JAX {env['jax']}, "
        f"Python {env['python']}; {keys['total_seconds']:.0f} s. Every ratio is of one "
        "run; the config is in `config.json`, what each key means in the modules' "
        "docstrings.",
        table(("", "measured", "bar", ""), table_rows(keys)),
    ]
    missed = [row[0] for row in table_rows(keys) if row[3] != "met"]
    parts.append(
        f"**Not met: {'; '.join(missed)}.**" if missed else "Every bar is met."
    )
    for section in (_flips, _reuse, _resident, _storm, _graph, _throughput, _crash):
        parts += section(keys, config, figures)
    report = workdir / "report.md"
    write_atomic(report, "\n\n".join(parts) + "\n")
    return report


def _flips(keys, config, figures: Path) -> list[str]:
    if "flips_injected" not in keys:
        return []
    places = [(place, keys.get(f"flips_in_{place}", 0)) for place in PLACES]
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar(*zip(*places, strict=True), color=_BLUE)
    axes.bar_label(bars, fontsize=8)
    axes.set_yscale("symlog")
    axes.set_title("Flipped bits by what they were part of", loc="left")
    save_figure(figure, figures / "flips.png")
    return [
        "## Flips on disk",
        f"{keys['flips_injected']:,} single bits, evenly over the bytes of blocks, and "
        f"at least {config['flips']['index_share']:.0%} in the other files. After each "
        f"round of at most {config['flips']['rows']} (one a prompt) a reader opens the "
        "store or goes on with an open one, restores, and its logits are compared bit "
        "for bit with a cold run.",
        table(
            ("", "flips"),
            [
                *places_text(places),
                ("detected", f"{keys['flips_detected']:,}"),
                (
                    "of these, by `verify` and not by a reader",
                    f"{keys['flips_detected_by_scrub_only']:,}",
                ),
                ("rows with wrong logits", f"{keys['wrong_logits']:,}"),
                ("all verified again", f"{keys['rebuilt']:,}"),
                (
                    "blocks from the second copy",
                    f"{keys.get('rebuilt_from_copy', 0):,}",
                ),
                (
                    "blocks recomputed from tokens",
                    f"{keys.get('rebuilt_by_recompute', 0):,}",
                ),
            ],
        ),
        "Lock files are empty and quarantined objects are read by nobody: both are "
        "left out. Nothing else is.",
        "![Flips](figures/flips.png)",
    ]


def places_text(places) -> list[tuple[str, str]]:
    """Rows of a table from (place, count)."""
    return [(f"in {place}", f"{count:,}") for place, count in places]


def _reuse(keys, config, figures: Path) -> list[str]:
    if "naive_reuse_wrong" not in keys:
        return []
    return [
        "## Reuse by equal prefix alone",
        f"Of {keys['reuse_prompts']} prompts that go on from copied entries with empty "
        f"windows and frontiers, {keys['naive_reuse_wrong']} have logits off by more "
        f"than {config['control']['tolerance']:g} (the largest error is "
        f"{keys['naive_reuse_error']:.3g}). Restored with their recent states, "
        f"{keys['ours_reuse_wrong']} have a bit other than the cold run.",
    ]


def _resident(keys, config, figures: Path) -> list[str]:
    if "scrub_overhead" not in keys:
        return []
    where = [
        (
            place,
            number(keys[f"resident_flips_injected_{place}"]),
            number(keys[f"resident_flips_detected_{place}"]),
            number(keys[f"resident_false_findings_{place}"]),
        )
        for place in ("host", "device")
    ]
    return [
        "## Flips in memory",
        f"{keys['resident_blocks']} sealed blocks ({keys['resident_bytes'] / 1e6:.3g} "
        "MB) in each memory; the scrubber goes round twice at most.",
        table(("copies", "flipped", "found", "found where nothing was"), where),
        f"At {config['resident']['sample']} block(s) a decoding step, a round of all "
        f"takes {keys['scrub_round_steps']} steps. Scrubbing takes "
        f"{keys['scrub_us_per_step']:.0f} us a step of {keys['scrub_step_ms']:.3g} ms: "
        f"{keys['scrub_overhead']:.2%}; steps with scrubbing over steps without, in "
        f"turn: {keys['scrub_step_ratio']:.3f}.",
    ]


def _storm(keys, config, figures: Path) -> list[str]:
    if "rebuild_stall_ratio" not in keys:
        return []
    storm = config["storm"]
    rows = [
        (text, *(number(keys[f"{key}{suffix}"]) for suffix in _STORMS))
        for text, key in (
            ("p99 of a step in storms over idle", "rebuild_stall_ratio"),
            ("median of a step in storms over idle", "storm_median_ratio"),
            ("p99 in storms, ms", "storm_step_ms_p99"),
            ("p99 idle, ms", "idle_step_ms_p99"),
            ("longest read of a block in storms, ms", "reader_stall_ms_max"),
            ("longest read idle, ms", "reader_idle_ms_max"),
            ("steps in storms", "storm_steps"),
            ("seconds of all storms", "storm_seconds"),
            ("blocks rebuilt", "storm_rebuilt"),
            ("reads without the right bytes", "storm_bad_reads"),
        )
    ]
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for offset, (suffix, name), color in zip(
        (-0.27, 0.0, 0.27), _STORMS.items(), (_BLUE, _GREEN, _ORANGE), strict=True
    ):
        values = [
            keys[f"{key}{suffix}"] for key in ("idle_step_ms_p99", "storm_step_ms_p99")
        ]
        bars = axes.bar([offset, 1 + offset], values, 0.26, label=name, color=color)
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set_xticks([0, 1], ["idle", "in a storm"])
    axes.set_ylabel("p99 of a step, ms")
    axes.legend()
    save_figure(figure, figures / "storm.png")
    return [
        "## Rebuilding while decoding",
        f"{storm['storms']} storms of {storm['rebuilds']} blocks, after each "
        f"{storm['window'] or storm['rebuilds']} of them as many idle steps; "
        f"{storm['rows']} sequences decode from {storm['context']} tokens on, and a "
        f"block is read every {storm['read_every']} steps. Reads of the second copy "
        f"take {storm['slow_ms']:g} ms more.",
        table(("", *_STORMS.values()), rows),
        f"Paced: {storm['per_second']:g} blocks a second are given to the rebuilder.",
        f"One after the other a block takes {keys['rebuild_serial_ms']:.3g} ms, "
        f"through the pipeline ({storm['fetchers']} threads fetch) "
        f"{keys['rebuild_pipeline_ms']:.3g} ms: {keys['rebuild_pipeline_gain']:.3g} × "
        f"faster. Damaged in both copies and recomputed from tokens to the same bits: "
        f"{keys['recomputed_without_copy']} of 1.",
        "![Storm](figures/storm.png)",
    ]


def _graph(keys, config, figures: Path) -> list[str]:
    if "graph_violations" not in keys:
        return []
    return [
        "## The graph of cache groups",
        f"{keys['graph_events']:,} random events, {keys['graph_us_per_event']:.3g} us "
        f"each. Of {keys['graph_reads']:,} reads {keys['graph_reads_given']:,} were "
        f"given, {keys['graph_violations']} of them over something stale; "
        f"{keys['graph_withheld']} were refused that could have been given.",
    ]


def _throughput(keys, config, figures: Path) -> list[str]:
    if "verify_overhead" not in keys:
        return []
    rows = [
        (
            what,
            number(keys[f"{what}_seconds"]),
            number(keys[f"{what}_seconds_unchecked"]),
        )
        for what in ("offload", "restore")
    ]
    return [
        "## A long prefix",
        f"The first token after {keys['ttft_tokens']:,} tokens: "
        f"{keys['ttft_cold_seconds']:.3g} s recomputed, "
        f"{keys['ttft_restored_seconds']:.3g} s restored from files (median of "
        f"{config['throughput']['repeats']}).",
        table(("seconds", "with CRC32C", "without"), rows),
        f"Median overhead of pairs in turn: {keys['verify_overhead']:.1%} (worst "
        f"{keys['verify_overhead_worst']:.1%}), of {keys['offload_bytes'] / 1e6:.3g} "
        "MB. Without, nothing but CRC32C is left out; headers are compared in both.",
    ]


def _crash(keys, config, figures: Path) -> list[str]:
    if "tokens_lost" not in keys:
        return []
    crash = config["crash"]
    plans = [
        *((f"a record every {n} token(s)", f"log_{n}") for n in crash["intervals"]),
        (f"no log, a snapshot every {crash['snapshot_tokens']}", "snapshot"),
    ]
    logs = [
        (key.removeprefix("catchup_seconds_"), number(value))
        for key, value in keys.items()
        if key.startswith("catchup_seconds_")
    ]
    return [
        "## Checkpoints and kill -9",
        f"{keys['kills']} kills at random moments while {crash['rows']} sequences "
        f"decode. Acknowledged tokens lost: {keys['tokens_lost']}. Made and not yet "
        f"acknowledged, lost: {keys['tokens_unacknowledged_lost']}. Of "
        f"{keys['tokens_compared']:,} tokens {keys['tokens_wrong']} differ from a run "
        f"that was never killed. From kill to the first new token, process start and "
        f"compilation included: {keys['mttr_seconds']:.3g} s (longest "
        f"{keys['mttr_seconds_max']:.3g}).",
        f"At {keys['recovery_tokens']:,} tokens, compiled functions warm on both "
        f"sides: {keys['recompute_seconds']:.3g} s to the first token recomputed, "
        f"{keys['recovery_seconds']:.3g} s from opening the checkpoint: "
        f"{keys['recovery_speedup']:.3g} ×.",
        table(
            ("", "tokens at risk a row", "ms to record a step", "share of a step"),
            [
                (
                    text,
                    number(keys[f"tokens_at_risk_{name}"]),
                    number(keys[f"record_ms_{name}"]),
                    f"{keys[f'write_overhead_{name}']:.1%}",
                )
                for text, name in plans
            ],
        ),
        f"A step takes {keys['step_ms']:.3g} ms. At {keys['incremental_context']:,} "
        f"tokens the log of 64 takes {keys['incremental_bytes'] / 1e6:.3g} MB, a "
        f"snapshot {keys['snapshot_bytes'] / 1e6:.3g} MB: "
        f"{keys['incremental_bytes_ratio']:.2%}.",
        table(("tokens in the log", "seconds to recover"), logs),
    ]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m experiments.recover.report DIR")
    print(write_report(sys.argv[1]))
