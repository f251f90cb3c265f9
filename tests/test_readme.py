"""The README shows only what runs: its Python blocks are executed as they stand."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_has_code():
    assert BLOCKS


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_block_runs(index):
    exec(compile(BLOCKS[index], f"README.md block {index}", "exec"), {})


def test_readme_names_existing_files_and_targets():
    root = Path(__file__).parent.parent
    targets = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:`|    )make ([a-z-]+)", README):
        assert target in targets, target
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (root / path).exists(), path
