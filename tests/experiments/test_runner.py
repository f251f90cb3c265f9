"""Configs are strict, a directory belongs to one run, and a killed run resumes."""

import dataclasses
import io
import json
import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal

import ml_collections
import numpy as np
import pytest
from rich.console import Console

from experiments.progress import Progress, print_table
from experiments.runner import ConfigError, to_dataclass
from experiments.workdir import Workdir, WorkdirError, environment, first_difference

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Train:
    steps: int
    rate: float = 1e-3
    kind: Literal["adamw", "sgd"] = "adamw"

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


@dataclasses.dataclass(frozen=True)
class Config:
    train: Train
    variants: tuple[str, ...] = ("dense",)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    path: str | None = None
    stages: tuple[Train, ...] = ()
    verbose: bool = False
    mixed: int | float = 1


def test_config_becomes_the_dataclass():
    given = ml_collections.ConfigDict(
        {
            "train": {"steps": 3, "rate": 1, "kind": "sgd"},
            "variants": ("swa", "csa"),
            "sizes": {"a": 1},
            "path": None,
            "stages": [{"steps": 1}, {"steps": 2}],
            "verbose": True,
            "mixed": 0.5,
        }
    )
    config = to_dataclass(Config, given.lock())
    assert config == Config(
        Train(3, 1.0, "sgd"),
        ("swa", "csa"),
        {"a": 1},
        None,
        (Train(1), Train(2)),
        True,
        0.5,
    )
    assert type(config.train.rate) is float
    assert to_dataclass(Config, {"train": {"steps": 2}}) == Config(Train(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trian": {}}, r"unknown key config\.trian; did you mean config\.train\?"),
        ({"train": {"step": 1}}, r"unknown key config\.train\.step; .*train\.steps\?"),
        ({"zzz": 1}, r"unknown key config\.zzz; it has mixed, path, sizes"),
        ({"train": {"rate": 1.0}}, r"config\.train\.steps is missing"),
        ({"train": {"steps": "3"}}, r"train\.steps: expected int, got str '3'"),
        ({"train": {"steps": 3.0}}, r"train\.steps: expected int, got float 3\.0"),
        ({"train": {"steps": True}}, r"train\.steps: expected int, got bool True"),
        ({"train": {"steps": 1, "kind": "x"}}, r"one of 'adamw', 'sgd', got str 'x'"),
        ({"train": {"steps": 0}}, r"config\.train: steps must be at least 1, got 0"),
        ({"train": 3}, r"config\.train: expected the keys of Train, got int 3"),
        ({"variants": "swa"}, r"config\.variants: expected tuple\[str, \.\.\.\]"),
        ({"variants": ["swa", 1]}, r"config\.variants\[1\]: expected str, got int 1"),
        ({"stages": [{"stesp": 1}]}, r"config\.stages\[0\]\.stesp; .*\.steps\?"),
        ({"sizes": {"a": "b"}}, r"config\.sizes\.a: expected int, got str 'b'"),
        ({"path": 3}, r"config\.path: expected str, got int 3"),
        ({"verbose": 1}, r"config\.verbose: expected bool, got int 1"),
        ({"mixed": "1"}, r"config\.mixed: expected int \| float, got str '1'"),
    ],
)
def test_config_that_does_not_fit_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        to_dataclass(Config, {"train": {"steps": 1}} | change)


def files(path):
    return {p.relative_to(path): p.stat().st_mtime_ns for p in path.rglob("*")}


def test_new_directory_says_what_was_run(tmp_path):
    config = {"train": {"steps": 3}, "variants": ("a", "b")}
    workdir = Workdir(tmp_path / "runs" / "x", "ablate", config)
    assert not workdir.resumed
    assert json.loads(workdir.file("config.json").read_text()) == {
        "program": "ablate",
        "config": {"train": {"steps": 3}, "variants": ["a", "b"]},
    }
    written = workdir.file("env.json").read_text()
    assert json.loads(written)["python"] == platform.python_version()
    assert json.loads(written)["device_platform"]
    for private in (platform.node(), str(Path.home()), str(ROOT), str(tmp_path)):
        assert len(private) < 4 or private not in written


def test_same_config_resumes_and_another_is_refused_untouched(tmp_path):
    Workdir(tmp_path, "ablate", {"a": {"b": 1, "c": 2}}).mark_done("one", {"x": 1.5})
    again = Workdir(tmp_path, "ablate", {"a": {"b": 1, "c": 2}})
    assert again.resumed and again.is_done("one") and not again.is_done("two")
    assert again.result("one") == {"x": 1.5}
    before = files(tmp_path)
    with pytest.raises(WorkdirError, match=r"config\.a\.c is 2 there and 3 now; give"):
        Workdir(tmp_path, "ablate", {"a": {"b": 1, "c": 3}})
    with pytest.raises(WorkdirError, match=r"program is 'ablate' there and 'train'"):
        Workdir(tmp_path, "train", {"a": {"b": 1, "c": 2}})
    assert files(tmp_path) == before


def test_overwrite_replaces_the_run_and_nothing_else(tmp_path):
    first = Workdir(tmp_path, "ablate", {"a": 1})
    first.mark_done("one")
    first.metrics("one", 0, loss=1.0)
    first.close()
    (tmp_path / "notes.txt").write_text("mine")
    second = Workdir(tmp_path, "ablate", {"a": 2}, overwrite=True)
    assert not second.resumed and not second.is_done("one")
    assert second.read_metrics() == [] and not (tmp_path / "tb").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    third = Workdir(tmp_path, "ablate", {"a": 2}, overwrite=True)
    assert not third.resumed


def test_directory_that_is_no_runs_is_refused(tmp_path):
    (tmp_path / "report.md").write_text("somebody's")
    with pytest.raises(WorkdirError, match=r"has report\.md but no config\.json"):
        Workdir(tmp_path, "ablate", {}, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["report.md"]
    with pytest.raises(WorkdirError, match="is a file"):
        Workdir(tmp_path / "report.md", "ablate", {})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text('{"torn')
    with pytest.raises(WorkdirError, match=r"config\.json is not JSON"):
        Workdir(tmp_path / "b", "ablate", {})


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": 1}, {"a": 1.0}, ("a", 1, 1.0)),
        ({"a": {"b": [1]}}, {"a": {"b": [2]}}, ("a.b", [1], [2])),
        ({"a": 1}, {"a": 1, "b": None}, ("b", "(absent)", None)),
        ({"a": 1, "b": 2}, {"a": 1}, ("b", 2, "(absent)")),
        ({"a": {"c": 1}}, {"a": 3}, ("a", {"c": 1}, 3)),
    ],
)
def test_first_difference(old, new, found):
    assert first_difference(old, new) == found


def test_metrics_survive_a_torn_line_and_a_rewind(tmp_path):
    workdir = Workdir(tmp_path, "train", {})
    for step in range(3):
        workdir.metrics("dense", step, loss=np.float32(step / 2), note="x")
    workdir.metrics("swa", 2, loss=float("nan"))
    workdir.close()
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"stage": "swa", "st')
    again = Workdir(tmp_path, "train", {})
    lines = again.read_metrics()
    assert lines[1] == {"stage": "dense", "step": 1, "loss": 0.5, "note": "x"}
    assert lines[3] == {"stage": "swa", "step": 2, "loss": None} and len(lines) == 4
    again.rewind_metrics("dense", 1)
    again.metrics("dense", 1, loss=7.0)
    again.close()
    steps = [(x["stage"], x["step"]) for x in again.read_metrics()]
    assert steps == [("dense", 0), ("swa", 2), ("dense", 1)]
    assert list((tmp_path / "tb").iterdir())


def test_only_whole_results_are_written(tmp_path):
    workdir = Workdir(tmp_path, "train", {})
    before = files(tmp_path)
    with pytest.raises(ValueError):
        workdir.mark_done("one", {"x": float("inf")})
    with pytest.raises(ValueError, match="'x' is nan"):
        workdir.write_summary({"x": float("nan")})
    with pytest.raises(ValueError, match="'x' holds dict"):
        workdir.write_summary({"x": {"y": 1}})
    with pytest.raises(ValueError, match="a stage is named by"):
        workdir.mark_done("../escape")
    with pytest.raises(WorkdirError, match="stage 'one' is not done"):
        workdir.result("one")
    assert files(tmp_path) == before
    workdir.write_summary({"a": 1, "b": [0.5, None], "c": "x"})
    assert json.loads((tmp_path / "summary.json").read_text())["b"] == [0.5, None]
    assert not [p for p in tmp_path.rglob(".*")]


def test_kill_between_write_and_rename_leaves_the_old_file(tmp_path, monkeypatch):
    workdir = Workdir(tmp_path, "train", {})
    workdir.mark_done("one", {"x": 1})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        workdir.mark_done("one", {"x": 2})
    assert workdir.result("one") == {"x": 1}


def test_environment_that_changed_is_added(tmp_path, monkeypatch):
    Workdir(tmp_path, "train", {})
    same = (tmp_path / "env.json").read_text()
    Workdir(tmp_path, "train", {})
    assert (tmp_path / "env.json").read_text() == same
    other = environment() | {"device_kind": "abacus"}
    monkeypatch.setattr("experiments.workdir.environment", lambda: other)
    for _ in range(2):
        Workdir(tmp_path, "train", {})
    record = json.loads((tmp_path / "env.json").read_text())
    assert [e["device_kind"] for e in record["resumed"]] == ["abacus"]
    assert record["device_kind"] != "abacus"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_progress_without_a_terminal_prints_a_line_now_and_then():
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, width=100)
    stages = {"a": 100.0, "b": 100.0, "c": 200.0}
    with Progress(stages, console=console, clock=clock) as progress:
        progress.skip("a")
        assert progress.done == 0.25
        progress.start("b")
        for second in range(0, 201):  # twice as slow as planned
            clock.now = float(second)
            progress.update(second / 200, f"step {second}")
        assert progress.done == 0.5
        # 200 s of the plan are left; at half the planned pace that is almost 400 s.
        assert 350 < progress.seconds_left < 400
        progress.finish()
        progress.start("c")
        with pytest.raises(ValueError, match="'c' is not finished"):
            progress.start("c")
        progress.finish()
        assert progress.done == 1 and progress.seconds_left == 0
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 + 200 // 15
    assert lines[0].split() == ["25%", "5:00", "left", "a", "done", "before"]
    assert "step 15" in lines[1] and lines[-1].startswith("100%  0:00 left  c")
    with pytest.raises(ValueError, match="is not among"):
        progress.start("d")


def test_progress_in_a_terminal_draws_one_bar():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with Progress({"a": 1.0}, console=console) as progress:
        progress.start("a")
        progress.update(0.5, "half")
        progress.say("a line")
        progress.finish()
    assert "100%" in out.getvalue() and "a line" in out.getvalue()


def test_table():
    out = io.StringIO()
    print_table(
        "title", ["name", "n"], [["swa", "1.5"]], console=Console(file=out, width=60)
    )
    assert "swa" in out.getvalue() and "1.5" in out.getvalue()
    with pytest.raises(ValueError, match="does not fit the columns"):
        print_table("title", ["name"], [["a", "b"]])


PROGRAM = """
    import dataclasses
    from experiments import runner

    @dataclasses.dataclass(frozen=True)
    class Train:
        steps: int = 1

    @dataclasses.dataclass(frozen=True)
    class Config:
        train: Train
        path: str | None = None

    runner.define_flags()

    def main(config, workdir):
        print("steps", config.train.steps, "resumed", workdir.resumed)

    if __name__ == "__main__":
        runner.run("toy", Config, main)
"""
CONFIG = """
    import ml_collections

    def get_config():
        return ml_collections.ConfigDict(
            {"train": {"steps": 3}, "path": ml_collections.config_dict.placeholder(str)}
        )
"""


def test_unknown_key_of_a_default_config(tmp_path):
    program = textwrap.dedent(PROGRAM).replace("flags()", 'flags("cfg.py")')
    (tmp_path / "toy.py").write_text(program)
    (tmp_path / "cfg.py").write_text(textwrap.dedent(CONFIG))
    done = subprocess.run(
        [sys.executable, "toy.py", "--workdir=run", "--config.trian.steps=4"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    expected = "error: unknown key config.trian; did you mean config.train?\n"
    assert done.stderr == expected


def test_program_from_the_command_line(tmp_path):
    (tmp_path / "toy.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "cfg.py").write_text(textwrap.dedent(CONFIG))
    run, base = tmp_path / "run", ["--config=cfg.py", "--workdir=run"]
    # (arguments, exit status, in the output), in this order.
    calls = [
        (["--config=cfg.py"], 2, "--workdir=DIR is missing"),
        (["--workdir=run"], 2, "--config=FILE.py is missing"),
        (["--workdir=run", "--config=no.py"], 2, "no.py"),
        ([*base, "--config.train.step=4"], 2, "did you mean config.train.steps?"),
        ([*base, "--config.trian.steps=4"], 2, "did you mean config.train?"),
        ([*base, "--config.train.steps.x=4"], 2, "config.train.steps is a int"),
        ([*base, "--config.train.steps=x"], 1, "'x'"),
        ([*base, "stray"], 2, "unexpected argument 'stray'"),
        ([*base, "--config.train.steps=4"], 0, "steps 4 resumed False"),
        ([*base, "--config.train.steps=4"], 0, "steps 4 resumed True"),
        (base, 2, "config.train.steps is 4 there and 3 now"),
        ([*base, "--overwrite"], 0, "steps 3 resumed False"),
    ]
    for index, (arguments, status, text) in enumerate(calls):
        done = subprocess.run(
            [sys.executable, "toy.py", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, text in done.stdout + done.stderr) == (status, True), (
            arguments,
            done.stderr,
        )
        if status == 2:
            assert len(done.stderr.splitlines()) == 1
            assert done.stderr.startswith("error: ")
        assert run.exists() == (index >= 8)
