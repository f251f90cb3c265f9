"""`convert` end to end on a model of a few thousand numbers, and what it refuses."""

import dataclasses
import json
from typing import Any

import pytest

from configs import convert as default
from experiments import convert
from experiments.convert_config import ConvertConfig, Variant, beside
from experiments.convert_report import write_report
from experiments.evaluate_config import NeedleSettings, TextSettings
from experiments.evaluate_tasks import evaluate_model
from experiments.runner import ConfigError, Workdir, to_dataclass
from hybrid_attn import weights
from tests.experiments.test_evaluate import files  # noqa: F401  (a fixture)


def config_of(files, **changes) -> ConvertConfig:  # noqa: F811
    fields: dict[str, Any] = dict(
        model=str(files[0]),
        variants={
            "dense": Variant("dense"),
            "swa": Variant("swa", sinks="logit"),
            "pooled": Variant("hca:4", entries="plain", window=8),
        },
        window=16,
        text=TextSettings(path=str(files[1]), windows=1, length=130),
        needle=NeedleSettings(lengths=(128,), depths=(0.3, 0.7), trials=1),
        chunk=64,
        calibration_texts=2,
        calibration_length=40,
        save=("dense", "swa"),
    )
    return ConvertConfig(**(fields | changes))


def run(config: ConvertConfig, directory) -> dict:
    workdir = Workdir(directory, "convert", dataclasses.asdict(config))
    try:
        convert.main(config, workdir)
    finally:
        workdir.close()
    return json.loads((directory / "summary.json").read_text())


def test_program(files, tmp_path):  # noqa: F811
    """All files; the original measures as `evaluate` does; a resumed run goes on."""
    config = config_of(files)
    keys = run(config, tmp_path)
    loaded = weights.load(files[0])
    want = evaluate_model(*loaded, weights.load_tokenizer(files[0]), config.settings)
    assert keys["dense.perplexity"] == pytest.approx(want["text.perplexity"], rel=1e-5)
    assert keys["dense.recall"] == want["needle.recall"]
    assert keys["dense.answer_nats"] == pytest.approx(want["needle.nats.128"], rel=1e-5)
    assert keys["dense.cache_share"] == keys["dense.perplexity_ratio"] == 1
    assert keys["swa.cache_bytes"] < keys["pooled.cache_bytes"]
    assert keys["pooled.cache_bytes"] < keys["dense.cache_bytes"]
    assert keys["swa.perplexity"] != keys["dense.perplexity"]
    assert keys["context"] == 130 and keys["variants"] == ["dense", "pooled", "swa"]
    report = (tmp_path / "report.md").read_text()
    assert "Llama has 'dense' alone" in report and str(files[0].parent) not in report
    assert (tmp_path / "figures" / "quality_by_bytes.png").stat().st_size > 1000
    saved, _ = weights.load(tmp_path / "models" / "dense")
    assert saved.pattern == "dense*1"
    lines = len((tmp_path / "metrics.jsonl").read_text().splitlines())
    (tmp_path / "stages" / "swa.needle.128.0.json").unlink()
    again = run(config, tmp_path)
    assert again.pop("total_seconds") > keys.pop("total_seconds")
    assert again == keys
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == lines + 1
    assert write_report(tmp_path).read_text() != ""


def test_default_config():
    """The default is the dataclass's."""
    for size in ("full", "small"):
        config = to_dataclass(ConvertConfig, default.get_config(size))
        assert config.original == "dense"
    assert to_dataclass(ConvertConfig, default.get_config()) == ConvertConfig()
    assert beside((0, 2), "hca:4", 3) == "dense,hca:4,dense"


def test_refused(files, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match=r"save names \['none'\]"):
        config_of(files, save=("none",))
    with pytest.raises(ValueError, match=r"variants \[\] have dense layers alone"):
        config_of(files, variants={}, save=())
    long = config_of(
        files, variants={"dense": Variant("dense"), "long": Variant("swa*2")}, save=()
    )
    with pytest.raises(ConfigError, match=r"config.variants.long: .* has 2 layers"):
        run(long, tmp_path)
