"""Training from scratch on bytes of text, for `experiments.train`."""

from typing import Any

from experiments import runner
from experiments.ablate_evaluate import evaluate_text
from experiments.fitting import Clock, fit_stage
from experiments.train_config import ScratchConfig
from experiments.train_report import write_report
from hybrid_attn.model import Model
from hybrid_attn.sizes import count_parameters
from hybrid_attn.training.data import TextData
from hybrid_attn.training.trainer import Trainer

# Expected seconds on two cores, for the bar alone: of a byte trained on, of a held-out
# byte, and of compiling.
_TRAIN, _READ, _COMPILE = 6e-5, 1e-5, 10.0


def scratch(config: ScratchConfig, workdir: runner.Workdir) -> None:
    """Trains; bits per byte of held-out text before and after."""
    clock, model_config, train = Clock(workdir), config.model_config, config.train
    data = _text(config)
    print(f"{model_config.pattern}: {count_parameters(model_config):,} parameters")
    trainer = Trainer(model_config, train)
    with runner.Progress(_plan(config)) as progress:

        def evaluate(stage: str, model: Model) -> None:
            progress.start(stage)
            result = evaluate_text(
                model,
                data,
                length=train.length,
                windows=config.windows,
                size=config.evaluation_batch,
            )
            workdir.mark_done(stage, result)
            progress.finish()

        if workdir.is_done("before"):
            progress.skip("before")
        else:
            evaluate("before", trainer.model(trainer.init()))
        progress.start("train")
        state = fit_stage(
            workdir,
            "train",
            trainer,
            lambda step: data.batch(train.seed, step, train.batch, train.length),
            save_every=config.save_every,
            log_every=config.log_every,
            progress=progress,
            clock=clock,
        )
        progress.finish()
        if workdir.is_done("after"):
            progress.skip("after")
        else:
            evaluate("after", trainer.model(state))
    keys = _keys(config, workdir) | {"total_seconds": clock.total()}
    workdir.write_summary(keys)
    report = write_report(workdir.path)
    rows = [[when, f"{keys[f'{when}.bits_per_byte']:.3f}"] for when in _WHEN]
    runner.print_table("Held-out text", ["", "bits per byte"], rows)
    print(f"{keys['total_seconds']:.0f} s in all. Report: {report}")


_WHEN = ("before", "after")


def _keys(config: ScratchConfig, workdir: runner.Workdir) -> dict[str, Any]:
    before, after = (workdir.result(when) for when in _WHEN)
    losses = [
        line["cross_entropy"]
        for line in workdir.read_metrics()
        if line["stage"] == "train"
    ]
    model = config.model_config
    return {
        "before.bits_per_byte": before["bits_per_byte"],
        "after.bits_per_byte": after["bits_per_byte"],
        "bits_per_byte_gain": after["bits_per_byte"] / before["bits_per_byte"],
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "steps": config.train.steps,
        "parameters": count_parameters(model),
        "model": model.name,
        "pattern": model.pattern,
        "text_bytes": after["bytes"],
    }


def _text(config: ScratchConfig) -> TextData:
    try:
        data = TextData(config.path)
    except (OSError, ValueError) as error:
        raise runner.ConfigError(f"config.scratch.path: {error}") from error
    for split, held in (("train", data.train_bytes), ("held-out", data.heldout_bytes)):
        if len(held) <= config.train.length:
            raise runner.ConfigError(
                f"config.scratch.path: the {split} split has {len(held)} bytes, too "
                f"few for windows of {config.train.length}"
            )
    return data


def _plan(config: ScratchConfig) -> dict[str, float]:
    """Expected seconds of every stage."""
    train = config.train
    read = _COMPILE / 2 + _READ * config.windows * train.length
    steps = _COMPILE + _TRAIN * train.steps * train.batch * train.length
    return {"before": read, "train": steps, "after": read}
