"""`evaluate` end to end on a model of a few thousand numbers, and what it refuses."""

import dataclasses
import json
import math

import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from configs import evaluate as default
from experiments import evaluate
from experiments.evaluate_config import (
    EvaluateConfig,
    EvaluateSettings,
    GenerateSettings,
    NeedleSettings,
    TextSettings,
)
from experiments.evaluate_tasks import evaluate_model
from experiments.runner import ConfigError, Workdir, to_dataclass
from hybrid_attn import weights
from hybrid_attn.training.data import TextData
from tests.weights.llama_files import byte_level, tokenizer_fields, write

VOCAB = 300
FIELDS = {
    "block_count": 1,
    "embedding_length": 16,
    "feed_forward_length": 24,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {
    "token_embd": (VOCAB, 16),
    "output_norm": (16,),
    "blk.0.attn_norm": (16,),
    "blk.0.attn_q": (16, 16),
    "blk.0.attn_k": (16, 16),
    "blk.0.attn_v": (16, 16),
    "blk.0.attn_output": (16, 16),
    "blk.0.ffn_norm": (16,),
    "blk.0.ffn_gate": (24, 16),
    "blk.0.ffn_up": (24, 16),
    "blk.0.ffn_down": (16, 24),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(a model's file, a text's file)."""
    directory = tmp_path_factory.mktemp("evaluate")
    rng = np.random.default_rng(0)
    words = rng.choice(["alpha ", "beta ", "gamma\n", "ümlaut 12 "], 9000)
    text = directory / "words.txt"
    text.write_text("".join(words))
    _, model = byte_level(["".join(words)], VOCAB)
    tensors = {
        f"{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    file = directory / "small.gguf"
    write(file, FIELDS, tensors, tokenizer_fields(model))
    return file, text


def settings(file, **changes) -> EvaluateSettings:
    fields = dict(
        text=TextSettings(path=str(file), windows=2, length=200),
        needle=NeedleSettings(lengths=(128, 200), depths=(0.2, 0.7), trials=2),
        generate=GenerateSettings(prompt="alpha", tokens=5),
        chunk=64,
    )
    return EvaluateSettings(**(fields | changes))


@pytest.fixture(scope="module")
def measured(files):
    """(config, model, tokenizer, results, keys) of one evaluation."""
    config, model = weights.load(files[0])
    tokenizer, results = weights.load_tokenizer(files[0]), {}
    keys = evaluate_model(config, model, tokenizer, settings(files[1]), results=results)
    return config, model, tokenizer, results, keys


def test_text_is_forward(files, measured):
    """Nats and bytes of a window, by the training form."""
    _, model, tokenizer, results, keys = measured
    data = TextData(files[1]).heldout_bytes.tobytes().decode("utf-8", "replace")
    ids = np.array(tokenizer.encode(data).ids[:200])
    logits = np.asarray(ha.forward(model, ids[None]))[0, :-1].astype(np.float64)
    total = np.log(np.exp(logits).sum(-1)) - logits[np.arange(199), ids[1:]]
    window = results["text.0"]
    assert window["nats"] == pytest.approx(total.sum(), rel=1e-5)
    assert window["tokens"] == 199 and keys["text.tokens"] == 398
    assert window["bytes"] == len(tokenizer.decode(ids[1:].tolist()).encode())
    both = [results[f"text.{i}"]["nats"] for i in (0, 1)]
    assert keys["text.perplexity"] == pytest.approx(math.exp(sum(both) / 398))
    assert [b[:2] for b in window["bins"]] == [[0, 64], [64, 128], [128, 199]]
    assert window["bins"][0][2] == pytest.approx(total[:64].sum(), rel=1e-5)


def test_needle_is_forward(files, measured):
    """Going on from a fork in the middle is reading the whole text."""
    config, model, tokenizer, results, _ = measured
    deep = NeedleSettings(lengths=(200,), depths=(0.7,), trials=1)
    text = dataclasses.replace(settings(files[1]).text, windows=0)
    alone: dict = {}
    only = settings(
        files[1], text=text, needle=deep, generate=GenerateSettings(tokens=0)
    )
    evaluate_model(config, model, tokenizer, only, results=alone)
    got, want = alone["needle.200.0"]["asked"][0], results["needle.200.0"]["asked"][1]
    assert got["nats"] == pytest.approx(want["nats"], rel=1e-5)
    assert got["answer"] == want["answer"]
    assert len(got["answer"].strip()) == 4 and got["found"] is False


def test_generation_and_results_kept(files, measured):
    config, model, tokenizer, results, keys = measured
    assert keys["generate.tokens"] == 5
    assert set(results) == {
        *("text.0", "text.1", "generate"),
        *(f"needle.{n}.{i}" for n in (128, 200) for i in (0, 1)),
    }
    # What is done is taken as it is: no model is needed.
    again = evaluate_model(
        config, model, tokenizer, settings(files[1]), results=results
    )
    assert again == keys


def test_other_architecture(files, measured):
    """The same call measures a hybrid of the same vocabulary."""
    config = measured[0].replace(
        pattern="swa,hca", window=8, hca_ratio=16, tied_scale=None
    )
    model = ha.Model(config, rngs=nnx.Rngs(0))
    few = settings(
        files[1],
        text=TextSettings(path=str(files[1]), windows=1, length=100),
        needle=NeedleSettings(lengths=()),
        generate=GenerateSettings(tokens=0),
    )
    keys = evaluate_model(config, model, measured[2], few)
    assert VOCAB / 9 < keys["text.perplexity"] < VOCAB * 9
    with pytest.raises(ConfigError, match=r"tokens, the model 100"):
        small = config.replace(vocab_size=100)
        evaluate_model(small, model, measured[2], few)


def test_program(files, measured, tmp_path, capsys):
    """All files, and a resumed run that does only what is missing."""
    values = default.get_config()
    values.model = str(files[0])
    for key, value in dataclasses.asdict(settings(files[1])).items():
        values[key] = value
    config = to_dataclass(EvaluateConfig, values)
    workdir = Workdir(tmp_path, "evaluate", dataclasses.asdict(config))
    evaluate.main(config, workdir)
    workdir.close()
    keys = json.loads((tmp_path / "summary.json").read_text())
    for key, value in measured[4].items():
        assert keys[key] == (
            pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        ), key
    assert keys["parameters"] == sum(math.prod(s) for s in SHAPES.values())
    report = (tmp_path / "report.md").read_text()
    assert "Needles" in report and str(files[0].parent) not in report
    for name in ("needle_recall.png", "nats_by_position.png"):
        assert (tmp_path / "figures" / name).stat().st_size > 1000
    lines = len((tmp_path / "metrics.jsonl").read_text().splitlines())
    (tmp_path / "stages" / "needle.200.1.json").unlink()
    workdir = Workdir(tmp_path, "evaluate", dataclasses.asdict(config))
    evaluate.main(config, workdir)
    workdir.close()
    again = json.loads((tmp_path / "summary.json").read_text())
    assert again.pop("total_seconds") > keys.pop("total_seconds")
    assert again == keys
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == lines + 1


def test_refused(files, tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        _ = EvaluateConfig(model="nowhere").model_path
    for wrong in (
        lambda: TextSettings(length=1),
        lambda: NeedleSettings(depths=(0.1, 1.2)),
        lambda: NeedleSettings(lengths=(64,)),
        lambda: GenerateSettings(prompt=""),
        lambda: EvaluateSettings(chunk=8),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrong()
    config = EvaluateConfig(model=str(tmp_path))
    workdir = Workdir(tmp_path / "run", "evaluate", dataclasses.asdict(config))
    with pytest.raises(ConfigError, match=r"config\.model"):
        evaluate.main(config, workdir)
