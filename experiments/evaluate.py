"""What a pretrained model is worth: perplexity, recall over long text, greedy text.

    python -m experiments.evaluate --config=configs/evaluate.py --workdir=DIR
        [--config.model=FILE.gguf or a directory] [--config.needle.trials=4]
        [--config.text.path=DIR_OR_GLOB] [--overwrite]

Run it again with the same directory after a kill: finished windows and haystacks are
not read again.

Stages of the directory: text.I, needle.LENGTH.TRIAL and generate hold what was
measured, process.N the seconds of each process. summary.json has the keys of
`evaluate_tasks.summarise`, ``model`` (its name), ``parameters`` and
``total_seconds`` (of all processes, without imports).
"""

import math
import time
from typing import Any

from experiments import runner
from experiments.evaluate_config import EvaluateConfig
from experiments.evaluate_report import MODEL_STAGE, write_report
from experiments.evaluate_tasks import evaluate_model
from hybrid_attn import weights
from hybrid_attn.sizes import count_parameters

# Expected seconds on two cores, for the bar alone: of a token, and of a token and a
# token before it.
_TOKEN, _PAIR = 2.4e-3, 6e-7
_GENERATE = 12.0


class Stages:
    """A run's stages as the results of `evaluate_model`; new ones go to the metrics."""

    def __init__(self, workdir: runner.Workdir):
        self._workdir = workdir

    def __contains__(self, name: object) -> bool:
        return self._workdir.is_done(str(name))

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._workdir.result(name)

    def __setitem__(self, name: str, result: dict[str, Any]) -> None:
        task, _, number = name.partition(".")
        self._record(task, number, result)
        self._workdir.mark_done(name, result)

    def _record(self, task: str, number: str, result: dict[str, Any]) -> None:
        self._workdir.metrics(task, _step(number), **_measures(result))


def _step(number: str) -> int:
    """Windows count by themselves, haystacks by length · 1000 + trial."""
    length, _, trial = number.partition(".")
    return int(length) * 1000 + int(trial) if trial else int(length or 0)


def _measures(result: dict[str, Any]) -> dict[str, float]:
    if "asked" in result:
        rows = result["asked"]
        values = {
            "recall": sum(row["found"] for row in rows) / len(rows),
            "nats_per_token": sum(row["nats"] for row in rows) / len(rows),
        }
    elif "bins" in result:
        nats = result["nats"] / result["tokens"]
        values = {"nats_per_token": nats, "perplexity": math.exp(nats)}
    else:
        values = {"tokens": result["tokens"]}
    return values | {"seconds": result["seconds"]}


def main(config: EvaluateConfig, workdir: runner.Workdir) -> None:
    """Measures what the directory lacks, then writes report, figures and summary."""
    begin = time.monotonic()
    path = config.model_path
    try:
        model_config, model = weights.load(path)
        tokenizer = weights.load_tokenizer(path)
    except (ModuleNotFoundError, ValueError) as error:
        raise runner.ConfigError(f"config.model: {error}") from error
    facts = {
        "model": model_config.name,
        "layers": model_config.pattern,
        "parameters": count_parameters(model_config),
        "file": path.name,
    }
    workdir.mark_done(MODEL_STAGE, facts)
    print(f"{facts['model']}: {facts['parameters']:,} parameters, {facts['layers']}")
    if workdir.resumed:
        print(f"Going on with the run in {workdir.path}.")
    with runner.Progress(_plan(config)) as progress:
        running: list[str] = []

        def report(task: str, share: float, note: str) -> None:
            if task not in running:
                running.append(task)
                progress.start(task)
            progress.update(share, note)
            if share >= 1 - 1e-9 and note:
                progress.finish()

        try:
            keys = evaluate_model(
                model_config,
                model,
                tokenizer,
                config,
                results=Stages(workdir),
                report=report,
            )
        finally:
            seconds = workdir.add_seconds(time.monotonic() - begin)
    keys |= {key: facts[key] for key in ("model", "parameters")}
    keys["total_seconds"] = seconds
    workdir.write_summary(keys)
    written = write_report(workdir.path)
    rows = [
        [key, f"{v:.4g}" if isinstance(v, float) else str(v)] for key, v in _main(keys)
    ]
    runner.print_table("What the model is worth", ["", "value"], rows)
    print(f"{seconds:.0f} s in all. Report: {written}")


def _main(keys: dict[str, Any]) -> list[tuple[str, Any]]:
    """The keys without those of single depths and positions."""
    return [
        (key, value)
        for key, value in keys.items()
        if key.count(".") < 3 and not key.startswith("text.nats.")
    ]


def _plan(config: EvaluateConfig) -> dict[str, float]:
    """Expected seconds of every task that is asked for."""
    text, needle = config.text, config.needle
    branches = [1 - depth for depth in needle.depths]
    read = sum(branches) + max(needle.depths)
    plan = {
        "text": text.windows * _cost(text.length, 1.0),
        "needle": needle.trials * sum(_cost(n, read) for n in needle.lengths),
        "generate": _GENERATE if config.generate.tokens else 0.0,
    }
    return {task: seconds for task, seconds in plan.items() if seconds}


def _cost(length: int, times: float) -> float:
    return times * length * (_TOKEN + _PAIR * length * 0.6)


if __name__ == "__main__":
    runner.define_flags("configs/evaluate.py")
    runner.run("evaluate", EvaluateConfig, main)
