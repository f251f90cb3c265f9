"""Every mixer kind × every invariant, and a mixer of a user's own."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.cache.rings import ring_write, span_rows
from hybrid_attn.cache.states import State, UncompressedTail, register_state
from hybrid_attn.testing import (
    INVARIANTS,
    Checks,
    Subject,
    as_config,
    check_invariant,
    conformance,
    small_config,
    tolerance,
)


@register_state
class RunningMaximum(State):
    """The last rows of a projection: what `ShortConvolution` looks back on."""

    family = "recent"
    content: jax.Array


@ha.register_mixer("short_convolution")
class ShortConvolution(ha.Mixer):
    """A user's own mode: window attention plus a gated causal convolution of four."""

    kind = "short_convolution"
    taps = 4

    def __init__(self, config, layer, *, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs=rngs)
        self.filter = nnx.Param(
            nnx.initializers.normal(0.5)(
                rngs.params(), (self.taps, config.hidden_size), jnp.float32
            )
        )

    def own(self, rows, span, distance: int):
        """Rows from ``distance`` back, zero where that is another document's."""
        return jnp.where(span.reaches(distance)[..., None], rows, 0)

    @classmethod
    def init_states(cls, config, layer, spec, batch):
        states = super().init_states(config, layer, spec, batch)
        shape = (batch, cls.taps - 1 + spec.undo, config.hidden_size)
        states["taps"] = RunningMaximum(jnp.zeros(shape, spec.dtypes.frontier))
        return states

    def attend(self, inputs, states, span, *, dense):
        ring = None if states is None else states["taps"].content
        rows = inputs.x if ring is None else inputs.x.astype(ring.dtype)
        lead = self.taps - 1
        first = -lead if ring is None else span.start - lead
        seen = span_rows(ring, rows, span, first, lead + span.width)
        taps = jnp.stack(
            [
                self.own(seen[:, i : i + span.width], span, lead - i)
                for i in range(self.taps)
            ],
            axis=2,
        )
        mixed = jax.nn.silu(jnp.einsum("btsd,sd->btd", taps, self.filter[...]))
        inputs = inputs._replace(key_input=inputs.key_input + mixed)
        partial, new = self.window_partial(inputs, states, span)
        if states is not None:
            new["taps"] = states["taps"].replace(content=ring_write(ring, rows, span))
        return partial, new, {}


SUBJECTS = {
    "dense": "dense",
    "swa": "swa",
    "hca": "hca",
    "csa": "csa",
    "hybrid": "hca,swa,csa",
    "user": "short_convolution",
}


@functools.cache
def subject(name: str) -> Subject:
    return Subject(name, as_config(SUBJECTS[name]))


@pytest.mark.parametrize(
    ("name", "invariant"),
    [
        pytest.param(
            name,
            invariant,
            id=f"{name}-{invariant.__name__}",
            marks=pytest.mark.xdist_group(f"conformance {name}"),
        )
        for name in SUBJECTS
        for invariant in INVARIANTS
    ],
)
def test_invariant(name, invariant):
    result = check_invariant(invariant, subject(name))
    assert result.cases > 0
    assert result.error <= result.allowed


# -- the suite can fail ----------------------------------------------------------------


@ha.register_mixer("forgets_phase")
class ForgetsPhase(ShortConvolution):
    """A fault of the kind that engines had: the first rows of a step lack the past."""

    kind = "forgets_phase"

    def attend(self, inputs, states, span, *, dense):
        if states is not None:
            states = {**states, "taps": jax.tree.map(jnp.zeros_like, states["taps"])}
        return super().attend(inputs, states, span, dense=dense)


@ha.register_mixer("crosses_documents")
class CrossesDocuments(ShortConvolution):
    """A leak between packed documents: the convolution runs over their edges."""

    kind = "crosses_documents"

    def own(self, rows, span, distance):
        return rows


@ha.register_mixer("peeks")
class Peeks(ha.Mixer):
    """A leak: every query also reads the mean of the whole step."""

    kind = "peeks"

    def attend(self, inputs, states, span, *, dense):
        ahead = inputs.key_input + jnp.mean(inputs.x, axis=1, keepdims=True)
        partial, new = self.window_partial(
            inputs._replace(key_input=ahead), states, span
        )
        return partial, new, {}


@pytest.mark.parametrize(
    ("kind", "invariant"),
    [
        ("forgets_phase", "full_equals_stepwise"),
        ("forgets_phase", "full_equals_chunked"),
        ("peeks", "causality"),
        ("crosses_documents", "packed_equals_separate"),
    ],
)
@pytest.mark.xdist_group("conformance faulty")
def test_faulty_mixer_is_found(kind, invariant):
    chosen = next(i for i in INVARIANTS if i.__name__ == invariant)
    with pytest.raises(AssertionError, match=f"{kind}: {invariant}: "):
        check_invariant(chosen, faulty(kind))


@functools.cache
def faulty(kind: str) -> Subject:
    return Subject(kind, as_config(kind))


def test_conformance_of_unknown_kind():
    with pytest.raises(ValueError, match=r"unknown mixer kind 'csaa'.*'csa'"):
        conformance("csaa")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csa", "short_convolution"])
def test_conformance(kind):
    seen = []
    results = conformance(kind, progress=seen.append)
    assert [r.invariant for r in results] == [i.__name__ for i in INVARIANTS]
    assert seen == results


VARIANTS = {
    "heads": small_config("hca,csa", kv_heads=2, shared_kv=False),
    "ranks": small_config(
        "csa,swa", query_rank=16, output_groups=2, output_rank=8, tie_embeddings=True
    ),
    "plain": small_config(
        "hca,csa",
        query_norm=False,
        key_norm=False,
        sink=False,
        token_shift=False,
        decay="none",
        csa_overlap=False,
        hca_overlap=True,
    ),
    "yarn": small_config(
        "swa,csa:2,hca:4",
        decay="fixed",
        yarn_factor=4.0,
        yarn_original_positions=16,
        compressed_rope_theta=1e3,
    ),
    "ratio one": small_config("hca:1,csa:1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_config_variants(variant):
    conformance(VARIANTS[variant])


def test_checks_fail_on_what_they_are_for():
    check = Checks("an invariant", "a subject", tolerance())
    with pytest.raises(AssertionError, match="a subject: an invariant: all: checked"):
        check.result()
    zero = jnp.zeros((2, 3, 5))
    check.close("equal", zero, zero)
    for bad in (zero.at[1, 2, 0].set(1e-3), zero.at[1, 2, 0].set(jnp.nan)):
        with pytest.raises(AssertionError, match=r"case: differs by .* at \(1, 2\)"):
            check.close("case", bad, zero)
    check.close(
        "masked", zero.at[1].set(jnp.nan), zero, jnp.array([[1] * 3, [0] * 3]) > 0
    )
    with pytest.raises(AssertionError, match="compares nothing"):
        check.close("none", zero, zero, jnp.zeros((2, 3), bool))
    with pytest.raises(AssertionError, match="differs"):
        check.same("bits", {"a": zero}, {"a": -zero})
    with pytest.raises(AssertionError, match="not finite"):
        check.finite("nan", {"a": zero.at[0].set(jnp.inf)})
    with pytest.raises(AssertionError, match="raised nothing"):
        check.raises("silent", (), lambda: None)


def test_tolerance_table():
    assert tolerance("float32", "cpu").relative == 2e-5
    assert tolerance("bfloat16", "cpu").relative > tolerance().relative
    with pytest.raises(ValueError, match="no tolerance for"):
        tolerance("int4", "cpu")


def test_user_state_is_known():
    assert issubclass(RunningMaximum, State)
    assert not issubclass(RunningMaximum, UncompressedTail)
