"""What each attention mode costs and forgets, from models trained here and now.

    python -m experiments.ablate --config=configs/quickstart.py --workdir=DIR
        [--config.seeds=3] [--config.data.path=DIR_OR_GLOB] [--overwrite]

Every variant is trained on recall and on bytes of text, at equal parameters, and then
measured. Run it again with the same directory after a kill: finished stages are
skipped, and an unfinished training goes on from its last checkpoint.

Stages of the directory: V.S.recall, V.S.text and V.0.cost of variant V and seed S hold
parts, V.S a finished `VariantResult`, process.N the seconds of each process.
summary.json has the keys of `ablate_results.summary_keys`, `total_seconds` (of all
processes, without imports), `claims.*` (1 holds, 0 does not) and `text_bytes`.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

from experiments import runner
from experiments.ablate_config import AblateConfig
from experiments.ablate_evaluate import evaluate_recall, evaluate_text
from experiments.ablate_notes import claim_line, claims, notes
from experiments.ablate_report import (
    TEXT_STAGE,
    DistanceBin,
    VariantResult,
    load_results,
    summary_keys,
    table_rows,
    write_report,
)
from experiments.cost import cache_bytes_per_token, decode_ms, prefill_tokens_per_s
from experiments.fitting import Clock, fit_stage
from hybrid_attn.config import ModelConfig
from hybrid_attn.model import Model
from hybrid_attn.sizes import count_parameters
from hybrid_attn.training.data import Batch
from hybrid_attn.training.trainer import TrainConfig, Trainer

COMMAND = "python -m experiments.ablate --config=configs/quickstart.py --workdir=DIR"
TASKS = ("recall", "text", "cost")
# Expected seconds, for the bar alone: a recall step, a text step, all of measuring,
# and what compiling and evaluating add to a training.
_STEP = {"recall": 0.05, "text": 0.2}
_COST, _EXTRA = 12.0, 12.0


@dataclasses.dataclass
class Run:
    """One variant with one seed: its stages, each done once."""

    config: AblateConfig
    workdir: runner.Workdir
    progress: runner.Progress
    clock: Clock
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}.{self.seed}"

    def all(self) -> None:
        """Trains, evaluates and measures what is not done, and stores the result."""
        for task in _tasks(self.seed):
            stage = f"{self.name}.{task}"
            if self.workdir.is_done(stage):
                self.progress.skip(stage)
                continue
            self.progress.start(stage)
            begin = time.monotonic()
            result = getattr(self, task)(stage)
            seconds = time.monotonic() - begin
            self.workdir.mark_done(stage, result | {"seconds": seconds})
            self.progress.finish()
            self.clock.save()
        self.workdir.mark_done(self.name, self.result().to_json())

    def recall(self, stage: str) -> dict[str, Any]:
        """Trains on recall; accuracy by distance."""
        task, train = self.config.recall.task, self._seeded(self.config.recall.train)
        model = self._train(
            stage,
            self.config.recall_models[self.variant],
            train,
            lambda step: task.batch(train.seed, step, train.batch),
        )
        return evaluate_recall(model, self.config)

    def text(self, stage: str) -> dict[str, Any]:
        """Trains on text; bits per byte of held-out text."""
        text = self.config.text
        return evaluate_text(
            self._text_model(stage),
            self.config.text_data,
            length=text.train.length,
            windows=text.windows,
            size=text.evaluation_batch,
        )

    def cost(self, stage: str) -> dict[str, Any]:
        """Times the trained text model."""
        measure = self.config.measure
        model = self._text_model(f"{self.name}.text")
        tokens = np.asarray(self.config.text_data.heldout_bytes)
        prefill = prefill_tokens_per_s(model, tokens, measure.prefill_lengths)
        self.progress.update(0.4, "decoding")
        decode = decode_ms(
            model,
            measure.contexts,
            warmup=measure.decode_warmup,
            steps=measure.decode_steps,
        )
        self.workdir.metrics(
            stage, 0, **{f"decode_ms_{n}": v for n, v in decode.items()}
        )
        return {"decode_ms": decode, "prefill_tokens_per_s": prefill}

    def result(self) -> VariantResult:
        """The result, from the stages."""
        config, name = self.config, self.name
        parts = {t: self.workdir.result(f"{name}.{t}") for t in _tasks(self.seed)}
        cost = parts.get("cost", {"decode_ms": {}, "prefill_tokens_per_s": {}})
        model = config.text_models[self.variant]
        return VariantResult(
            name=self.variant,
            seed=self.seed,
            parameters=count_parameters(model),
            recall=parts["recall"]["recall"],
            recall_by_distance=[DistanceBin(**b) for b in parts["recall"]["bins"]],
            bits_per_byte=parts["text"]["bits_per_byte"],
            cache_bytes_per_token=cache_bytes_per_token(model, config.measure.capacity),
            prefill_tokens_per_s=_by_length(cost["prefill_tokens_per_s"]),
            decode_ms=_by_length(cost["decode_ms"]),
            window=config.window,
            reach=config.reach,
            chance=1 / config.recall.task.pairs,
            stack=model.pattern,
            seconds=sum(part["seconds"] for part in parts.values()),
            curves=self._curves(),
        )

    def _text_model(self, stage: str) -> Model:
        """The text model; a finished training is read from its checkpoint."""
        train, data = self._seeded(self.config.text.train), self.config.text_data
        return self._train(
            stage,
            self.config.text_models[self.variant],
            train,
            lambda step: data.batch(train.seed, step, train.batch, train.length),
        )

    def _train(
        self,
        stage: str,
        model: ModelConfig,
        train: TrainConfig,
        batch_at: Callable[[int], Batch],
    ) -> Model:
        trainer = Trainer(model, train)
        state = fit_stage(
            self.workdir,
            stage,
            trainer,
            batch_at,
            save_every=self.config.save_every,
            log_every=self.config.log_every,
            progress=self.progress,
            clock=self.clock,
        )
        return trainer.model(state)

    def _seeded(self, train: TrainConfig) -> TrainConfig:
        return dataclasses.replace(train, seed=train.seed + self.seed)

    def _curves(self) -> dict[str, list[tuple[int, float]]]:
        curves = {}
        for line in self.workdir.read_metrics():
            for task in ("recall", "text"):
                if line["stage"] == f"{self.name}.{task}":
                    value = line.get("cross_entropy")
                    if value is not None:
                        points = curves.setdefault(f"{task}_cross_entropy", [])
                        points.append((line["step"], value))
        return curves


def main(config: AblateConfig, workdir: runner.Workdir) -> None:
    """Runs what the directory lacks, then writes report, figures and summary."""
    # Orbax reports every save in a dozen lines.
    logging.set_verbosity(logging.WARNING)
    runs = [(name, seed) for seed in range(config.seeds) for name in config.variants]
    clock = Clock(workdir)
    _announce(config, workdir)
    with runner.Progress(_plan(config, runs)) as progress:
        for name, seed in runs:
            Run(config, workdir, progress, clock, name, seed).all()
    finish(config, workdir, clock)


def finish(config: AblateConfig, workdir: runner.Workdir, clock: Clock) -> None:
    """Table, report.md, figures and summary.json, from the finished stages."""
    results = load_results(workdir.path)
    keys = summary_keys(results)
    text_bytes = workdir.result(f"{config.variants[0]}.0.text")["bytes"]
    lines = notes(config, results, keys, text_bytes=text_bytes)
    workdir.mark_done(TEXT_STAGE, {"command": COMMAND, "notes": lines})
    report = write_report(workdir.path)
    for claim in claims(keys):
        keys[f"claims.{claim.key}"] = int(claim.holds)
    keys["text_bytes"] = text_bytes
    keys["total_seconds"] = clock.total()
    workdir.write_summary(keys)
    columns, rows = table_rows(results)
    runner.print_table("What each attention mode costs and forgets", columns, rows)
    for claim in claims(keys):
        print(claim_line(claim))
    print(f"{keys['total_seconds']:.0f} s in all. Report: {report}")


def _announce(config: AblateConfig, workdir: runner.Workdir) -> None:
    models = config.text_models
    rows = [
        [
            name,
            model.pattern,
            str(model.feed_forward_size),
            f"{count_parameters(model):,}",
        ]
        for name, model in models.items()
    ]
    columns = ["variant", "layers", "feed-forward", "parameters"]
    runner.print_table(f"{len(rows)} variants, {config.seeds} seed(s)", columns, rows)
    if workdir.resumed:
        print(f"Going on with the run in {workdir.path}.")


def _tasks(seed: int) -> tuple[str, ...]:
    return TASKS if seed == 0 else TASKS[:-1]


def _plan(config: AblateConfig, runs: list[tuple[str, int]]) -> dict[str, float]:
    """Expected seconds of every stage."""
    steps = {"recall": config.recall.train.steps, "text": config.text.train.steps}
    return {
        f"{name}.{seed}.{task}": _COST
        if task == "cost"
        else _EXTRA + _STEP[task] * steps[task]
        for name, seed in runs
        for task in _tasks(seed)
    }


def _by_length(record: dict[Any, float]) -> dict[int, float]:
    """JSON makes every key a string."""
    return {int(length): value for length, value in record.items()}


if __name__ == "__main__":
    runner.define_flags("configs/quickstart.py")
    runner.run("ablate", AblateConfig, main)
