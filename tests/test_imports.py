"""Who may import whom (design.md section 5), read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("hybrid_attn", "pallas_kernels", "experiments")

# A module under the key imports nothing under the values.
FORBIDDEN = {
    "pallas_kernels": ("hybrid_attn", "experiments"),
    "hybrid_attn": ("experiments", "tests"),
    "hybrid_attn.cache": (
        "hybrid_attn.mixers",
        "hybrid_attn.model",
        "hybrid_attn.step",
        "hybrid_attn.transforms",
        "hybrid_attn.store",
        "pallas_kernels",
    ),
    "hybrid_attn.codecs": ("hybrid_attn.mixers", "hybrid_attn.model"),
    "hybrid_attn.search": ("hybrid_attn.mixers", "hybrid_attn.model"),
    "hybrid_attn.layers": (
        "hybrid_attn.mixers",
        "hybrid_attn.cache",
        "hybrid_attn.model",
    ),
    "hybrid_attn.mixers": (
        "hybrid_attn.model",
        "hybrid_attn.step",
        "hybrid_attn.transforms",
        "hybrid_attn.training",
        "hybrid_attn.serving",
        "hybrid_attn.store",
    ),
    "hybrid_attn.transforms": (
        "hybrid_attn.mixers",
        "hybrid_attn.model",
        "hybrid_attn.step",
        "hybrid_attn.training",
    ),
    "hybrid_attn.store": ("hybrid_attn.mixers", "hybrid_attn.model"),
    "hybrid_attn.model": ("hybrid_attn.step", "hybrid_attn.training"),
    "hybrid_attn.config": ("hybrid_attn.mixers", "hybrid_attn.cache"),
    "hybrid_attn.step": ("hybrid_attn.training", "hybrid_attn.serving"),
}
# The suite itself may stand on everything, and nothing stands on the suite.
NOT_ON = {"hybrid_attn.testing": ("hybrid_attn", "pallas_kernels")}


def _modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join(parts)] = path
    return found


MODULES = _modules()


def _imports(name: str) -> set[str]:
    """Modules that importing ``name`` runs; those inside functions do not count."""
    found, todo = set(), list(ast.parse(MODULES[name].read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else str(node.module))
        else:
            todo += list(ast.iter_child_nodes(node))
    return {module for module in found if module.split(".")[0] in (*PACKAGES, "tests")}


GRAPH = {name: _imports(name) for name in MODULES}


def _under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_reads_the_source():
    assert "hybrid_attn.mixers.base" in GRAPH["hybrid_attn.mixers.sliding"]
    assert len(MODULES) > 40


@pytest.mark.parametrize("package", FORBIDDEN)
def test_direction(package):
    wrong = [
        f"{name} imports {target}"
        for name, targets in GRAPH.items()
        if _under(name, package)
        for target in targets
        if any(_under(target, banned) for banned in FORBIDDEN[package])
    ]
    assert not wrong


@pytest.mark.parametrize("package", NOT_ON)
def test_nothing_stands_on(package):
    wrong = [
        f"{name} imports {target}"
        for name, targets in GRAPH.items()
        if not _under(name, package)
        and any(_under(name, above) for above in NOT_ON[package])
        for target in targets
        if _under(target, package)
    ]
    assert not wrong


def test_no_circles():
    """No module stands on itself, by whatever way."""
    state: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, " -> ".join((*path, name))
        state[name] = 1
        for target in sorted(GRAPH.get(name, ())):
            if target != name and target in GRAPH:
                visit(target, (*path, name))
        state[name] = 2

    for name in sorted(GRAPH):
        visit(name, ())


def test_files_are_short():
    long = {
        name: n
        for name, path in MODULES.items()
        if (n := len(path.read_text().splitlines())) > 400
    }
    assert not long
