"""Times of the operations of pallas_kernels beside what a user would write instead.

    python -m experiments.bench_kernels --workdir=DIR [--ops=window_attention,pool]
        [--profile=cpu] [--config=configs/bench_kernels.py]

--ops and --profile are short for --config.ops and --config.profile. Every case checks
that its contenders compute the same before it times them in turn. Run it again with the
same directory after a kill: what is measured is not measured again.

On a GPU the kernels are tuned first, and the table of the device in
`pallas_kernels/tuned` (or ``--config.tables``) gets what was found.

summary.json, all under ``bench.``:

    ceilings.copy_gb_per_s, ceilings.matmul_gflop_per_s     of this device, in this run
    OP.CASE.CONTENDER.us, .median_us, .bytes, .flops, .copy_fraction, .matmul_fraction
    OP.CASE.ratio           what a user would pick / our fastest, of least times; of
                            `decay` and `mass`: with it / without it
    OP.CASE.cudnn_ratio, .tokamax_ratio, .same_layout_ratio     the same for others
    OP.CASE.xla_ratio       our implementation in XLA / our fastest
    window_attention.memory_growth, .memory_mib_LENGTH      see `memory`
    indexer_topk.peak_memory_ratio, .peak_memory_mib        see `memory`
    alignment.*             see `alignment`
    other_load              share of the cores that other processes used meanwhile
    total_seconds           of all processes of the run
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import runner
from experiments.bench_kernels import alignment, memory, report, tune
from experiments.bench_kernels.case import Case
from experiments.bench_kernels.cases import cases
from experiments.bench_kernels.config import Config
from experiments.bench_kernels.heads import Heads
from experiments.bench_kernels.measure import ceilings, measure
from experiments.peers.contention import Contention
from pallas_kernels import tuned
from pallas_kernels.autotune import NoConfiguration

type Stage = tuple[str, float, Callable[[Callable[..., None]], dict[str, Any]]]

_SHORT = re.compile(r"--?(ops|profile)=(.*)")


def stages(config: Config, profile: str) -> Iterator[Stage]:
    """(name, expected seconds, what measures it) in the order they run."""
    yield "ceilings", 2.0, lambda update: ceilings(profile, config.seconds)
    directory = Path(config.tables) if config.tables else tuned.DIRECTORY
    chosen = [case for case in cases(profile) if case.op in config.ops]
    if config.tune and jax.default_backend() == "gpu":
        for case in chosen:
            # What is compared with itself has the shapes of other cases.
            if any("{}" in pair for ratio in case.ratios.values() for pair in ratio):
                continue
            yield (
                f"tune.{case.stage}",
                config.tune_seconds,
                lambda update, case=case: tune_stage(case, config, directory, update),
            )
    for op in config.ops:
        for case in chosen:
            if case.op == op:
                yield (
                    case.stage,
                    case.expected,
                    lambda update, case=case: measure(
                        case,
                        config.seconds,
                        config.seed,
                        configs=tune.configs(case, directory),
                    ),
                )
        if op == "alignment":
            count, read = (1024, 64) if profile == "tiny" else (1 << 17, 512)
            yield (
                "alignment.records",
                10.0,
                lambda update, c=count, r=read: alignment.measure_alignment(
                    c, r, config.seconds, config.seed, jax.default_backend()
                ),
            )
        if op in ("window_attention", "indexer_topk"):
            yield (
                f"{op}.memory",
                3.0,
                lambda update, op=op: _memory(op, tiny=profile == "tiny"),
            )


def _memory(op: str, *, tiny: bool) -> dict[str, Any]:
    if op == "window_attention":
        lengths = (256, 512, 1024) if tiny else (8192, 16384, 32768)
        return memory.window_growth(lengths, 128, Heads(4, 4, 64, jnp.float32))
    entries = 4096 if tiny else 1 << 18
    return memory.indexer_peak(t=128, entries=entries, heads=4, dim=32, k=512)


def tune_stage(
    case: Case, config: Config, directory: Path, update: Any
) -> dict[str, Any]:
    """Tunes a case's kernel and adds what was found to the device's table."""
    kind = jax.devices()[0].device_kind
    try:
        found = tune.tune_case(
            case, config.seed, budget=config.tune_seconds, progress=update
        )
    except NoConfiguration as error:
        # The kernel's own default may run or not: the case itself will tell.
        return {"text": [f"no configuration ran: {error}"], "configs": 0}
    if found:
        tuned.write(tune.table_with(found, kind, directory), directory)
    lines = []
    for question, tuning in found.values():
        default = tuning.default_seconds
        lines.append(
            f"{question.op} {dict(question.sizes)}: {tuning.config}, "
            f"{1e6 * tuning.seconds:.1f} us"
            + (f" (default {1e6 * default:.1f})" if default else "")
            + f"; {tuning.timed} timed, {len(tuning.failures)} failed"
            + "".join(f"; {reason}" for reason in list(tuning.failures.values())[:1])
        )
    return {"text": lines, "configs": sum(t.timed for _, t in found.values())}


def main(config: Config, workdir: runner.Workdir) -> None:
    """Measures what the directory lacks, then writes summary, report and figure."""
    profile = config.profile
    if profile == "auto":
        profile = "gpu" if jax.default_backend() == "gpu" else "cpu"
    if workdir.resumed:
        print(f"Going on with the run in {workdir.path}.")
    begin = time.perf_counter()
    plan = list(stages(config, profile))
    try:
        with runner.Progress({name: seconds for name, seconds, _ in plan}) as progress:
            for name, _, run in plan:
                if workdir.is_done(name):
                    progress.skip(name)
                    continue
                progress.start(name)
                start = time.perf_counter()
                with Contention() as contention:
                    result = run(progress.update)
                result["seconds"] = time.perf_counter() - start
                result["other_load"] = contention.share
                workdir.rewind_metrics(name, 0)
                for contender, each in result.get("contenders", {}).items():
                    workdir.metrics(
                        name,
                        0,
                        **{f"{report.slug(contender)}.us": 1e6 * each["seconds"]},
                    )
                workdir.mark_done(name, result)
                progress.finish()
    except tuned.TableError as error:
        raise runner.ConfigError(str(error)) from error
    results = {name: workdir.result(name) for name, *_ in plan}
    measured = {k: v for k, v in results.items() if not k.startswith("tune.")}
    keys = report.summarise(measured)
    spent = workdir.add_seconds(time.perf_counter() - begin)
    workdir.write_summary(keys | {"bench.profile": profile, "total_seconds": spent})
    written = report.write_report(workdir.path)
    rows = [report.COLUMNS, *report.table_rows(measured)]
    columns, *rows = [[row[column] for column in report.TERMINAL] for row in rows]
    runner.print_table("Times", columns, rows)
    if profile == "cpu":
        runner.print_table(
            "What has to be reached on two CPU cores",
            ("", "measured", "wanted", ""),
            report.bar_rows(keys),
        )
    if caution := report.caution(keys):
        print(caution)
    print(f"{spent:.0f} s in all. Report: {written}")
    failed = [
        f"{stage}: {name}: {reason}"
        for stage, result in measured.items()
        for name, reason in result.get("failed", {}).items()
    ]
    if failed:
        print("\n".join(f"error: {line}" for line in failed), file=sys.stderr)
        raise SystemExit(1)


def long_flags(arguments: list[str]) -> list[str]:
    """--ops and --profile as the flags of the config that they mean."""

    def long(argument: str) -> str:
        match = _SHORT.fullmatch(argument)
        if match is None:
            return argument
        name, value = match.groups()
        if name == "ops":
            value = repr(tuple(op.strip() for op in value.split(",") if op.strip()))
        return f"--config.{name}={value}"

    return [long(argument) for argument in arguments]


if __name__ == "__main__":
    sys.argv[1:] = long_flags(sys.argv[1:])
    runner.define_flags("configs/bench_kernels.py")
    runner.run("bench_kernels", Config, main)
