"""What is stored is checked against what is asked, by name."""

import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import hybrid_attn as ha
from hybrid_attn import checkpoint
from hybrid_attn.checkpoint import description
from hybrid_attn.testing import small_config
from tests.checkpoint.samples import CONFIG, MODEL_ID, Session


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path, session = tmp_path_factory.mktemp("made"), Session()
    session.read(9, 9)
    session_caches = session.caches
    checkpoint.save(path, session_caches, session.tokens, model_id=MODEL_ID)
    return path, session


@pytest.mark.parametrize(
    ("pattern", "changes", "says"),
    [
        ("dense,swa,hca", {}, "config_name"),
        ("dense,swa,hca,csa", {"window": 4}, "config_identity"),
        ("dense,swa,hca,csa", {"head_dim": 16}, "config_identity"),
    ],
)
def test_another_config(made, pattern, changes, says):
    with pytest.raises(ValueError, match=rf"{says} is .* as stored, .* asked"):
        checkpoint.restore(made[0], small_config(pattern, **changes), model_id=MODEL_ID)


@pytest.mark.parametrize(
    ("batch", "capacity", "options", "says"),
    [
        (3, 96, {}, "batch is 2 as stored, 3 asked"),
        (2, 192, {}, "capacity is 96 as stored, 192 asked"),
        (2, 96, {"undo": 4}, "undo is 8 as stored, 4 asked"),
        (2, 96, {"dtypes": "bfloat16"}, "entries is 'float32' as stored, 'bfloat16'"),
    ],
)
def test_another_cache(made, batch, capacity, options, says):
    like = ha.init_cache(CONFIG, batch, capacity, **{"undo": 8, **options})
    with pytest.raises(ValueError, match=says):
        checkpoint.restore(made[0], model_id=MODEL_ID, like={"main": like})


def test_layers_states_and_arrays_are_compared(made):
    stored = description.describe(made[1].cache)
    for change, says in (
        (lambda d: d["layers"].pop(), "layers is 4 of them as stored, 3 of them"),
        (lambda d: d["layers"].append({}), "layers is 4 of them as stored, 5 of them"),
        (
            lambda d: d["layers"][1]["states"].update(window="Unheard"),
            "'SlidingWindow' as stored, 'Unheard' asked",
        ),
        (
            lambda d: d["arrays"].update({"layers/1/window/key": [[2, 3], "int8"]}),
            r"window/key\[0\]",
        ),
    ):
        import copy

        asked = copy.deepcopy(stored)
        change(asked)
        with pytest.raises(ValueError, match=says):
            description.check("main", stored, asked)


def test_an_unknown_state_kind(made):
    class Unheard:
        pass

    cache = made[1].cache
    layer = cache.layers[0]
    layer = type(layer)({**layer.states, "x": Unheard()}, layer.kind)  # type: ignore
    with pytest.raises(TypeError, match="unknown state kind Unheard"):
        description.describe(cache.replace(layers=(layer, *cache.layers[1:])))


def test_another_model_or_other_names(made):
    with pytest.raises(ValueError, match=r"asked is b{64}"):
        checkpoint.restore(made[0], CONFIG, model_id="b" * 64)
    with pytest.raises(ValueError, match=r"\['main'\], asked are \['draft'\]"):
        checkpoint.restore(made[0], {"draft": CONFIG}, model_id=MODEL_ID)
    with pytest.raises(ValueError, match="expected config or like"):
        checkpoint.restore(made[0], model_id=MODEL_ID)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every_tokens": 0}, "every_tokens=0"),
        ({"log_tokens": 0}, "log_tokens=0"),
        ({"keep": 1.5}, "keep=1.5"),
        ({"every_seconds": 0}, "every_seconds=0"),
    ],
)
def test_bad_options(tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        checkpoint.Checkpointer(tmp_path, model_id=MODEL_ID, **options)


def test_bad_observations(tmp_path, made):
    session = made[1]
    with session.checkpointer(tmp_path) as writer:
        for tokens, says in (
            ({"other": session.rows}, r"\['other'\]: the caches are \['main'\]"),
            ({"main": session.rows[:1]}, "have 1 rows, it has 2"),
            ({"main": np.zeros((2, 4), np.int32)}, r"tokens \[4\], it holds 9"),
        ):
            with pytest.raises(ValueError, match=says):
                writer.observe(session.caches, tokens)
        with pytest.raises(ValueError, match="JSON"):
            writer.observe(session.caches, session.tokens, float("nan"))
    assert checkpoint.latest(tmp_path) is None


PROGRAM = """
    import sys, jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import hybrid_attn as ha
    from hybrid_attn import checkpoint
    from tests.checkpoint.samples import CONFIG, MODEL_ID
    assert len(jax.devices()) == 4
    mesh = Mesh(np.array(jax.devices()[:2]), ("b",))
    restored = checkpoint.restore(
        sys.argv[1], CONFIG, model_id=MODEL_ID, sharding=NamedSharding(mesh, P("b")))
    cache = restored.caches["main"]
    assert all(len(x.sharding.device_set) == 2 for x in jax.tree.leaves(cache))
    one = checkpoint.restore(sys.argv[1], CONFIG, model_id=MODEL_ID).caches["main"]
    assert ha.diff(cache, one) is None
    with checkpoint.Checkpointer(sys.argv[1], model_id=MODEL_ID) as writer:
        writer.restore(CONFIG, sharding=NamedSharding(mesh, P("b")))
        writer.snapshot({"main": cache}, restored.tokens)
"""


def test_another_number_of_devices(made, tmp_path):
    """Four devices restore what one has written, and the other way round."""
    path, session = tmp_path / "c", made[1]
    checkpoint.save(path, session.caches, session.tokens, model_id=MODEL_ID)
    flags = os.environ.get("XLA_FLAGS", "")
    flags += " --xla_force_host_platform_device_count=4"
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(path)],
        check=True,
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
    )
    restored = checkpoint.restore(path, CONFIG, model_id=MODEL_ID)
    assert restored.report.sequence == 2
    assert ha.diff(restored.caches["main"], session.cache) is None
    assert len(jax.devices()) == 1
