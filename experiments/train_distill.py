"""Distillation of converted models against their teacher, for `experiments.train`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hybrid_attn as ha
from experiments import runner
from experiments.convert import (
    VariantStages,
    calibrate,
    convert_variant,
    count_cache,
    load_source,
    measure,
    quality,
    quality_stages,
    token_row,
    tokens_read,
)
from experiments.fitting import Clock, fit_stage
from experiments.train_config import DistillationConfig
from experiments.train_report import write_report
from hybrid_attn.training.data import IGNORE, Batch, TextData
from hybrid_attn.training.data.batch import generator
from hybrid_attn.training.distillation import Distiller
from hybrid_attn.training.trainer import TrainState

# Expected seconds on two cores, for the bar alone: of compiling, of a token that is
# read, and of a token that all layers are trained on.
_COMPILE, _TOKEN, _TRAINED = 15.0, 2.6e-3, 4.5e-3


def distill(config: DistillationConfig, workdir: runner.Workdir) -> None:
    """Converts, measures, distills and measures again, one variant after another."""
    clock = Clock(workdir)
    source, tokenizer = load_source(config, "config.distill.model")
    run = _Run(config, workdir, clock, source, tokenizer)
    print(f"{source[0].name}: {len(config.variants) - 1} conversions are distilled")
    with runner.Progress(run.plan()) as progress:
        for name in config.variants:
            run.variant(name, progress)
            clock.save()
    keys: dict[str, Any] = {**run.keys(), "total_seconds": clock.total()}
    workdir.write_summary(keys)
    report = write_report(workdir.path)
    rows = []
    for name in keys["variants"]:
        shown = [name]
        for key, digits in (("perplexity", 3), ("recall", 2)):
            both = (keys[f"{name}.{when}.{key}"] for when in ("before", "after"))
            shown += [f"{value:.{digits}f}" for value in both]
        rows.append(shown)
    columns = ["variant", "perplexity", "distilled", "recall", "distilled"]
    runner.print_table(f"Beside {keys['original']}", columns, rows)
    print(f"{keys['total_seconds']:.0f} s in all. Report: {report}")


@dataclasses.dataclass
class _Run:
    """The variants of one run, each with its stages."""

    config: DistillationConfig
    workdir: runner.Workdir
    clock: Clock
    source: tuple[ha.ModelConfig, ha.Model]
    tokenizer: Any

    def __post_init__(self) -> None:
        self._calibration = calibrate(self.config, self.tokenizer)
        self._data = TextData(self.config.text.path).train_bytes

    def variant(self, name: str, progress: runner.Progress) -> None:
        """Does the stages of a variant that are not done."""
        names = self._stages(name)
        if all(self._is_done(stage) for stage in names):
            for stage in names:
                progress.skip(stage)
            return
        new_config, model = convert_variant(
            self.config,
            name,
            self.config.variants[name],
            self.source,
            self._calibration,
        )
        for stage in names:
            if stage.endswith(".train"):
                model = self._train(name, model, progress)
            elif self._is_done(stage):
                progress.skip(stage)
            else:
                progress.start(stage)
                self._measure(stage, new_config, model, progress)
                progress.finish()
                self.clock.save()

    def batch(self, step: int) -> Batch:
        """The texts of a step, from random places of the files not held out."""
        config = self.config
        rng = generator("distill", config.seed, step)
        last = max(1, len(self._data) - 16 * config.length)
        rows = [
            token_row(self._data, int(first), config.length, self.tokenizer)
            for first in rng.integers(0, last, config.rows)
        ]
        tokens = np.stack(rows)
        return Batch(tokens, np.full_like(tokens, IGNORE), np.zeros_like(tokens))

    def plan(self) -> dict[str, float]:
        """Expected seconds of every stage."""
        config = self.config
        read = _COMPILE + _TOKEN * sum(tokens_read(config))
        tokens = (config.distill.steps + 2 * config.probes) * config.rows
        trained = _COMPILE + _TRAINED * tokens * config.length
        return {
            stage: trained if stage.endswith(".train") else read
            for name in config.variants
            for stage in self._stages(name)
        }

    def keys(self) -> dict[str, Any]:
        """The summary, from the stages alone."""
        config, original = self.config, self.config.original
        dense = quality(config, VariantStages(self.workdir, original))
        size = self.workdir.result(f"{original}.cache")
        keys: dict[str, Any] = {f"{original}.{k}": v for k, v in dense.items()}
        keys[f"{original}.bytes_per_token"] = size["per_token"]
        names = [name for name in config.variants if name != original]
        for name in names:
            trained = self.workdir.result(f"{name}.train")
            cache = self.workdir.result(f"{name}.before.cache")
            before, after = (
                quality(config, VariantStages(self.workdir, f"{name}.{when}"))
                for when in ("before", "after")
            )
            own: dict[str, Any] = {f"before.{k}": v for k, v in before.items()}
            own |= {f"after.{k}": v for k, v in after.items()}
            own |= {
                f"{key}_gain": after[key] / before[key]
                for key in ("perplexity", "answer_nats")
            }
            own["recall_gain"] = after["recall"] - before["recall"]
            own |= trained | {
                "bytes_per_token": cache["per_token"],
                "cache_share": cache["bytes"] / size["bytes"],
                "pattern": config.variants[name].pattern,
            }
            keys |= {f"{name}.{key}": value for key, value in own.items()}
        return keys | {
            "original": original,
            "variants": names,
            "model": self.source[0].name,
            "context": config.context,
        }

    def _stages(self, name: str) -> list[str]:
        if name == self.config.original:
            return [name]
        return [f"{name}.{what}" for what in ("before", "train", "after")]

    def _is_done(self, stage: str) -> bool:
        if stage.endswith(".train"):
            return self.workdir.is_done(stage)
        wanted = [*quality_stages(self.config, stage), f"{stage}.cache"]
        return all(self.workdir.is_done(name) for name in wanted)

    def _measure(self, stage: str, model_config, model, progress) -> None:
        count_cache(self.config, self.workdir, stage, model_config)
        stages = VariantStages(self.workdir, stage)
        measure(self.config, model_config, model, self.tokenizer, stages, progress)

    def _train(self, name: str, model: ha.Model, progress) -> ha.Model:
        """The distilled model; a finished training is read from its checkpoint."""
        config, stage = self.config, f"{name}.train"
        try:
            distiller = Distiller(self.source[1], model, config.distill)
        except ValueError as error:
            raise runner.ConfigError(
                f"config.distill.variants.{name}: {error}"
            ) from error
        progress.start(stage)
        first = f"{name}.loss"
        if not self.workdir.is_done(first):
            self.workdir.mark_done(first, self._loss(distiller, distiller.init()))
        state = fit_stage(
            self.workdir,
            stage,
            distiller,
            self.batch,
            save_every=config.save_every,
            log_every=1,
            progress=progress,
            clock=self.clock,
        )
        if not self.workdir.is_done(stage):
            last = self._loss(distiller, state)
            trained = sum(x.size for x in jax.tree.leaves(state.params))
            result = {"steps": config.distill.steps, "trained_parameters": trained}
            for key, value in self.workdir.result(first).items():
                result |= {f"{key}_first": value, f"{key}_last": last[key]}
            self.workdir.mark_done(stage, result)
        progress.finish()
        return distiller.model(state)

    def _loss(self, distiller: Distiller, state: TrainState) -> dict[str, float]:
        """Means over batches after the last step's, which no step trains on."""
        rows = []
        for number in range(self.config.probes):
            tokens = self.batch(self.config.distill.steps + number).tokens
            # Updates consume their state, and this one's is thrown away.
            _, metrics = distiller.update(jax.tree.map(jnp.copy, state), tokens)
            rows.append(jax.device_get(metrics))
        keys = [key for key in rows[0] if not key.startswith("error.")]
        return {key: float(np.mean([row[key] for row in rows])) for key in keys}
