"""tests/README.md names tests and invariants that exist."""

import re
from pathlib import Path

from hybrid_attn.testing import INVARIANTS

TESTS = Path(__file__).parent
TEXT = (TESTS / "README.md").read_text(encoding="utf-8")


def test_named_tests_exist():
    table = TEXT.split("## Public faults")[1]
    names = re.findall(r"`([\w/]+(?:\.py)?/?(?:::\w+)?)`", table)
    invariants = {invariant.__name__ for invariant in INVARIANTS}
    files = [name for name in names if "/" in name or ".py" in name]
    assert len(files) > 40
    for name in files:
        path, _, function = name.partition("::")
        assert (TESTS / path).exists(), name
        if function:
            assert f"def {function}(" in (TESTS / path).read_text(), name
    plain = set(names) - set(files)
    assert plain and plain <= invariants, plain - invariants


def test_every_row_has_a_test_or_a_reason():
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| report")]
    for row in rows:
        last = row.rstrip("| ").split("|")[-1]
        assert "`" in last or "not" in last or "no step" in last, row
