"""Generation: stop ids, keys, what the cache holds, and the greedy loop by hand."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.testing import small_config
from hybrid_attn.testing.subject import randomise

pytestmark = pytest.mark.xdist_group("small hybrid")
CONFIG = small_config("hca,csa")
NEW = 6
PROMPT = np.random.default_rng(0).integers(0, 31, (3, 7)).astype(np.int32)
LENGTHS = np.array([7, 1, 4])


@functools.cache
def model() -> ha.Model:
    return randomise(ha.Model(CONFIG, rngs=nnx.Rngs(0)))


def empty(rows: int = 3) -> ha.Cache:
    return ha.init_cache(CONFIG, rows, 32, undo=4)


def by_hand(stop_ids=()):
    """Greedy, one `step` a token; (tokens a row, the cache's length a row)."""
    logits, cache = ha.step(model(), empty(), PROMPT, LENGTHS)
    token = np.asarray(logits)[np.arange(3), LENGTHS - 1].argmax(-1)
    rows = [[int(t)] for t in token]
    for _ in range(NEW - 1):
        live = np.array([row[-1] not in stop_ids for row in rows])
        tokens = np.array([[row[-1]] for row in rows])
        logits, cache = ha.step(model(), cache, tokens, live.astype(int))
        token = np.asarray(logits)[:, 0].argmax(-1)
        for i in np.flatnonzero(live):
            rows[i].append(int(token[i]))
    return rows, np.asarray(cache.length)


def test_equals_the_greedy_loop():
    rows, held = by_hand()
    tokens, lengths, cache = ha.generate(model(), empty(), PROMPT, NEW, lengths=LENGTHS)
    assert np.asarray(tokens).tolist() == rows
    assert np.asarray(lengths).tolist() == [NEW] * 3
    assert np.asarray(cache.length).tolist() == held.tolist()
    # Every token but the last sampled one.
    assert held.tolist() == (LENGTHS + NEW - 1).tolist()


def test_stop_ids():
    free, _ = by_hand()
    stops = (free[0][2], free[1][4])
    rows, held = by_hand(stops)
    tokens, lengths, cache = ha.generate(
        model(), empty(), PROMPT, NEW, lengths=LENGTHS, stop_ids=stops
    )
    assert np.asarray(lengths).tolist() == [len(row) for row in rows]
    assert len(rows[0]) <= 3
    for got, want in zip(np.asarray(tokens).tolist(), rows, strict=True):
        assert got == want + [0] * (NEW - len(want))
    assert np.asarray(cache.length).tolist() == held.tolist()
    assert held.tolist() == [
        n + len(row) - 1 for n, row in zip(LENGTHS, rows, strict=True)
    ]


def test_going_on_from_the_returned_cache():
    """The last sampled token opens the next turn; two turns equal one."""
    want, _, _ = ha.generate(model(), empty(), PROMPT, NEW, lengths=LENGTHS)
    first, _, cache = ha.generate(model(), empty(), PROMPT, 3, lengths=LENGTHS)
    second, _, _ = ha.generate(model(), cache, np.asarray(first)[:, -1:], NEW - 3)
    both = np.concatenate([first, second], axis=1)
    assert both.tolist() == np.asarray(want).tolist()


def test_samples_do_not_depend_on_the_batch():
    sampler, key = ha.samplers.temperature(1.5), jax.random.key(7)
    run = functools.partial(ha.generate, model(), sampler=sampler, key=key)
    together, _, _ = run(empty(), PROMPT, NEW, lengths=LENGTHS)
    again, _, _ = run(empty(), PROMPT, NEW, lengths=LENGTHS)
    assert np.asarray(together).tolist() == np.asarray(again).tolist()
    order = np.array([2, 0, 1])
    moved, _, _ = run(
        empty(), PROMPT[order], NEW, lengths=LENGTHS[order], row_ids=order
    )
    assert np.asarray(moved).tolist() == np.asarray(together)[order].tolist()
    alone, _, _ = run(
        empty(1), PROMPT[2:], NEW, lengths=LENGTHS[2:], row_ids=np.array([2])
    )
    assert np.asarray(alone).tolist() == np.asarray(together)[2:].tolist()
    other, _, _ = ha.generate(
        model(),
        empty(),
        PROMPT,
        NEW,
        lengths=LENGTHS,
        sampler=sampler,
        key=jax.random.key(8),
    )
    assert np.asarray(other).tolist() != np.asarray(together).tolist()


def test_equal_prompts_sample_apart():
    prompt = np.repeat(PROMPT[:1], 3, axis=0)
    sampler = ha.samplers.temperature(2.0)
    tokens, _, _ = ha.generate(model(), empty(), prompt, NEW, sampler=sampler)
    assert len({tuple(row) for row in np.asarray(tokens).tolist()}) == 3


def test_the_callers_cache_stays():
    cache = empty()
    _, cache = ha.step(model(), cache, PROMPT, LENGTHS)
    before = [np.array(x) for x in jax.tree.leaves(cache)]
    ha.generate(model(), cache, PROMPT, NEW)
    for leaf, old in zip(jax.tree.leaves(cache), before, strict=True):
        assert not leaf.is_deleted()
        np.testing.assert_array_equal(np.asarray(leaf), old)


def test_room_to_the_last_place():
    tokens, _, cache = ha.generate(model(), empty(), PROMPT, 26)
    assert tokens.shape == (3, 26)
    assert np.asarray(cache.length).tolist() == [32] * 3
    assert np.asarray(cache.faults).tolist() == [0] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number from 1"),
        ({"max_new_tokens": 27}, "row 0 would hold 33 tokens, .* capacity of 32"),
        ({"lengths": np.array([7, 0, 4])}, "at least one prompt token in every row"),
        ({"stop_ids": (31,)}, r"stop_ids \[31\]: outside the vocabulary of 31"),
        ({"tokens": PROMPT + 31}, "outside the vocabulary of 31"),
    ],
)
def test_refuses(changes, message):
    arguments = {"tokens": PROMPT, "max_new_tokens": NEW, **changes}
    with pytest.raises(ValueError, match=message):
        ha.generate(model(), empty(), **arguments)
