"""The memory plan of a run stands in its env.json."""

import dataclasses
import json

import pytest

from experiments.workdir import Workdir
from hybrid_attn.cache.adapters import NullAdapter
from hybrid_attn.cache.spec import make_spec
from hybrid_attn.testing import small_config


def read(workdir: Workdir) -> dict:
    return json.loads((workdir.path / "env.json").read_text())


def test_plan_is_kept_and_a_later_one_beside_it(tmp_path):
    workdir = Workdir(tmp_path, "recover", {})
    before = read(workdir)
    assert "plan" not in before
    found = NullAdapter().plan(make_spec(small_config("csa"), 64, 4, None), 10)
    plan = dataclasses.asdict(found)
    workdir.write_plan(plan)
    workdir.write_plan(plan)
    assert read(workdir) == {**before, "plan": plan}
    # A resumed run with the same plan changes nothing; with another, it adds one.
    resumed = Workdir(tmp_path, "recover", {})
    assert resumed.resumed
    resumed.write_plan(plan)
    assert read(workdir) == {**before, "plan": plan}
    for _ in range(2):
        Workdir(tmp_path, "recover", {}).write_plan({**plan, "slots": 3})
    record = read(workdir)
    assert record["plan"] == plan
    assert record["resumed"] == [{**before, "plan": {**plan, "slots": 3}}]
    with pytest.raises(ValueError, match="JSON cannot hold"):
        workdir.write_plan({"slots": object()})
    assert read(workdir) == record
