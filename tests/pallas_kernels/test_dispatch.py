"""Dispatch by name, capability and shape; what it says when it falls back."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.device import current_target, target_of
from pallas_kernels.dispatch import (
    PORTABLE,
    SM90,
    Dispatch,
    Implementation,
    Unsupported,
)
from pallas_kernels.lowering import DEVICES, abstract_mesh


def _dispatch() -> Dispatch:
    return Dispatch(
        "double",
        Implementation("wgmma", lambda x: ("wgmma", x), SM90),
        Implementation(
            "portable",
            lambda x: ("portable", x),
            PORTABLE,
            lambda target, x: None if x % 2 == 0 else "takes even numbers only",
        ),
        Implementation("xla", lambda x: ("xla", x)),
    )


def _on(device: str, call):
    with jax.sharding.use_abstract_mesh(abstract_mesh(device)):
        return call()


@pytest.mark.parametrize(
    ("device", "even", "odd"),
    [
        ("h100", "wgmma", "wgmma"),
        ("h200", "wgmma", "wgmma"),
        ("b200", "portable", "xla"),
        ("a100", "portable", "xla"),
    ],
)
@pytest.mark.filterwarnings("ignore:double")
def test_best_supported(device, even, odd):
    dispatch = _dispatch()
    assert _on(device, lambda: dispatch(2)) == (even, 2)
    assert _on(device, lambda: dispatch(3)) == (odd, 3)


@pytest.mark.parametrize("device", ["a100", "b200"])
def test_wgmma_is_refused_by_capability(device):
    """Under an abstract device too, for which lowering would take it."""
    with pytest.raises(Unsupported, match=r"wgmma needs compute capability 9\.0"):
        _on(device, lambda: _dispatch()(2, implementation="wgmma"))


def test_bare_abstract_device_is_known_by_kind():
    """An AbstractDevice made by others has no compute capability of its own."""
    a100 = AbstractDevice("NVIDIA A100-SXM4-40GB", 108, "gpu")
    mesh = AbstractMesh((), (), abstract_device=a100)
    with jax.sharding.use_abstract_mesh(mesh):
        assert current_target().capability == (8, 0)
        with pytest.raises(Unsupported):
            _dispatch()(2, implementation="wgmma")


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA H100 PCIe", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("Tesla T4", (7, 5)),
        ("NVIDIA L4", (8, 9)),
        ("NVIDIA L40S", None),
        ("NVIDIA Unheard-Of", None),
    ],
)
def test_capability_of_kind(kind, capability):
    assert target_of(AbstractDevice(kind, 1, "gpu")).capability == capability


def test_unknown_capability_ends_in_xla():
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("New", 1, "gpu"))
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.warns(RuntimeWarning, match="not New"),
    ):
        assert _dispatch()(2) == ("xla", 2)


def test_named_is_never_replaced():
    dispatch = _dispatch()
    with pytest.raises(Unsupported, match="portable takes even numbers only"):
        _on("h100", lambda: dispatch(3, implementation="portable"))
    with pytest.raises(Unsupported, match="'cuda': expected one of wgmma, portable"):
        dispatch(2, implementation="cuda")
    with pytest.raises(Unsupported, match="needs a CUDA device"):
        dispatch(2, implementation="portable")
    assert dispatch(3, implementation="xla") == ("xla", 3)


def test_one_warning_per_reason():
    dispatch = _dispatch()
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(3):
            _on("b200", lambda: dispatch(3))
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert "double: wgmma needs compute capability 9.0" in messages[0]
    assert "double: portable takes even numbers only" in messages[1]


def test_no_warning_off_the_gpu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _dispatch()(2) == ("xla", 2)


def test_must_end_in_xla():
    xla = Implementation("xla", lambda x: x)
    with pytest.raises(ValueError, match="xla once, last"):
        Dispatch("op", xla, Implementation("other", lambda x: x))
    with pytest.raises(ValueError, match="any device"):
        Dispatch("op", Implementation("xla", lambda x: x, SM90))


def test_choice_is_made_while_tracing():
    """One function lowered for two devices takes the kernel of each."""
    dispatch = Dispatch(
        "op",
        Implementation("wgmma", lambda x: x * 90, SM90),
        Implementation("xla", lambda x: x * 1),
    )

    def text(device):
        with (
            jax.sharding.use_abstract_mesh(abstract_mesh(device)),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            return str(jitted.trace(jnp.float32(1)).jaxpr)

    jitted = jax.jit(dispatch)
    assert "90.0" in text("h200")
    assert "90.0" not in text("a100")
    assert sorted(DEVICES) == ["a100", "b200", "h100", "h200"]
