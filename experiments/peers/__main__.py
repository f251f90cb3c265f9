"""Measures hybrid_attn and the eager PyTorch DeepSeek-V4 in one run.

    python -m experiments.peers --workdir=runs/peers

The peer needs Python 3.11 and runs in an environment of its own, made at first use in
`.venv-peers` under the repository root; `--torch_env=DIR` names another one.
"""

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags

from experiments import runner
from experiments.peers import environment, growth, ours, peer, report
from experiments.peers.config import Config
from experiments.peers.contention import Contention
from experiments.peers.sizes import torch_model_fields

_ROOT = Path(__file__).resolve().parents[2]
_TORCH_ENV = flags.DEFINE_string(
    "torch_env",
    None,
    "directory of a Python 3.11 environment with torch and transformers, used as it is"
    " or made there; .venv-peers under the repository root if not given",
)
# Expected seconds on two cores; they only shape the progress bar.
_STAGES = {"environment": 5.0, "transformers": 110.0, "hybrid_attn": 45.0}
_CONTROL = "transformers_one_stream"
_FULL = "hybrid_attn_full_block"
_GROWTH = "growth"


def _environment(say: Callable[[str], None]) -> Path:
    named = _TORCH_ENV.value
    directory = Path(named) if named else _ROOT / ".venv-peers"
    return environment.ensure(directory, own=named is None, say=say)


def _request(config: Config, hyper_connections: bool, export: Path) -> dict:
    cases = [*config.cases(config.transformers), config.chunked_case()]
    if not hyper_connections:
        # The minute of the longest single forward says nothing about the streams.
        del cases[-2]
    request = {
        "model": torch_model_fields(config.model(), config.experts, hyper_connections),
        "threads": os.cpu_count(),
        "seed": 0,
        "cases": cases,
    }
    # The weights and tokens that our full block then reads.
    return {**request, "export": str(export)} if hyper_connections else request


def _measured(measure: Callable[[], dict]) -> dict:
    """Runs one side and adds when it ran and what else the machine did."""
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    start = time.perf_counter()
    with Contention() as contention:
        answer = measure()
    seconds = time.perf_counter() - start
    return {
        **answer,
        "measured_at": at,
        "seconds": seconds,
        "other_load": contention.share,
    }


def main(config: Config, workdir: runner.Workdir) -> None:
    """Measures what is not measured yet, then writes the summary and the report."""
    stages = {**_STAGES, _FULL: 60.0}
    if config.hyper_connection_control:
        stages[_CONTROL] = 25.0
    if config.growth.contexts:
        stages[_GROWTH] = 45.0
    try:
        with runner.Progress(stages) as progress:
            results = _measure_all(config, workdir, progress, stages)
    except (environment.EnvironmentProblem, peer.PeerFailed) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2) from error
    _write(config, workdir, results)


def _measure_all(
    config: Config,
    workdir: runner.Workdir,
    progress: runner.Progress,
    stages: dict[str, float],
) -> dict[str, dict]:
    # Never two at a time: both sides use every core.
    sides: dict[str, Callable[[Path | None], dict]] = {}
    exported = workdir.file("checkpoints/transformers/model").parent

    def theirs(name: str, hyper_connections: bool):
        return lambda python: peer.measure(
            python,
            _request(config, hyper_connections, exported),
            progress.say,
            lambda seconds: progress.update(min(0.99, seconds / stages[name])),
        )

    sides["transformers"] = theirs("transformers", True)
    if config.hyper_connection_control:
        sides[_CONTROL] = theirs(_CONTROL, False)
    sides["hybrid_attn"] = lambda _: ours.measure(
        config.model(),
        config.cases(config.hybrid_attn),
        lambda line: progress.say(f"hybrid_attn: {line}"),
    )
    sides[_FULL] = lambda _: ours.measure(
        config.model(),
        config.cases(config.hybrid_attn),
        lambda line: progress.say(f"hybrid_attn, full block: {line}"),
        exported,
    )
    if config.growth.contexts:
        sides[_GROWTH] = lambda _: growth.measure(
            config.model(),
            config.growth,
            lambda line: progress.say(f"growth: {line}"),
        )
    python = None
    if all(workdir.is_done(name) for name in sides if name.startswith("transformers")):
        progress.skip("environment")
    else:
        progress.start("environment")
        python = _environment(progress.say)
        progress.finish()
    for name, measure in sides.items():
        if workdir.is_done(name):
            progress.skip(name)
            continue
        progress.start(name)
        workdir.rewind_metrics(name, 0)
        answer = _measured(lambda measure=measure: measure(python))
        for case in answer.get("cases", ()):
            workdir.metrics(
                name,
                case["context"],
                case=case["name"],
                prefill_tokens_per_s=case["prefill_tokens_per_s"],
                decode_ms_per_token=case["decode_ms_per_token"],
            )
        workdir.mark_done(name, answer)
        progress.finish()
    return {name: workdir.result(name) for name in sides}


def _write(config: Config, workdir: runner.Workdir, results: dict[str, dict]) -> None:
    summary = report.summarise(config, results)
    summary["total_seconds"] = sum(answer["seconds"] for answer in results.values())
    workdir.write_summary(summary)
    report.draw(config, summary, workdir.file("figures/peers.png"))
    env = json.loads(workdir.file("env.json").read_text(encoding="utf-8"))
    command = f"python -m experiments.peers --workdir={workdir.path}"
    text = report.markdown(config, results, summary, env, command)
    runner.write_atomic(workdir.file("report.md"), text)
    runner.print_table(
        "hybrid_attn beside transformers' eager DeepSeek-V4",
        report.TABLE,
        report.table_rows(config, summary),
    )
    for line in report.growth_lines(config, summary):
        print(line)
    for doubt in report.doubts(results):
        print(f"caution: {doubt}")
    print(f"{workdir.file('report.md')}")


if __name__ == "__main__":
    # The peer runs on the CPU; a ratio to an accelerator would say nothing.
    jax.config.update("jax_platforms", "cpu")
    runner.define_flags("configs/peers.py")
    runner.run("peers", Config, main)
