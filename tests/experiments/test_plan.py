"""`plan`: against published figures, against traced products, and as a program."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from experiments import plan, plan_count
from experiments.plan_config import PlanConfig
from experiments.runner import ConfigError
from experiments.workdir import Workdir
from hybrid_attn.config import HyperConfig, MoEConfig
from hybrid_attn.layers import linear
from hybrid_attn.sizes import count_parameters
from hybrid_attn.step import pure_step
from hybrid_attn.testing import small_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The directory and summary of the default plan."""
    config, path = PlanConfig(), tmp_path_factory.mktemp("plan") / "run"
    workdir = Workdir(path, "plan", dataclasses.asdict(config))
    plan.main(config, workdir)
    workdir.close()
    return path, json.loads((path / "summary.json").read_text())


def test_published_parameters(planned):
    keys = planned[1]
    assert keys["flash.parameters"] == pytest.approx(284e9, rel=0.01)
    # 1.6T has two digits: the model alone rounds to it, and one draft layer fills up
    # what is missing to it.
    assert round(keys["pro.parameters"] / 1e12, 1) == 1.6
    assert keys["pro.parameters_with_draft"] == pytest.approx(1.6e12, rel=0.01)
    assert round(keys["pro.active_parameters"] / 1e9) == 49
    assert round(keys["flash.active_parameters"] / 1e9) == 13
    for name in ("pro", "flash"):
        model = ha.presets.get(f"deepseek_v4_{name}")
        assert keys[f"{name}.parameters"] == count_parameters(model)
    pro = ha.presets.get("deepseek_v4_pro")
    drafted = count_parameters(pro.replace(pattern=pro.pattern + ",swa"))
    assert keys["pro.parameters_with_draft"] == drafted


def test_published_cache_bytes(planned):
    keys = planned[1]
    assert keys["flash.cache_bytes_per_token_bf16"] == 6880
    assert keys["pro.cache_bytes_per_token_bf16"] == 9848
    assert int(keys["flash.cache_bytes_per_token_records"]) == 3514
    assert int(keys["pro.cache_bytes_per_token_records"]) == 5031
    assert round(keys["pro.cache_gib_at_context_bf16"], 2) == 9.62
    assert round(keys["pro.cache_gib_at_context_records"], 2) == 4.91
    assert round(keys["flash.cache_gib_at_context_bf16"], 2) == 6.72
    assert round(keys["flash.cache_gib_at_context_records"], 2) == 3.43
    # 61 layers of 8 keys and 8 values of 128 channels.
    dense = keys["pro_dense.cache_bytes_per_token_bf16"]
    assert dense == 61 * 2 * 8 * 128 * 2
    assert keys["pro.cache_ratio_to_dense"] == 9848 / dense
    assert round(keys["pro.cache_ratio_to_dense_records"], 2) == 0.02


def test_report_and_figure(planned):
    path, keys = planned
    report = (path / "report.md").read_text()
    for text in ("1,573.0B", "1,598.7B", "-1.69 %", "9,848", "5,031", "56 query heads"):
        assert text in report
    assert (path / "figures" / "plan.png").stat().st_size > 10_000
    assert keys["total_seconds"] < 60
    parts = [keys[f"pro.flops_per_token.{part}"] for part in plan_count.FLOP_PARTS]
    assert sum(parts) == keys["pro.flops_per_token"]


# -- FLOPs against the products of a traced step ---------------------------------------


def products(jaxpr) -> int:
    """FLOPs of every matrix product of a jaxpr, loop bodies once."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            depth = int(np.prod([shape[axis] for axis in contracted]))
            total += 2 * depth * int(np.prod(equation.outvars[0].aval.shape))
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                total += products(inner) if hasattr(inner, "eqns") else 0
    return total


def traced_step(config, capacity: int):
    """The jaxpr of one decoded token, and its function and abstract arguments."""
    model = nnx.eval_shape(lambda: ha.Model(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    # With one token to take back the ring holds the window and no more.
    cache = jax.eval_shape(lambda: ha.init_cache(config, 1, capacity, undo=1))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def run(state, cache, tokens):
        model = nnx.merge(graph, state)
        return pure_step(model, cache, tokens, logits="last")[0]

    return run, (state, cache, tokens)


CONFIGS = {
    "dense": small_config("dense"),
    "swa": small_config("swa"),
    "hca": small_config("hca"),
    "csa": small_config("csa"),
    "ranks": small_config(
        "swa,csa,hca", query_rank=16, output_groups=2, output_rank=8, window=16
    ),
    "streams": small_config("hca,csa", hyper=HyperConfig(streams=3, iterations=2)),
    "own values": small_config("hca,csa", kv_heads=2, shared_kv=False),
    "tied": small_config("swa", tie_embeddings=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_of_the_products(name, monkeypatch):
    # On CPU the product of one row is written as sums, which are no products here.
    monkeypatch.setattr(
        linear, "row_product", lambda row, w, index, parts=8: row @ w[index]
    )
    config, context = CONFIGS[name], 64
    run, arguments = traced_step(config, context)
    want = products(jax.make_jaxpr(run)(*arguments).jaxpr)
    assert sum(plan_count.flops(config, context).values()) == want


def test_flops_beside_the_compiler():
    """XLA counts the element-wise operations too."""
    config = small_config("hca,csa", hidden_size=128, feed_forward_size=256)
    run, arguments = traced_step(config, 64)
    cost = jax.jit(run).lower(*arguments).compile().cost_analysis()
    ours = sum(plan_count.flops(config, 64).values())
    assert ours < cost["flops"] < 1.5 * ours


def test_flops_of_experts_by_hand():
    moe = MoEConfig(experts=8, chosen=3, width=12, hash_layers=(0,))
    config = small_config("swa*2", moe=moe)
    parts = plan_count.flops(config, 64)
    d, shared = config.hidden_size, config.feed_forward_size
    one = 3 * 3 * d * moe.width + 3 * d * shared + d * moe.experts
    assert parts["experts"] == 2 * 2 * one
    weights = plan_count.weights(config)
    assert weights.experts == 2 * 8 * 3 * d * 12
    inactive = weights.experts * 5 // 8 + weights.embedding
    assert weights.active == weights.total - inactive


def test_short_contexts():
    """Before the first entry there is none to score; a window is as long as it is."""
    config = small_config("csa,hca")
    assert plan_count.flops(config, 3)["indexer"] == 0
    assert plan_count.flops(config, 3)["attention"] == 2 * 2 * 3 * 4 * 2 * 8
    assert plan_count.flops(config, 4)["indexer"] == 2 * 2 * (8 + 1)


def test_shardings():
    config = ha.presets.get("deepseek_v4_flash")
    lines = plan_count.cache_lines(config, 4096)
    row = sum(line.bytes for line in lines)
    weights = plan_count.weights(config)

    def held(sharding, devices=32, rows=40):
        return plan_count.device_bytes(
            config,
            lines,
            devices=devices,
            rows=rows,
            sharding=sharding,
            weight_bits=16,
            expert_bits=8,
        )

    rest = 2 * (weights.total - weights.experts)
    assert held("replicated") == (rest + weights.experts, 2 * row, row)
    assert held("experts") == (rest + weights.experts / 32, 2 * row, row)
    # 256 experts on 100 devices: three on the fullest.
    assert held("experts", devices=100)[0] == rest + weights.experts * 3 / 256
    split, cache, _ = held("experts_heads")
    divided = weights.embedding + weights.head + weights.by_head
    assert split == rest - 2 * divided * 31 / 32 + weights.experts / 32
    assert cache == 40 * row  # one key/value head: nothing to divide
    dense = plan_count.dense_twin(config)
    lines = plan_count.cache_lines(dense, 4096)
    row = sum(line.bytes for line in lines)
    cache = plan_count.device_bytes(
        dense,
        lines,
        devices=4,
        rows=3,
        sharding="experts_heads",
        weight_bits=16,
        expert_bits=16,
    )[1]
    assert cache == 3 * row / 4


# -- the program -----------------------------------------------------------------------


def program(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "experiments.plan", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_any_preset(tmp_path):
    done = program(
        "--model=tiny_hybrid",
        "--context=4096",
        "--devices",
        "2",
        "--config.beside=()",
        f"--workdir={tmp_path / 'run'}",
    )
    assert done.returncode == 0, done.stderr
    keys = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert keys["devices"] == 2
    config = ha.presets.get("tiny_hybrid")
    assert keys["tiny_hybrid.parameters"] == count_parameters(config)
    assert "pro.parameters" not in keys
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["context"] == 4096


def test_unknown_model(tmp_path):
    done = program("--model=deepseek_v4_por", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    for text in ("unknown preset 'deepseek_v4_por'", "did you mean 'deepseek_v4_pro'"):
        assert text in done.stderr
    assert not (tmp_path / "run").exists()


def test_config_is_checked():
    with pytest.raises(ConfigError, match=r"config\.devices=0: expected 1 or more"):
        PlanConfig(devices=0)
    with pytest.raises(ConfigError, match=r"unknown preset 'x', expected one of tiny"):
        PlanConfig(beside=("x",))
    assert plan.long_flags(["--model=a", "--context", "5", "--devices=2"]) == [
        "--config.model=a",
        "--config.context",
        "5",
        "--config.devices=2",
    ]
    assert plan.long_flags(["--models=a", "--config.model=b"]) == [
        "--models=a",
        "--config.model=b",
    ]
