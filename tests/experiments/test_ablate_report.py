"""The report says what the results say; all numbers here are made up."""

import dataclasses
import json
import re

import numpy as np
import pytest

from experiments.ablate_figures import _apart
from experiments.ablate_report import (
    TEXT_STAGE,
    DistanceBin,
    VariantResult,
    distance_bins,
    load_results,
    summary_keys,
    table_rows,
    write_report,
)
from experiments.workdir import Workdir

EDGES = [(1, 1), (2, 3), (4, 7), (8, 15), (16, 22), (23, 45), (46, 90), (91, 127)]
# name: (recall near, recall far, bits, cache bytes a token, ms at 64k, stack)
MADE_UP = {
    "dense": (0.98, 0.95, 2.60, 6144.0, 21.0, "dense*3"),
    "swa": (0.93, 0.08, 2.55, 90.0, 0.31, "swa*3"),
    "hca": (0.90, 0.60, 2.58, 480.0, 1.9, "hca*3"),
    "csa": (0.97, 0.91, 2.56, 2100.0, 2.4, "csa*3"),
    "hybrid": (0.96, 0.92, 2.57, 1020.0, 1.1, "hca,swa,csa"),
}


def made_up(name, seed):
    near, far, bits, cache, ms, stack = MADE_UP[name]
    wobble = (seed - 1) * 0.02

    def at(high):
        return max(0.0, (near if high < 8 else far + (high < 16) * 0.02) + wobble)

    recall = {"in_window": near, "beyond_window": far, "beyond_reach": far}
    lengths = [1024, 4096, 16384, 65536]
    return VariantResult(
        name=name,
        seed=seed,
        parameters=200_000,
        recall={
            "offset": {k: v + wobble for k, v in recall.items()},
            "aligned": dict.fromkeys(recall, 0.5),
        },
        recall_by_distance=tuple(DistanceBin(a, b, at(b), 500) for a, b in EDGES),
        bits_per_byte=bits + wobble,
        cache_bytes_per_token=cache,
        prefill_tokens_per_s={1024: 5e4, 8192: 4e4 / ms},
        decode_ms={n: 0.25 + ms * n / 65536 for n in lengths} if seed == 0 else {},
        window=8,
        reach=21,
        chance=1 / 8,
        stack=stack,
        seconds=100.0,
        curves={"loss": ((0, 4.0), (10, 1.5))},
    )


def fill(path, seeds, names=tuple(MADE_UP)):
    workdir = Workdir(path, "ablate", {"variants": list(MADE_UP), "seeds": len(seeds)})
    for name in names:
        for seed in seeds:
            result = made_up(name, seed)
            workdir.mark_done(f"{name}.{seed}", result.to_json())
    workdir.mark_done("compile", {"seconds": 3})
    return workdir


def test_result_survives_its_file(tmp_path):
    fill(tmp_path, [0, 1])
    loaded = load_results(tmp_path)
    assert loaded == [made_up(name, seed) for name in MADE_UP for seed in (0, 1)]


def test_result_without_a_bucket_is_refused():
    good = made_up("swa", 0)
    for recall in ({"offset": good.recall["offset"]}, {**good.recall, "aligned": {}}):
        with pytest.raises(ValueError, match="swa, seed 0: recall on the layout 'alig"):
            dataclasses.replace(good, recall=recall)


def test_summary_has_the_flat_keys(tmp_path):
    results = [made_up(name, seed) for name in MADE_UP for seed in (0, 1, 2)]
    keys = summary_keys(results)
    for name, (near, far, bits, cache, ms, _) in MADE_UP.items():
        expected = {
            "recall_in_window": near,
            "recall_beyond_reach": far,
            "aligned.recall_beyond_reach": 0.5,
            "bits_per_byte": bits,
            "cache_bytes_per_token": cache,
            "decode_ms_64k": 0.25 + ms,
            "prefill_tokens_per_s": 4e4 / ms,
            "prefill_length": 8192,
            "parameters": 200_000,
        }
        for key, value in expected.items():
            assert keys[f"{name}.{key}"] == pytest.approx(value), key
        assert keys[f"{name}.recall_beyond_reach_seeds"] == pytest.approx(
            [far - 0.02, far, far + 0.02]
        )
        assert keys[f"{name}.seeds"] == [0, 1, 2]
        ratio = keys[f"{name}.cache_bytes_per_token_to_dense"]
        assert ratio == pytest.approx(cache / 6144)
    Workdir(tmp_path, "ablate", {}).write_summary(keys)
    assert json.loads((tmp_path / "summary.json").read_text()) == keys


def test_summary_leaves_out_what_was_not_measured():
    results = [made_up("swa", 1)]
    keys = summary_keys(results)
    assert "swa.decode_ms_64k" not in keys
    assert not [key for key in keys if "to_dense" in key]
    other = dataclasses.replace(made_up("hca", 0), prefill_tokens_per_s={1024: 7.0})
    assert summary_keys([*results, other])["swa.prefill_length"] == 1024
    assert summary_keys([]) == {}


def cells(report, title):
    """Rows of the first table under a heading."""
    body = report.split(f"## {title}\n")[1]
    lines = re.search(r"(\|.*\|\n)+", body)
    assert lines
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[0].splitlines()
    ]


@pytest.mark.parametrize("seeds", [[0], [0, 1, 2]])
def test_report_is_made_from_the_files(tmp_path, seeds):
    workdir = fill(tmp_path, seeds)
    text = {"command": "make quickstart", "notes": ["Made-up numbers.", "Two."]}
    workdir.mark_done(TEXT_STAGE, text)
    report = write_report(tmp_path).read_text()
    assert "```\nmake quickstart\n```" in report
    assert "- Made-up numbers.\n- Two." in report
    assert str(tmp_path) not in report
    table = cells(report, "The result")
    assert [row[0] for row in table[2:]] == [
        f"{name} (`{stack}`)" for name, (*_, stack) in MADE_UP.items()
    ]
    assert len({len(row) for row in table}) == 1
    many = len(seeds) > 1
    assert table[3][4] == ("0.08±0.02" if many else "0.06")
    assert table[2][6:] == ["6,144.0", "21.2"]
    assert len(cells(report, "Every seed")) == 2 + 5 * len(seeds)
    assert "1.35 (0.06 ×)" in report  # hybrid's decode at 64k
    for name in re.findall(r"!\[.*\]\((.*)\)", report):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    assert report.count("![") == 3
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == [
        "decode_vs_context.png",
        "quality_vs_cache_bytes.png",
        "recall_by_distance.png",
    ]


def test_report_of_an_unfinished_run(tmp_path):
    fill(tmp_path, [1], names=["swa"])
    report = write_report(tmp_path).read_text()
    assert report.count("![") == 2 and "Ratios" not in report
    assert cells(report, "The result")[2][-1] == "–"


def test_nothing_finished_is_an_error(tmp_path):
    Workdir(tmp_path, "ablate", {})
    with pytest.raises(ValueError, match="no variant is finished"):
        write_report(tmp_path)


def test_distance_bins():
    distance = np.array([[0, 1, 2, 3], [0, 8, 9, 3]])
    correct = np.array([[1, 1, 0, 1], [0, 1, 0, 0]], bool)
    assert distance_bins(distance, correct) == (
        DistanceBin(1, 1, 1.0, 1),
        DistanceBin(2, 3, 1 / 3, 3),
        DistanceBin(8, 9, 0.5, 2),
    )
    assert distance_bins(distance, correct, [2, 9, 40]) == (
        DistanceBin(2, 8, 0.5, 4),
        DistanceBin(9, 39, 0.0, 1),
    )
    assert distance_bins(np.zeros(3, int), np.zeros(3, bool)) == ()


def test_rows_fit_the_columns():
    columns, rows = table_rows([made_up(name, 0) for name in MADE_UP])
    assert columns[-1] == "decode at 64k, ms"
    assert {len(row) for row in rows} == {len(columns)}


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([5.0, 100.0], [5.0, 100.0]),
        ([10.0, 10.0], [5.0, 15.0]),
        ([12.0, 10.0, 50.0], [16.0, 6.0, 50.0]),
        ([0.0, 8.0, 16.0], [-2.0, 8.0, 18.0]),
    ],
)
def test_labels_move_apart_and_keep_their_order(places, expected):
    assert _apart(places, 10.0) == expected
