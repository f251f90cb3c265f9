"""Test-wide settings; they must be made before JAX starts."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of the suite's time, and unoptimised code compiles 2-3 times
# faster. Set XLA_FLAGS to test what the library runs as.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest
from flax import nnx

if directory := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

if hasattr(nnx, "set_graph_mode"):
    nnx.set_graph_mode(False)


# Each compiled function holds memory mappings. Linux gives a process 65,530, and a
# compiler that gets no more of them dies, so what was compiled is dropped in time.
_MAPPINGS, _MAPS, _TESTS_BETWEEN = 30_000, Path("/proc/self/maps"), 16
_finished = 0


def pytest_runtest_logfinish():
    global _finished
    _finished += 1
    if _finished % _TESTS_BETWEEN == 0 and _MAPS.exists():
        if len(_MAPS.read_bytes().splitlines()) > _MAPPINGS:
            jax.clear_caches()


def pytest_collection_modifyitems(config, items):
    """Runs the cases of one group in one worker: they share compiled functions."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadGroupScheduling

    return LoadGroupScheduling(config, log)
