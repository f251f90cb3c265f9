"""`ablate` end to end with tiny budgets, and what it refuses before training."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

import hybrid_attn as ha
from configs import quickstart
from experiments import ablate, runner
from experiments.ablate_config import AblateConfig, check_equal_size
from experiments.ablate_evaluate import _edges, evaluate_recall, evaluate_text
from experiments.ablate_notes import claims, notes
from experiments.ablate_results import BUCKETS, load_results
from experiments.cost import cache_bytes_per_token, decode_ms, synthetic_fill
from experiments.runner import ConfigError, Workdir, to_dataclass
from hybrid_attn.sizes import count_parameters, equal_size, spread
from hybrid_attn.training.data import TextData

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ("swa", "csa")


def tiny(path, **changes) -> ConfigDict:
    """The quickstart, cut down to what compiles fast."""
    config = quickstart.get_config()
    config.variants = VARIANTS
    config.patterns = {"swa": "swa", "csa": "csa", "wrong": "cas"}
    config.model.hidden_size = 16
    config.model.feed_forward_size = 8
    config.model.heads = config.model.kv_heads = config.model.dense_kv_heads = 2
    config.model.head_dim = 8
    config.model.window = 3
    near = {"near_queries": 2, "near_window": 3}
    config.recall.task.update({"pairs": 4, "queries": 4, "length": 64, **near})
    config.recall.train.update({"steps": 4, "batch": 4})
    config.recall.update({"rows": 64, "evaluation_batch": 32})
    config.text.train.update({"steps": 4, "batch": 2, "length": 32})
    config.text.windows = 8
    config.data.path = str(path)
    config.measure.contexts = (64, 300)
    config.measure.prefill_lengths = (40,)
    config.measure.update({"decode_steps": 3, "decode_warmup": 1, "capacity": 512})
    config.save_every = config.log_every = 2
    config.update_from_flattened_dict(changes)
    return config


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    words = np.random.default_rng(0).choice(["alpha ", "beta ", "gamma\n"], 4000)
    path.write_text("".join(words))
    return path


@pytest.fixture(scope="module")
def config(text) -> AblateConfig:
    return to_dataclass(AblateConfig, tiny(text))


def open_workdir(path, config) -> Workdir:
    return Workdir(path, "ablate", dataclasses.asdict(config))


def numbers(path) -> dict:
    """What a run found, without what the clock gave."""
    keys = json.loads((path / "summary.json").read_text())
    timed = ("decode", "prefill", "seconds")
    return {k: v for k, v in keys.items() if not any(word in k for word in timed)}


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    ablate.main(config, open_workdir(path, config))
    return path


@pytest.mark.xdist_group("ablate")
def test_run_writes_every_key_and_file(finished, config):
    keys = json.loads((finished / "summary.json").read_text())
    for name in VARIANTS:
        for bucket in BUCKETS:
            assert 0 <= keys[f"{name}.recall_{bucket}"] <= 1
        # Untrained, a byte costs 8 bits and some more.
        assert 0 < keys[f"{name}.bits_per_byte"] < 12
        assert keys[f"{name}.cache_bytes_per_token"] > 0
        assert keys[f"{name}.prefill_tokens_per_s"] > 0
        assert keys[f"{name}.parameters"] == count_parameters(config.text_models[name])
        assert keys[f"{name}.seeds"] == [0]
    assert keys["total_seconds"] > 0
    assert keys["text_bytes"] == 8 * 32
    assert all(
        set(r.decode_ms) == {64, 300} and min(r.decode_ms.values()) > 0
        for r in load_results(finished)
    )
    report = (finished / "report.md").read_text()
    for word in ("token shift", "synthetic fill", "flatters", "One seed"):
        assert word in report
    assert {p.name for p in (finished / "figures").iterdir()} == {
        "recall_by_distance.png",
        "quality_vs_cache_bytes.png",
        "decode_vs_context.png",
    }
    steps = [
        line["step"]
        for line in Workdir.read_metrics(open_workdir(finished, config))
        if line["stage"] == "csa.0.recall"
    ]
    assert steps == [2, 4]


@pytest.mark.xdist_group("ablate")
def test_killed_run_resumes_and_finds_the_same(finished, config, tmp_path, monkeypatch):
    """Killed in the second variant's training on text, between two checkpoints."""
    metrics, stages = Workdir.metrics, []

    def killed(self, stage, step, **values):
        metrics(self, stage, step, **values)
        # The line of step 4 is written, its checkpoint is not.
        if stage == "csa.0.text" and step == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Workdir, "metrics", killed)
    with pytest.raises(KeyboardInterrupt):
        ablate.main(config, open_workdir(tmp_path, config))
    assert not (tmp_path / "summary.json").exists()
    assert [r.name for r in load_results(tmp_path)] == ["swa"]

    def counted(self, stage, step, **values):
        stages.append((stage, step))
        metrics(self, stage, step, **values)

    monkeypatch.setattr(Workdir, "metrics", counted)
    workdir = open_workdir(tmp_path, config)
    assert workdir.resumed
    ablate.main(config, workdir)
    # From the checkpoint of step 2 on, and nothing that was done.
    assert stages == [("csa.0.text", 4), ("csa.0.cost", 0)]
    assert numbers(tmp_path) == numbers(finished)
    keys = json.loads((tmp_path / "summary.json").read_text())
    parts = [workdir.result(f"process.{n}")["seconds"] for n in (0, 1)]
    assert keys["total_seconds"] == pytest.approx(sum(parts), abs=1)
    lines = [(x["stage"], x["step"]) for x in workdir.read_metrics()]
    assert len(set(lines)) == len(lines)


@pytest.mark.xdist_group("ablate")
def test_second_seed_is_trained_but_not_timed(finished, config):
    two = dataclasses.replace(config, seeds=2)
    assert ablate._tasks(0) == ("recall", "text", "cost")
    assert ablate._tasks(1) == ("recall", "text")
    run = ablate.Run(two, None, None, None, "swa", 1)  # type: ignore[arg-type]
    assert run._seeded(two.text.train).seed == 1
    results = load_results(finished)
    results += [
        dataclasses.replace(r, seed=1, bits_per_byte=r.bits_per_byte + 0.5)
        for r in results
    ]
    (line,) = [
        line for line in notes(two, results, {}, text_bytes=1) if "Order" in line
    ]
    assert "not told from" in line


def test_other_config_is_refused_and_nothing_is_touched(config, tmp_path):
    open_workdir(tmp_path, config)
    before = (tmp_path / "config.json").read_bytes()
    other = dataclasses.replace(config, seeds=2)
    with pytest.raises(runner.WorkdirError, match=r"seeds is 1 there and 2 now"):
        open_workdir(tmp_path, other)
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ("swa", "hybird")}, "unknown variant 'hybird'.*csa, swa"),
        ({"variants": ("swa", "swa")}, "expected different names"),
        ({"variants": ("wrong",)}, "wrong='cas': unknown mixer kind 'cas'"),
        ({"patterns.csa": "csa*"}, "variant csa: layer pattern 'csa\\*'"),
        ({"model.window": 64}, "no query beyond_window"),
        ({"recall.rows": 33}, "rows=33 is not a multiple"),
        ({"text.train.length": 10**6}, "train split has"),
        ({"measure.contexts": ()}, "contexts=\\(\\)"),
    ],
)
def test_bad_config_is_named_before_anything_runs(text, changes, message):
    with pytest.raises(ConfigError, match=message):
        to_dataclass(AblateConfig, tiny(text, **changes))


def test_unknown_or_reserved_model_field_is_named(text):
    for field, message in (
        ("windw", r"variant swa.windw; did you mean .*window"),
        ("pattern", "config.model.pattern is set by the program"),
    ):
        config = tiny(text).to_dict()
        config["model"][field] = 3
        with pytest.raises(ConfigError, match=message):
            to_dataclass(AblateConfig, config)


def test_missing_text_ends_in_one_line_and_leaves_no_directory(tmp_path):
    run = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.ablate", f"--workdir={run}"),
            *("--config=configs/quickstart.py", "--config.data.path=/nowhere"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: no text file under '/nowhere'")
    assert not run.exists()


def test_quickstart_is_a_config_at_equal_size():
    config = to_dataclass(AblateConfig, quickstart.get_config())
    assert config.variants == ("dense", "swa", "hca", "csa", "hybrid")
    assert (config.window, config.reach, config.layers) == (8, 24, 3)
    for models in (config.recall_models, config.text_models):
        counts = {name: count_parameters(model) for name, model in models.items()}
        assert spread(counts)[0] < 0.01


def test_presets_have_equal_size():
    counts = {
        name: count_parameters(ha.presets.get(name))
        for name in ha.presets.names()
        if name.startswith("tiny_")
    }
    assert len(counts) == 5
    assert spread(counts)[0] < 0.05


def test_equal_size_widens_all_but_the_largest(config):
    base = config.text_models["swa"].replace(feed_forward_size=8)
    given = {p: base.replace(pattern=p) for p in ("dense", "swa", "csa", "hca,csa")}
    sized = equal_size(given)
    counts = {name: count_parameters(model) for name, model in sized.items()}
    assert sized["hca,csa"] == given["hca,csa"]
    assert spread(counts)[0] < 0.03
    for name, model in sized.items():
        assert model.feed_forward_size % 4 == 0
        assert model == given[name].replace(feed_forward_size=model.feed_forward_size)
    with pytest.raises(ConfigError, match=r"hca,csa has .* and (dense|swa) .* apart"):
        check_equal_size(given)


@pytest.mark.parametrize("length", [0, 5, 61, 700])
def test_decoding_on_a_synthetic_fill_is_finite(config, length):
    model_config = config.text_models["csa"].replace(pattern="dense,hca,swa,csa")
    model = ha.Model(model_config, rngs=nnx.Rngs(0))
    cache = ha.init_cache(model_config, 1, 768)
    filled = synthetic_fill(cache, length, jax.random.key(0))
    assert int(filled.length[0]) == length
    assert int(cache.length[0]) == 0
    before, after = jax.tree.leaves(cache), jax.tree.leaves(filled)
    for old, new in zip(before, after, strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
    values = np.concatenate([np.ravel(x) for x in jax.tree.leaves(filled.layers)])
    assert abs(values.mean()) < 0.05
    assert abs(values.std() - 1) < 0.05
    # Past the next boundary of every ratio, so that open groups close.
    tokens = np.arange(20)[None] % 256
    logits, later = ha.step(model, filled, jnp.asarray(tokens, jnp.int32))
    assert np.isfinite(np.asarray(logits)).all()
    assert int(later.length[0]) == length + 20
    assert int(later.faults[0]) == 0
    # Every group that closes is written, the one that was open at the fill too.
    for layer, ratio in ((1, 16), (3, 4)):
        old, new = (np.asarray(c.layers[layer]["entries"].key) for c in (filled, later))
        written = np.flatnonzero((old != new).any(axis=(0, 2, 3)))
        assert list(written) == list(range(length // ratio, (length + 20) // ratio))


def test_synthetic_fill_refuses_a_length_beyond_capacity(config):
    cache = ha.init_cache(config.text_models["swa"], 1, 256)
    with pytest.raises(ValueError, match=r"length=257: expected 0\.\.256"):
        synthetic_fill(cache, 257, jax.random.key(0))


def test_decode_times_and_cache_bytes(config):
    model_config = config.text_models["swa"]
    model = ha.Model(model_config, rngs=nnx.Rngs(0))
    times = decode_ms(model, (100, 20), warmup=1, steps=3)
    assert set(times) == {20, 100}
    assert min(times.values()) > 0
    ledger = ha.cache_bytes(ha.init_cache(model_config, 1, 512))
    assert cache_bytes_per_token(model_config, 512) == ledger.per_token


def test_evaluation_scores_a_model_that_knows_and_one_that_guesses(config, text):
    """A constant answer is right as often as its token is the target."""
    model = ha.Model(config.recall_models["swa"], rngs=nnx.Rngs(0))
    assert model.unembed is not None
    found = evaluate_recall(model, config)
    assert set(found["recall"]) == {"offset", "aligned"}
    queries = sum(item["queries"] for item in found["bins"])
    task = config.recall.task
    assert queries == config.recall.rows * (task.queries + task.near_queries)

    # Logits of zero: exactly 8 bits a byte.
    model = ha.Model(config.text_models["swa"], rngs=nnx.Rngs(0))
    flat = jax.tree.map(jnp.zeros_like, model)
    data = TextData(text)
    got = evaluate_text(flat, data, length=32, windows=5, size=2)
    assert got == {"bits_per_byte": pytest.approx(8.0), "bytes": 5 * 32}


def test_bins_end_at_the_window_and_the_reach():
    assert _edges(70, 8, 24) == [1, 2, 4, 8, 16, 25]
    assert _edges(100, 8, 24) == [1, 2, 4, 8, 16, 25, 64]
    assert _edges(20, 8, 24) == [1, 2, 4, 8, 16]


def test_two_models_that_learned_nothing_are_no_result():
    keys = {
        "hybrid.recall_beyond_reach": 0.03,
        "dense.recall_beyond_reach": 0.03,
        "swa.recall_beyond_reach": 0.03,
        "swa.recall_in_window": 0.9,
    }
    holds = {claim.key: claim.holds for claim in claims(keys)}
    assert holds == {
        "swa_inside": True,
        "hybrid_like_dense": False,
        "hybrid_above_swa": False,
    }
    keys |= {"dense.recall_beyond_reach": 0.95, "hybrid.recall_beyond_reach": 0.9}
    assert all(claim.holds for claim in claims(keys))
