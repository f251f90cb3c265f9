"""What the life of a cache costs and whether it ever gives a wrong number.

    python -m experiments.recover --config=configs/faults.py --workdir=DIR
        [--config.flips.count=1000] [--config.tasks="('storm',)"] [--overwrite]

configs/faults.py runs the fault campaign and every measurement, configs/recover.py the
measurements alone. Run it again with the same directory after a kill: stages that are
done are not run again; the flips and the graph's events have stages of many each.

summary.json has the keys that the functions of the modules beside this one document:
`flips.run_piece` (sums), `control.run_control`, `resident.run_resident`,
`storm.run_storm`, `graph.merged`, `throughput.run_throughput` (``ttft_speedup`` bears
the length: ``ttft_speedup_16k``), `crash.run_kills`, `recovery.run_recovery`,
`recovery.run_catch_up`, `recovery.run_overhead`, ``seconds_TASK`` of each task and
``total_seconds``.
`report.BARS` says which of them has to reach what.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator

from absl import logging

from experiments import runner
from experiments.memory_plan import memory_plan
from experiments.recover.config import TASKS, Config
from experiments.recover.control import run_control
from experiments.recover.crash import run_kills
from experiments.recover.flips import run_piece
from experiments.recover.graph import merged, run_graph
from experiments.recover.recovery import run_catch_up, run_overhead, run_recovery
from experiments.recover.report import table_rows, write_report
from experiments.recover.resident import run_resident
from experiments.recover.storm import run_storm
from experiments.recover.subject import subject
from experiments.recover.throughput import run_throughput
from hybrid_attn.cache.planning import DoesNotFit

# Expected seconds on two cores, for the bar alone.
_FLIP, _EVENT = 0.025, 0.004
_EXPECTED = {"control": 8.0, "resident": 25.0, "storm": 60.0, "throughput": 60.0}

type Stage = tuple[str, float, Callable[[Callable[..., None]], dict]]


def stages(config: Config, workdir: runner.Workdir) -> Iterator[Stage]:
    """(name, expected seconds, what measures it) in the order they run."""
    seed = config.seed
    small, large = lambda: subject("small", seed), lambda: subject(config.model, seed)

    def directory(name: str):
        return workdir.file(f"checkpoints/{name}/store").parent

    def flips(number: int, count: int):
        return lambda report: run_piece(
            small(),
            directory(f"flips.{number}"),
            config.flips,
            count,
            seed + number,
            report,
        )

    for task in (task for task in TASKS if task in config.tasks):
        if task == "flips":
            for number, count in enumerate(
                _pieces(config.flips.count, config.flips.piece)
            ):
                yield f"flips.{number}", 3 + _FLIP * count, flips(number, count)
        elif task == "control":
            yield (
                task,
                _EXPECTED[task],
                lambda report: run_control(small(), config.control, seed),
            )
        elif task == "resident":
            yield (
                task,
                _EXPECTED[task],
                lambda report: run_resident(large(), config.resident, seed, report),
            )
        elif task == "storm":
            yield (
                task,
                _EXPECTED[task],
                lambda report: run_storm(
                    large(), directory("storm"), config.storm, seed, report
                ),
            )
        elif task == "graph":
            for number, count in enumerate(
                _pieces(config.graph.events, config.graph.piece)
            ):
                yield (
                    f"graph.{number}",
                    1 + _EVENT * count,
                    lambda report, n=count, s=seed + number: run_graph(n, s),
                )
        elif task == "throughput":
            yield (
                task,
                _EXPECTED[task],
                lambda report: run_throughput(
                    large(), directory("throughput"), config.throughput, seed, report
                ),
            )
        elif task == "crash":
            yield (
                "crash.kills",
                60.0,
                lambda report: run_kills(
                    directory("kills"), config.model, config.crash, seed, report
                ),
            )
            for name, expected, measure in (
                ("recovery", 30.0, run_recovery),
                ("catch_up", 60.0, run_catch_up),
                ("overhead", 40.0, run_overhead),
            ):
                yield (
                    f"crash.{name}",
                    expected,
                    lambda report, n=name, measure=measure: measure(
                        large(), directory(n) / "log", config.crash, seed, report
                    ),
                )


def _pieces(count: int, piece: int) -> list[int]:
    whole, rest = divmod(count, piece)
    return [piece] * whole + ([rest] if rest else [])


def summarise(config: Config, results: dict[str, dict]) -> dict:
    """The flat keys of summary.json from the results of all stages."""
    by_task: dict[str, list[dict]] = {}
    for name, result in results.items():
        by_task.setdefault(name.partition(".")[0], []).append(dict(result))
    spent = {
        f"seconds_{task}": sum(part.pop("seconds") for part in parts)
        for task, parts in by_task.items()
    }
    keys: dict = {}
    for task, parts in by_task.items():
        if task == "flips":
            counts: Counter[str] = Counter(
                dict.fromkeys(
                    ("flips_detected_by_scrub_only", "wrong_logits", "rebuilt"), 0
                )
            )
            for part in parts:
                counts.update(part)
            keys |= dict(counts)
        elif task == "graph":
            keys |= merged(parts)
        else:
            for part in parts:
                keys |= part
    if "ttft_speedup" in keys:
        count = keys["ttft_tokens"]
        length = f"{count // 1024}k" if count % 1024 == 0 else str(count)
        for key in ("ttft_speedup", "ttft_speedup_worst"):
            keys[f"{key}_{length}"] = keys.pop(key)
    return keys | spent | {"total_seconds": sum(spent.values())}


def _write_memory_plan(config: Config, workdir: runner.Workdir) -> None:
    largest = max(
        (config.storm.rows, config.storm.context + config.storm.room),
        (1, config.throughput.tokens),
        (1, config.crash.log_context),
        key=lambda cache: cache[0] * cache[1],
    )
    try:
        plan = memory_plan(subject(config.model, config.seed).model, *largest)
    except DoesNotFit as error:
        raise runner.ConfigError(str(error)) from error
    workdir.write_plan(plan)


def main(config: Config, workdir: runner.Workdir) -> None:
    """Measures what the directory lacks, then writes summary, report and figures."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file
    if workdir.resumed:
        print(f"Going on with the run in {workdir.path}.")
    plan = list(stages(config, workdir))
    if not plan:
        raise runner.ConfigError("nothing is left to measure: flips.count is 0")
    _write_memory_plan(config, workdir)
    with runner.Progress({name: expected for name, expected, _ in plan}) as progress:
        for name, _, measure in plan:
            if workdir.is_done(name):
                progress.skip(name)
                continue
            progress.start(name)
            begin = time.perf_counter()
            try:
                result = measure(progress.update)
            except ValueError as error:
                raise runner.ConfigError(str(error)) from error
            result["seconds"] = time.perf_counter() - begin
            task, _, number = name.partition(".")
            step = int(number) if number.isdigit() else 0
            workdir.metrics(task, step, **result)
            workdir.mark_done(name, result)
            progress.finish()
    keys = summarise(config, {name: workdir.result(name) for name, *_ in plan})
    workdir.write_summary(keys)
    written = write_report(workdir.path)
    runner.print_table(
        "Measured, and what it has to be", ("", "measured", "bar", ""), table_rows(keys)
    )
    print(f"{keys['total_seconds']:.0f} s in all. Report: {written}")


if __name__ == "__main__":
    runner.define_flags("configs/recover.py")
    runner.run("recover", Config, main)
