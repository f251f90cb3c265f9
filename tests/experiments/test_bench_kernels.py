"""`experiments.bench_kernels`: cases of every profile, the comparison, the program."""

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

from experiments.bench_kernels import alignment, memory, report, tune
from experiments.bench_kernels.__main__ import long_flags, tune_stage
from experiments.bench_kernels.case import Case, Contender, Given
from experiments.bench_kernels.cases import cases
from experiments.bench_kernels.config import OPS, Config
from experiments.bench_kernels.heads import Heads
from experiments.bench_kernels.measure import Disagreement, measure, ratios
from pallas_kernels import tuned
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.lowering import DEVICES, abstract_mesh, kernels, lower
from pallas_kernels.timing import Times


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_every_case_can_be_traced(profile):
    """Shapes agree and all but what needs a GPU is there; nothing is computed."""
    found = list(cases(profile))
    assert {case.op for case in found} == set(OPS) - {"alignment"}
    assert len({case.stage for case in found}) == len(found)
    for case in found:
        arrays = {name: given.abstract for name, given in case.arrays.items()}
        shapes = {}
        for each in case.contenders:
            if each.platform is None:
                out = jax.eval_shape(each.function, arrays)
                shapes[each.name] = jax.tree.map(lambda x: x.shape, out)
            assert each.bytes > 0 and each.flops > 0
        assert any(each.ours and each.platform is None for each in case.contenders)
        if case.tolerance is not None:
            assert len({str(shape) for shape in shapes.values()}) == 1, case.stage


def test_kernels_that_serve_the_gpu_cases():
    """What an H200 is to run: each operation's kernel takes a case of the profile."""
    for case in cases("gpu"):
        arrays = {name: given.abstract for name, given in case.arrays.items()}
        kernels = [each for each in case.contenders if each.name == "mosaic_gpu"]
        for each in kernels:
            with jax.sharding.use_abstract_mesh(abstract_mesh("h200")):
                jax.eval_shape(lambda a, f=each.function: f(a), arrays)
        assert len(kernels) == 1, case.stage


@pytest.mark.parametrize("device", tune.TABLES)
def test_shipped_tables_know_the_gpu_cases(device):
    """Else run `python -m experiments.bench_kernels.tune`."""
    table = tuned.load(DEVICES[device].device_kind)
    assert table is not None
    missing = {entry.key for entry in tune.waiting(device)} - {
        entry.key for entry in table.entries
    }
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("device", tune.TABLES)
def test_tuned_configurations_are_lowered(device):
    """With what the shipped table says of each GPU case, or the default."""
    for case in cases("gpu"):
        arrays = {name: given.abstract for name, given in case.arrays.items()}
        for each in case.contenders:
            if each.ours and each.platform is not None:
                try:
                    text = lower(each.function, arrays, device=device)
                except Unsupported:
                    # The best one serves all: see above.
                    assert not each.name.startswith("mosaic_gpu ")
                    assert each.name != "mosaic_gpu"
                    continue
                assert kernels(text) >= 1, (case.stage, each.name)


def two(first, second, **fields) -> Case:
    def contender(name, function, ours):
        return Contender(
            name=name, function=function, bytes=8, flops=4, reads="x", ours=ours
        )

    fields = {"ratios": {"ratio": ("plain", "ours")}, **fields}
    return Case(
        op="pool",
        name="two",
        shape="2",
        arrays={"x": Given((2,))},
        contenders=[
            contender("xla", first, True),
            contender("plain", second, False),
        ],
        **fields,
    )


def test_contenders_that_differ_are_not_timed():
    case = two(lambda a: a["x"], lambda a: 1.1 * a["x"])
    with pytest.raises(Disagreement, match=r"pool\.two: xla differs from plain"):
        measure(case, 0.001, 0)
    result = measure(dataclasses.replace(case, tolerance=0.2), 0.001, 0)
    assert result["difference"] == pytest.approx(0.1 / 1.1, rel=0.01)
    nan = two(lambda a: a["x"] * jnp.nan, lambda a: a["x"])
    with pytest.raises(Disagreement, match="nan"):
        measure(nan, 0.001, 0)


def test_a_missing_baseline_is_named():
    def missing(arrays):
        raise ImportError("no such package")

    result = measure(two(lambda a: a["x"], missing), 0.001, 0)
    assert result["refused"] == {"plain": "ImportError: no such package"}
    assert list(result["contenders"]) == ["xla"] and result["ratios"] == {}
    with pytest.raises(ImportError):
        measure(two(missing, lambda a: a["x"]), 0.001, 0)


def test_a_kernel_that_fails_or_errs_is_not_timed():
    def kernel(function):
        here = jax.default_backend()
        first = Contender(
            name="mosaic_gpu",
            function=function,
            bytes=8,
            flops=4,
            reads="x",
            ours=True,
            platform=here,
        )
        case = two(lambda a: a["x"], lambda a: a["x"], tolerance=None)
        return dataclasses.replace(case, contenders=[first, *case.contenders])

    def broken(arrays):
        raise RuntimeError("ptxas")

    result = measure(kernel(broken), 0.001, 0)
    assert result["failed"] == {"mosaic_gpu": "RuntimeError: ptxas"}
    result = measure(kernel(lambda a: 2 * a["x"]), 0.001, 0)
    assert "differs from xla by 1" in result["failed"]["mosaic_gpu"]
    assert list(result["contenders"]) == ["xla", "plain"]
    result = measure(kernel(lambda a: 1.01 * a["x"]), 0.001, 0)
    assert result["failed"] == {} and "mosaic_gpu" in result["contenders"]


def test_ratios_by_name_and_by_implementation():
    case = next(c for c in cases("cpu") if c.stage == "window_attention.decay")
    times = {
        "xla with decay": Times(3.0, 4.0, (3.0, 6.0, 4.5)),
        "xla": Times(2.0, 3.0, (2.0, 3.0, 3.0)),
        "mosaic_gpu": Times(1.0, 1.0, (1.0,)),
    }
    assert ratios(case, times) == {"ratio": 1.5}
    times["mosaic_gpu with decay"] = Times(1.25, 1.25, (1.25,))
    assert ratios(case, times) == {"ratio": 1.25}
    case = next(c for c in cases("cpu") if c.stage == "indexer_topk.256k_4x32")
    times = {
        "xla": Times(2.0, 2.0, (2.0,)),
        "top_k of entries × dim": Times(5.0, 9.0, (9.0, 5.0)),
    }
    assert ratios(case, times) == {"ratio": 2.5}


def test_summary_and_bars():
    load = {"seconds": 1.0, "other_load": 0.0}
    case = measure(two(lambda a: a["x"], lambda a: a["x"]), 0.001, 0) | load
    case["contenders"]["xla"]["seconds"] = 1e-6
    case["contenders"]["plain"]["seconds"] = 3e-6
    results = {
        "ceilings": {"copy": 16e6, "matmul": 8e6, **load},
        "pool.two": case,
        "indexer_topk.memory": {"peak_memory_ratio": 0.2, **load},
    }
    keys = report.summarise(results)
    assert keys["bench.pool.two.xla.us"] == pytest.approx(1.0)
    assert keys["bench.pool.two.xla.copy_fraction"] == pytest.approx(0.5)
    assert keys["bench.pool.two.plain.matmul_fraction"] == pytest.approx(1 / 6)
    assert keys["bench.pool.two.xla_ratio"] == 1.0
    assert report.bar_rows(keys) == [
        ("indexer_topk.peak_memory_ratio", "0.2", "at most 0.1", "NOT MET")
    ]
    assert report.caution(keys) is None
    results["pool.two"]["other_load"] = 0.9
    assert "30 %" in (report.caution(report.summarise(results)) or "")


def test_window_memory_is_linear():
    found = memory.window_growth((512, 1024, 2048), 64, Heads(2, 2, 16, jnp.float32))
    assert found["memory_growth"] == pytest.approx(found["length_growth"], rel=0.05)


def test_alignment_of_the_same_records():
    found = alignment.measure_alignment(512, 64, 0.005, 0, "cpu")
    assert found["tuned"] == 64 and found["padding_bytes"] == 640 - 584
    assert found["padding_bytes_256"] == 768 - 584
    assert found["null"] == (found["gain"] <= found["noise"])
    assert found["noise"] >= 1.0 and found["us_1"] > 0


@dataclasses.dataclass(frozen=True)
class Block:
    size: int


def test_a_kernel_that_asks_is_tuned(tmp_path):
    """With a kernel that asks its table as ours do, and a clock of its own."""
    kind = jax.devices()[0].device_kind
    legal = (Block(1), Block(2), Block(4))
    traced = []

    def kernel(arrays):
        config = tuned.choose("op", {"n": 2}, np.float32, legal, directory=tmp_path)
        traced.append(config)
        return arrays["x"] + 0

    case = two(kernel, lambda a: a["x"])
    seconds = iter([5.0, 3.0, 1.0, 2.0, 5.0, 1.0])

    def timer(calls, *, seconds_=seconds, seconds=0.0):
        for call in calls.values():
            call()
        return {
            name: Times(t, t, (t,)) for name, t in zip(calls, seconds_, strict=False)
        }

    found = tune.tune_case(case, 0, timer=timer)
    question, tuning = found["op"]
    assert (question.sizes, question.dtype) == ({"n": 2}, "float32")
    assert tuning.config == Block(2) and tuning.timed == 4
    assert set(traced) == {None, *legal}
    tuned.write(tune.table_with(found, kind, tmp_path), tmp_path)
    assert tune.configs(case, tmp_path) == {"op": Block(2)}
    measure(case, 0.001, 0, configs=tune.configs(case, tmp_path))
    assert traced[-1] == Block(2)


def test_the_tuning_stage_writes_a_table(tmp_path):
    def kernel(arrays):
        config = tuned.choose("op", {"n": 2}, np.float32, (Block(1), Block(2)))
        return arrays["x"] + (0 if config is None else 0 * config.size)

    case = two(kernel, lambda a: a["x"])
    found = tune_stage(case, Config(tune_seconds=1.0), tmp_path, lambda fraction: None)
    assert found["configs"] == 3 and "op {'n': 2}: Block(size=" in found["text"][0]
    table = tuned.load(jax.devices()[0].device_kind, tmp_path)
    assert table is not None and table.jax == jax.__version__
    (entry,) = table.entries
    assert entry.microseconds is not None and entry.config in ({"size": 1}, {"size": 2})

    def broken(arrays):
        del arrays
        tuned.choose("op", {"n": 2}, np.float32, (Block(1),))
        raise RuntimeError("ptxas")

    with pytest.raises(RuntimeError):
        tune_stage(two(broken, kernel), Config(), tmp_path, lambda fraction: None)


def test_short_flags():
    assert long_flags(["--ops=pool, morton", "--profile=cpu", "--x=1"]) == [
        "--config.ops=('pool', 'morton')",
        "--config.profile=cpu",
        "--x=1",
    ]
    with pytest.raises(ValueError, match="expected some of"):
        Config(ops=("poool",))


def test_the_program(tmp_path):
    root = Path(__file__).resolve().parents[2]
    command = [
        sys.executable,
        "-m",
        "experiments.bench_kernels",
        "--profile=tiny",
        "--ops=indexer_topk,alignment",
        "--config.seconds=0.002",
        f"--workdir={tmp_path}",
    ]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}

    def run() -> str:
        done = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "top_k of entries × dim" in run()
    keys = json.loads((tmp_path / "summary.json").read_text())
    for key in (
        "indexer_topk.256k_4x32.same_layout_ratio",
        "indexer_topk.peak_memory_ratio",
        "alignment.gain",
        "alignment.padding_bytes",
        "ceilings.copy_gb_per_s",
    ):
        assert keys[f"bench.{key}"] > 0
    text = (tmp_path / "report.md").read_text()
    assert "What each side reads" in text and "Alignment of packed records" in text
    assert "NOT MET" not in text
    assert (tmp_path / "figures" / "bench_kernels.png").stat().st_size > 5_000
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {"stage", "step", "xla.us"} <= set(json.loads(lines[0]))
    assert "done before" in run()
    assert json.loads((tmp_path / "summary.json").read_text()).keys() == keys.keys()
