"""`recover` end to end at tiny sizes: its keys, its report, resuming a lost stage."""

import dataclasses
import json

import pytest

from configs import faults
from configs import recover as measurements
from experiments.recover import __main__ as recover
from experiments.recover.config import (
    Config,
    Control,
    Crash,
    Flips,
    Graph,
    Resident,
    Storm,
    Throughput,
)
from experiments.recover.report import BARS, table_rows
from experiments.runner import Workdir, to_dataclass

TINY = Config(
    model="tiny",
    flips=Flips(count=36, piece=18, rows=6, blocks=2, index_share=0.2),
    control=Control(prompts=3),
    resident=Resident(flips=20, sample=3, steps=24, context=48),
    storm=Storm(
        rebuilds=6, storms=1, rows=2, context=40, slow_ms=1.0, per_second=99.0, room=24
    ),
    graph=Graph(events=60, piece=40),
    throughput=Throughput(tokens=64, repeats=1),
    crash=Crash(
        rows=2,
        context=20,
        tokens=24,
        kills=1,
        long=64,
        snapshot_tokens=8,
        catch_up=(16, 32),
        catch_up_step=4,
        log_context=32,
        intervals=(1, 4),
        overhead_steps=16,
    ),
)


def run(path) -> dict:
    workdir = Workdir(path, "recover", dataclasses.asdict(TINY))
    recover.main(TINY, workdir)
    workdir.close()
    return json.loads((path / "summary.json").read_text())


def test_program(tmp_path):
    keys = run(tmp_path)
    plan = json.loads((tmp_path / "env.json").read_text())["plan"]
    assert plan["slots"] >= 2 and plan["slot_bytes"] % plan["alignment"] == 0
    assert keys["flips_injected"] == keys["flips_detected"] == keys["rebuilt"] == 36
    places = ("header", "payload", "padding", "index", "seal", "marker", "usage")
    assert sum(keys.get(f"flips_in_{place}", 0) for place in places) == 36
    assert keys["wrong_logits"] == keys["ours_reuse_wrong"] == 0
    assert keys["rebuilt_from_copy"] > 0 and keys["rebuilt_by_recompute"] > 0
    assert keys["naive_reuse_wrong"] == 3
    assert keys["resident_flips_injected"] == keys["resident_flips_detected"] == 20
    assert keys["resident_false_findings"] == 0
    for suffix in ("", "_burst", "_threads"):
        assert keys[f"storm_rebuilt{suffix}"] == 6
        assert keys[f"storm_bad_reads{suffix}"] == 0
    assert keys["recomputed_without_copy"] == 1
    assert keys["graph_events"] == 60 and keys["graph_violations"] == 0
    assert keys["ttft_logits_equal"] is True
    assert keys["tokens_lost"] == keys["tokens_wrong"] == 0
    assert keys["tokens_compared"] == 48 and keys["recovery_logits_equal"] is True
    assert keys["tokens_at_risk_log_4"] == 4
    assert 0 < keys["incremental_bytes_ratio"]
    for key in (
        *("reader_stall_ms_max", "rebuild_stall_ratio", "rebuild_pipeline_gain"),
        *("scrub_overhead", "graph_us_per_event", "ttft_speedup_64"),
        *("mttr_seconds", "recovery_speedup", "recovery_seconds"),
        *("catchup_seconds_16", "catchup_seconds_32", "write_overhead_per_step"),
        *("ttft_cold_seconds", "ttft_restored_seconds", "total_seconds"),
    ):
        assert keys[key] > 0, key
    assert isinstance(keys["verify_overhead"], float)
    report = (tmp_path / "report.md").read_text()
    for row in table_rows(keys):
        assert row[0] in report
    assert str(tmp_path) not in report
    for name in ("flips.png", "storm.png"):
        assert (tmp_path / "figures" / name).stat().st_size > 1000
    assert not [p for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()]
    # What is done stays; what is lost is measured again, to the same counts.
    before = (tmp_path / "stages" / "storm.json").read_bytes()
    (tmp_path / "stages" / "flips.1.json").unlink()
    (tmp_path / "stages" / "graph.1.json").unlink()
    again = run(tmp_path)
    assert (tmp_path / "stages" / "storm.json").read_bytes() == before
    for key, value in keys.items():
        if key.startswith(("flips_", "graph_r", "graph_v", "wrong", "storm_")):
            assert again[key] == value, key


def test_a_missed_bar_is_shown():
    keys = {"wrong_logits": 1, "rebuild_stall_ratio": 1.1}
    verdicts = {row[0]: row[3] for row in table_rows(keys)}
    assert sorted(verdicts.values()) == ["NOT met", "met"]
    assert verdicts["rows with wrong logits after a flip"] == "NOT met"
    assert len({bar.key for bar in BARS}) == len(BARS)


def test_configs():
    assert to_dataclass(Config, faults.get_config()) == Config()
    tasks = to_dataclass(Config, measurements.get_config()).tasks
    assert "flips" not in tasks and "storm" in tasks


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Config(tasks=("none",)),
        lambda: Flips(count=-1),
        lambda: Resident(sample=0),
        lambda: Storm(slow_ms=-1.0),
    ],
)
def test_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        wrong()
