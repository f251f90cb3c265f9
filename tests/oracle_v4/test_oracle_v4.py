"""The numbers of DeepSeek-V4 are the reference's, however the tokens are cut."""

import jax
import numpy as np
import pytest

import hybrid_attn as ha
from tests.oracle_v4.case import CASES, LOGITS, ODD, ROWS, chunks, load, ragged

slow = pytest.mark.slow
PLANS = {
    "whole": chunks(1 << 20),
    "129": chunks(129),
    "64": chunks(64),
    "7": chunks(7),
    "3": chunks(3),
    "1": chunks(1),
    "ragged": ragged(0, 50),
}
QUICK = {("flash_tiny", "64"), ("short_rates", "7"), ("pro_tiny", "ragged")}
QUICK |= {(name, "ragged") for name in ODD}


def cases():
    for name in (*CASES, *ODD):
        for plan in PLANS:
            quick = plan == "whole" or (name, plan) in QUICK
            marks = [pytest.mark.xdist_group(f"oracle {name}")]
            yield pytest.param(
                name,
                plan,
                id=f"{name}-{plan}",
                marks=marks if quick else [*marks, slow],
            )


@pytest.mark.parametrize(("name", "plan"), list(cases()))
def test_step(name, plan, record_property):
    case = load(name)
    for key, error in case.check(*case.replay(PLANS[plan])).items():
        record_property(key, error)


@pytest.mark.parametrize("name", CASES)
def test_forward(name):
    case = load(name)
    logits = jax.jit(ha.forward)(case.model, case.tokens)
    assert case.logits_error(np.asarray(logits)) <= LOGITS


@pytest.mark.parametrize(
    "name", ["short_rates", *(pytest.param(n, marks=slow) for n in CASES[:2])]
)
def test_decode(name):
    """Token by token through one compiled, donating step."""
    case = load(name)
    run = ha.compile_step(case.model)
    cache, steps = case.cache(), []
    for t in range(case.time):
        logits, cache = run(cache, case.tokens[:, t : t + 1])
        steps.append(np.asarray(logits))
    assert case.logits_error(np.concatenate(steps, axis=1)) <= LOGITS
    assert (np.asarray(cache.length) == case.time).all()
    assert cache.batch == ROWS


def test_last_and_prefill():
    case = load("short_rates")
    last, _ = ha.step(case.model, case.cache(), case.tokens, logits="last")
    assert np.max(np.abs(np.asarray(last) - case.logits[:, -1])) <= LOGITS
    logits, _ = ha.prefill(case.model, case.cache(), case.tokens)
    assert np.max(np.abs(np.asarray(logits) - case.logits)) <= LOGITS
