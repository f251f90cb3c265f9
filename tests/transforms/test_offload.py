"""Offload and restore: a hit has the bits of a cold run, damage only shortens it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn import transforms
from hybrid_attn.cache.layout import layout_of
from hybrid_attn.testing import small_config
from hybrid_attn.transforms.lookup import replay_span

LONGEST = 400
CONFIG = small_config("dense,swa,hca,csa")
BLOCK = 16
_NUMBER = itertools.count()
FULL_LOGITS = {"atol": 2e-5, "rtol": 2e-5}


@functools.cache
def model() -> ha.Model:
    return ha.Model(CONFIG, rngs=nnx.Rngs(3))


@functools.cache
def prompt() -> np.ndarray:
    generator = np.random.default_rng(5)
    return generator.integers(0, CONFIG.vocab_size, (1, LONGEST)).astype(np.int32)


def empty(**kwargs):
    return ha.init_cache(CONFIG, 1, LONGEST, **kwargs)


@functools.cache
def cold() -> tuple[np.ndarray, ha.Cache]:
    logits, cache = ha.prefill(model(), empty(), prompt())
    return np.asarray(logits), cache


def new_store(**kwargs):
    # Memory urls are shared in a process: each store has its own.
    url = f"memory://store{next(_NUMBER)}/"
    return ha.store.open(url, model_id=ha.model_id(model()), **kwargs)


def filled_store(recent: int):
    """A store that was offloaded to at every boundary of the prompt."""
    store, cache = new_store(), empty()
    for start in range(0, LONGEST, BLOCK):
        _, cache = ha.prefill(
            model(), cache, prompt()[:, start : start + BLOCK], logits="none"
        )
        transforms.offload(cache, store, prompt(), recent=recent)
    return store


def restored(store, tokens=None, **kwargs):
    tokens = prompt() if tokens is None else tokens
    return transforms.restore(store, CONFIG, tokens, capacity=LONGEST, **kwargs)


def going_on(cache, end: int) -> np.ndarray:
    """Logits of the last of ``end`` tokens, by the function that made `cold`."""
    begin = int(cache.length[0])
    logits, _ = ha.prefill(model(), cache, prompt()[:, begin:end])
    return np.asarray(logits)[:, -1]


@pytest.mark.parametrize("recent", [1, 3])
def test_every_length_has_the_bits_of_a_cold_run(recent):
    store = filled_store(recent)
    # Policies differ in what is kept; the deepest boundary at each offload always is.
    want, _ = cold()
    for end in range(1, LONGEST + 1):
        cache = restored(store, prompt()[:, :end])
        boundary = end // BLOCK * BLOCK
        assert int(cache.length[0]) == boundary == int(cache.floor[0])
        if end > boundary:
            np.testing.assert_array_equal(going_on(cache, end), want[:, end - 1])


def test_zero_replays_within_tolerance():
    store = filled_store(0)
    want, _ = cold()
    span = replay_span(empty())
    for end in range(1, LONGEST + 1):
        cache = restored(store, prompt()[:, :end])
        boundary = end // BLOCK * BLOCK
        assert int(cache.length[0]) == max(0, boundary - span)
        assert int(cache.sealed[0]) == (boundary if boundary > span else 0)
        got = going_on(cache, end)
        np.testing.assert_allclose(got, want[:, end - 1], **FULL_LOGITS)


def test_a_replay_writes_no_entry_below_the_boundary():
    cache = restored(filled_store(0))
    begin = int(cache.length[0])
    assert int(cache.floor[0]) == int(cache.sealed[0]) == LONGEST
    _, after = ha.prefill(model(), cache, prompt()[:, begin:], logits="none")
    want = cold()[1].replace(floor=after.floor, sealed=after.sealed)
    found = ha.diff(after, want, tolerance=2e-5)
    assert found is None, str(found)
    # Entries are the stored ones to the bit.
    for layer, same in zip(after.layers, want.layers, strict=True):
        if "entries" in layer.states:
            np.testing.assert_array_equal(layer["entries"].key, same["entries"].key)


def test_a_bounded_replay_is_lossy():
    """Fewer tokens than the states depend on give other numbers."""
    store = filled_store(0)
    want, _ = cold()
    end = LONGEST - 5
    few = going_on(restored(store, prompt()[:, :end], replay_tokens=2), end)
    error = np.abs(few - want[:, end - 1]).max()
    assert 1e-4 < error < 10


def test_one_offload_keeps_the_last_boundary():
    """After a whole prefill the rings are past the boundary; the cut is not."""
    for end in (37, 48, 63, 399):
        store = new_store()
        _, cache = ha.prefill(model(), empty(), prompt()[:, :end], logits="none")
        report = transforms.offload(cache, store, prompt())
        assert report.recent.tolist() == report.boundary.tolist() == [end // 16 * 16]
        back = restored(store, prompt()[:, :end])
        assert int(back.length[0]) == end // 16 * 16
        if end % 16:
            np.testing.assert_array_equal(going_on(back, end), cold()[0][:, end - 1])
        # A second time there is nothing to write.
        assert transforms.offload(cache, store, prompt()).blocks == 0


def test_restored_states_are_the_cold_ones():
    cache = restored(filled_store(1), prompt()[:, :80])
    _, want = ha.prefill(model(), empty(), prompt()[:, :80], logits="none")
    want = want.replace(floor=want.length)
    assert ha.diff(cache, want) is None
    assert np.asarray(cache.on_grid).tolist() == [80]


def test_prompts_share_the_blocks_before_they_diverge():
    """Inside one group: entries of the group, and all after it, are separate."""
    store = new_store()
    other = prompt().copy()
    other[0, 50] += 1  # in block 3, between two boundaries of its groups
    other %= CONFIG.vocab_size
    counts = []
    for tokens in (prompt(), other):
        _, cache = ha.prefill(model(), empty(), tokens[:, :96], logits="none")
        counts.append(transforms.offload(cache, store, tokens).blocks)
    layout = layout_of(empty())
    history, recents = len(layout.family("history")), len(layout.family("recent"))
    assert counts == [6 * history + recents, 3 * history + recents]
    back = restored(store, other[:, :96])
    logits, _ = ha.prefill(model(), empty(), other, logits="all")
    begin = int(back.length[0])
    assert begin == 96
    got, _ = ha.prefill(model(), back, other[:, begin:120])
    np.testing.assert_array_equal(np.asarray(got), np.asarray(logits)[:, 96:120])


def test_blocks_of_a_decode_say_so():
    store = new_store()
    _, cache = ha.prefill(model(), empty(), prompt()[:, :40], logits="none")
    run = ha.compile_step(model(), logits="none")
    cache = transforms.fork(cache)
    for at in range(40, 70):
        _, cache = run(cache, prompt()[:, at : at + 1])
    assert np.asarray(cache.on_grid).tolist() == [40]
    assert np.asarray(cache.cut).tolist() == [64]
    transforms.offload(cache, store, prompt())
    layout = layout_of(cache)
    chain = store.chain(layout.fingerprint, prompt()[0, :64], BLOCK)
    for group in layout.family("history"):
        origins = [
            store.fetch(group.name, group.fingerprint, digest).header.origin
            for digest in chain
        ]
        assert origins == ["prefill", "prefill", "decode", "decode"]
    back = restored(store, prompt()[:, :70])
    assert (int(back.length[0]), int(back.on_grid[0])) == (64, 32)
    np.testing.assert_allclose(going_on(back, 70), cold()[0][:, 69], **FULL_LOGITS)


def test_naive_reuse_is_wrong():
    """The control: entries alone, recent states not, give other logits."""
    cache = restored(filled_store(1), prompt()[:, :160])
    blank = cache.replace(
        layers=tuple(
            layer.__class__(
                {
                    name: state.replace(
                        **{
                            field: jnp.zeros_like(array)
                            for field, array in vars(state).items()
                            if array is not None and field not in state.growing
                        }
                    )
                    for name, state in layer.states.items()
                },
                layer.kind,
            )
            for layer in cache.layers
        )
    )
    wrong = np.abs(going_on(blank, 162) - cold()[0][:, 161]).max()
    assert wrong > 1e-3
    np.testing.assert_array_equal(going_on(cache, 162), cold()[0][:, 161])


def test_the_hit_is_the_meet_over_all_groups():
    """Each subset of lost blocks against all boundaries tried one by one."""
    tokens = prompt()[:, :48]
    layout = layout_of(empty())
    store, cache = new_store(), empty()
    for start in range(0, 48, BLOCK):
        piece = tokens[:, start : start + BLOCK]
        _, cache = ha.prefill(model(), cache, piece, logits="none")
        transforms.offload(cache, store, tokens)
    chain = store.chain(layout.fingerprint, tokens[0], BLOCK)
    kept = {
        (group.name, i): store.fetch(group.name, group.fingerprint, digest)
        for group in layout.groups
        for i, digest in enumerate(chain)
    }
    assert all(payload is not None for payload in kept.values())
    losses = [()] + [(key,) for key in kept]
    losses += list(itertools.combinations(kept, 2))[::9]
    for lost in losses:
        left = new_store()
        left.publish(
            [
                ha.store.Block(
                    group=group.name,
                    layout=group.fingerprint,
                    chain=chain[i],
                    index=i,
                    length=(i + 1) * BLOCK,
                    payload=kept[group.name, i].data,
                    origin="prefill",
                )
                for group in layout.groups
                for i in range(3)
                if (group.name, i) not in lost
            ]
        )
        want = 0
        for blocks in range(4):
            whole = all(
                (group.name, i) not in lost
                for group in layout.groups
                for i in range(blocks)
                if group.family == "history" or i == blocks - 1
            )
            want = blocks * BLOCK if whole else want
        got = restored(left, tokens, recent="stored")
        assert int(got.length[0]) == want, lost


def test_ragged_rows_and_stored_dtypes():
    rows = np.repeat(prompt(), 3, axis=0)
    rows[1] = (rows[1] + 1) % CONFIG.vocab_size
    lengths = np.array([70, 33, 5])
    dtypes = {"entries": "bfloat16", "window": "bfloat16"}
    start = ha.init_cache(CONFIG, 3, LONGEST, dtypes=dtypes)
    _, cache = ha.prefill(model(), start, rows[:, :80], lengths, logits="none")
    store = new_store()
    report = transforms.offload(cache, store, rows)
    assert report.boundary.tolist() == [64, 32, 0]
    back = transforms.restore(
        store, CONFIG, rows, lengths, capacity=LONGEST, dtypes=dtypes
    )
    assert np.asarray(back.length).tolist() == [64, 32, 0]
    rest = np.stack([np.roll(rows[i], -n) for i, n in enumerate([64, 32, 0])])
    got, after = ha.prefill(
        model(), back, rest[:, :6], lengths - [64, 32, 0], logits="last"
    )
    want, _ = ha.prefill(model(), start, rows[:, :80], lengths, logits="last")
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert np.asarray(after.length).tolist() == lengths.tolist()
    # Other dtypes are another layout: nothing fits, nothing is guessed.
    assert not np.asarray(restored(store, rows).length).any()


def test_other_identities_never_hit():
    store = filled_store(1)
    assert int(restored(store).length[0]) == LONGEST
    changed = (prompt() + 1) % CONFIG.vocab_size
    assert int(restored(store, changed).length[0]) == 0
    other = CONFIG.replace(rope_theta=5e5)
    missed = transforms.restore(store, other, prompt(), capacity=LONGEST)
    assert int(missed.length[0]) == 0
    # Another geometry of rings, the same blocks: undo is no part of the identity. It
    # is one of the compiled shape, so that low bits may differ.
    more = restored(store, prompt()[:, :77], undo=5)
    assert int(more.length[0]) == 64
    np.testing.assert_allclose(going_on(more, 77), cold()[0][:, 76], **FULL_LOGITS)


def test_a_small_capacity_takes_what_fits():
    cache = transforms.restore(filled_store(1), CONFIG, prompt(), capacity=100)
    assert (cache.spec.capacity, int(cache.length[0])) == (112, 112)


def test_prefetch():
    store = filled_store(1)
    ahead = transforms.prefetch(store, CONFIG, prompt())
    cache = restored(store, prefetched=ahead)
    assert ha.diff(cache, restored(store)) is None
    # Given up or used up, it costs threads and no result.
    ahead.cancel()
    assert ha.diff(restored(store, prefetched=ahead), cache) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros((2, 400), int)}, "2 rows, the cache has 1"),
        ({"tokens": np.zeros((1, 4), int)}, "holds 400 tokens"),
        ({"tokens": np.zeros((1, 400))}, "expected integers"),
        ({"recent": -1}, "recent=-1: expected a whole number"),
    ],
)
def test_offload_refuses(change, message):
    arguments = {"tokens": prompt(), **change}
    with pytest.raises(ValueError, match=message):
        transforms.offload(cold()[1], new_store(), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recent": "some"}, "expected one of"),
        ({"replay_tokens": -1}, "replay_tokens=-1"),
        ({"lengths": [401]}, "lengths"),
        ({"capacity": 0}, "capacity=0"),
    ],
)
def test_restore_refuses(change, message):
    arguments = {"tokens": prompt(), "capacity": 16, **change}
    with pytest.raises(ValueError, match=message):
        transforms.restore(new_store(), CONFIG, **arguments)


def test_layouts_do_not_depend_on_capacity_batch_or_undo():
    one, two = (
        jax.eval_shape(functools.partial(ha.init_cache, CONFIG, b, c, undo=u))
        for b, c, u in ((1, 16, 16), (3, 4096, 5))
    )
    assert layout_of(one).fingerprint == layout_of(two).fingerprint
    names = [group.name.rsplit(".", 1)[0] for group in layout_of(one).groups]
    assert sorted(names) == names and len(set(layout_of(one).groups)) == len(names)
