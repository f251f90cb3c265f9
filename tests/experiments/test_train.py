"""`train` end to end on models of a few thousand numbers, and what it refuses."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import distill as distill_default
from configs import train as train_default
from experiments import train, train_distill
from experiments.convert_config import Variant
from experiments.evaluate_config import NeedleSettings, TextSettings
from experiments.evaluate_tasks import evaluate_model
from experiments.runner import ConfigError, Workdir, to_dataclass
from experiments.train_config import (
    DistillationConfig,
    ScratchConfig,
    TrainProgramConfig,
)
from experiments.train_report import write_report
from hybrid_attn import weights
from hybrid_attn.training.distillation import DistillConfig
from hybrid_attn.training.optimizer import OptimizerConfig
from hybrid_attn.training.trainer import TrainConfig
from tests.experiments.test_evaluate import files  # noqa: F401  (a fixture)


class Killed(Exception):
    pass


def scratch_config(text, **changes) -> TrainProgramConfig:
    fields: dict[str, Any] = dict(
        pattern="hca:4,csa",
        model={
            "hidden_size": 16,
            "feed_forward_size": 16,
            "head_dim": 4,
            "rope_dims": 4,
        },
        train=TrainConfig(
            steps=6,
            batch=4,
            length=40,
            optimizer=OptimizerConfig(peak_rate=2e-2, warmup=1),
        ),
        path=str(text),
        windows=6,
        evaluation_batch=4,
        save_every=2,
        log_every=2,
    )
    return TrainProgramConfig(scratch=ScratchConfig(**(fields | changes)))


def distill_config(files, **changes) -> TrainProgramConfig:  # noqa: F811
    fields: dict[str, Any] = dict(
        model=str(files[0]),
        variants={
            "dense": Variant("dense"),
            "window": Variant("swa"),
            "routed": Variant("csa:4", window=8, top_k=4),
        },
        window=16,
        text=TextSettings(path=str(files[1]), windows=1, length=130),
        needle=NeedleSettings(lengths=(128,), depths=(0.5,), trials=1),
        chunk=64,
        calibration_texts=2,
        calibration_length=40,
        distill=DistillConfig(
            steps=4, optimizer=OptimizerConfig(peak_rate=1e-2, warmup=1, weight_decay=0)
        ),
        rows=2,
        length=48,
        probes=1,
        save_every=2,
    )
    return TrainProgramConfig(distill=DistillationConfig(**(fields | changes)))


def run(config: TrainProgramConfig, directory) -> dict:
    workdir = Workdir(directory, "train", dataclasses.asdict(config))
    try:
        train.main(config, workdir)
    finally:
        workdir.close()
    return json.loads((directory / "summary.json").read_text())


def killed_at(monkeypatch, stage: str, step: int) -> None:
    """The next metrics of that stage and step end the process."""
    metrics = Workdir.metrics

    def dying(self, name, number, **values):
        if (name, number) == (stage, step):
            raise Killed
        metrics(self, name, number, **values)

    monkeypatch.setattr(Workdir, "metrics", dying)


def test_scratch(files, tmp_path, monkeypatch):  # noqa: F811
    """Bits per byte fall; killed and resumed it gives the same numbers."""
    config = scratch_config(files[1])
    keys = run(config, tmp_path / "whole")
    assert keys["after.bits_per_byte"] < 0.95 * keys["before.bits_per_byte"]
    # Before training nothing is known: about the log of 256 bytes, and more.
    assert keys["before.bits_per_byte"] > 7
    assert keys["loss_last"] < keys["loss_first"]
    assert keys["steps"] == 6 and keys["text_bytes"] == 6 * 40
    assert keys["pattern"] == "hca:4,csa"
    report = (tmp_path / "whole" / "report.md").read_text()
    assert f"{keys['after.bits_per_byte']:.3f}" in report
    assert str(files[1].parent) not in report
    assert (tmp_path / "whole" / "figures" / "loss.png").stat().st_size > 1000
    with monkeypatch.context() as patch:
        killed_at(patch, "train", 6)
        with pytest.raises(Killed):
            run(config, tmp_path / "cut")
    again = run(config, tmp_path / "cut")
    again.pop("total_seconds"), keys.pop("total_seconds")
    assert again == keys
    lines = [
        json.loads(line)
        for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [2, 4, 6]


def test_distill(files, tmp_path, monkeypatch):  # noqa: F811
    """Keys, files, the original; killed within a training and resumed: the same."""
    config = distill_config(files)
    keys = run(config, tmp_path / "whole")
    loaded = weights.load(files[0])
    settings = config.distill.settings  # type: ignore[union-attr]
    want = evaluate_model(*loaded, weights.load_tokenizer(files[0]), settings)
    assert keys["dense.perplexity"] == pytest.approx(want["text.perplexity"], rel=1e-5)
    assert keys["dense.recall"] == want["needle.recall"]
    assert keys["variants"] == ["window", "routed"] and keys["original"] == "dense"
    for name in keys["variants"]:
        assert keys[f"{name}.before.perplexity"] != keys[f"{name}.after.perplexity"]
        ratio = keys[f"{name}.after.perplexity"] / keys[f"{name}.before.perplexity"]
        assert keys[f"{name}.perplexity_gain"] == pytest.approx(ratio)
        assert {f"{name}.{when}.recall" for when in ("before", "after")} <= set(keys)
        assert keys[f"{name}.loss_last"] < keys[f"{name}.loss_first"]
        assert keys[f"{name}.steps"] == 4 and 0 < keys[f"{name}.cache_share"] < 1
    # One layer: its sink's key and value, of two heads of eight.
    assert keys["window.trained_parameters"] == 2 * 2 * 8
    assert "window.indexer_loss_first" not in keys
    total = keys["routed.output_error_first"] + keys["routed.indexer_loss_first"]
    assert keys["routed.loss_first"] == pytest.approx(total, rel=1e-5)
    report = (tmp_path / "whole" / "report.md").read_text()
    assert "- routed: distillation" in report and str(files[0].parent) not in report
    for name in ("loss", "quality_by_bytes"):
        file = tmp_path / "whole" / "figures" / f"{name}.png"
        assert file.stat().st_size > 1000
    for stage, step in (("routed.train", 4), ("routed.after.needle", 128000)):
        with monkeypatch.context() as patch:
            killed_at(patch, stage, step)
            with pytest.raises(Killed):
                run(config, tmp_path / "cut")
    again = run(config, tmp_path / "cut")
    again.pop("total_seconds"), keys.pop("total_seconds")
    assert again == keys
    # Finished, it only writes the report anew.
    done = run(config, tmp_path / "cut")
    done.pop("total_seconds")
    assert done == keys and write_report(tmp_path / "cut").read_text()


def test_batches_are_functions_of_the_step(files, tmp_path):  # noqa: F811
    config = distill_config(files)
    settings, path = config.distill, files[0]
    assert settings is not None
    workdir = Workdir(tmp_path, "train", dataclasses.asdict(config))
    tokenizer, source = weights.load_tokenizer(path), weights.load(path)
    make = lambda: train_distill._Run(settings, workdir, None, source, tokenizer)  # type: ignore # noqa: E731
    one, other = make(), make()
    first = one.batch(0).tokens
    assert first.shape == (2, 48) and first.dtype == np.int32
    assert (one.batch(3).tokens == other.batch(3).tokens).all()
    assert (one.batch(3).tokens != first).any()
    workdir.close()


def test_default_configs():
    for size in ("full", "small"):
        config = to_dataclass(TrainProgramConfig, train_default.get_config(size))
        assert config.distill is None and config.scratch is not None
        assert config.scratch.model_config.pattern == "hca,swa,csa"
        config = to_dataclass(TrainProgramConfig, distill_default.get_config(size))
        assert config.scratch is None and config.distill is not None
        assert config.distill.original == "dense"
    full = to_dataclass(TrainProgramConfig, distill_default.get_config())
    assert full.distill == DistillationConfig()


def test_refused(files, tmp_path):  # noqa: F811
    with pytest.raises(ConfigError, match=r"expected one of config.scratch"):
        TrainProgramConfig()
    with pytest.raises(ValueError, match=r"length=16 lies within the window of window"):
        distill_config(files, length=16)
    with pytest.raises(ValueError, match="expected one to distill"):
        distill_config(files, variants={"dense": Variant("dense")})
    with pytest.raises(ValueError, match=r"model\.vocab_size is set by the program"):
        ScratchConfig(model={"vocab_size": 3})
    with pytest.raises(ValueError, match="save_every and log_every"):
        ScratchConfig(save_every=0)
    bare = {"dense": Variant("dense"), "bare": Variant("swa", sinks="none")}
    with pytest.raises(ValueError, match=r"variants.bare has none of distill.parts"):
        distill_config(files, variants=bare)
    with pytest.raises(ConfigError, match=r"train split has \d+ bytes, too few"):
        run(
            scratch_config(files[1], train=TrainConfig(length=100_000)),
            tmp_path / "long",
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config=configs/distill.py", "--config.distill.distil.steps=3"],
            "unknown key config.distill.distil; did you mean config.distill.distill?",
        ),
        (
            ["--config=configs/distill.py", "--config.distill.model=no/such/file"],
            "config.model='no/such/file' does not exist",
        ),
        (["--config.scratch.preset=tiny_none"], "tiny_none"),
    ],
)
def test_bad_config_is_one_line(arguments, message, tmp_path):
    done = subprocess.run(
        [
            sys.executable, "-m", "experiments.train",
            f"--workdir={tmp_path / 'run'}", *arguments,
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
