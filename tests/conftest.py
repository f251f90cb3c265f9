"""Test-wide settings; they must be made before JAX starts."""

import os

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


def pytest_collection_modifyitems(config, items):
    """Runs the cases of one group in one worker: they share compiled functions."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadGroupScheduling

    return LoadGroupScheduling(config, log)
