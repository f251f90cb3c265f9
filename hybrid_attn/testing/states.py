"""Invariants of the cache: rewind, fork, unused capacity, sealed entries, growth."""

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_attn import transforms
from hybrid_attn.cache.states import Cache, LayerCache
from hybrid_attn.step import compile_step, prefill
from hybrid_attn.testing.report import Checks
from hybrid_attn.testing.subject import CHUNK, UNDO, Subject


def _host(tree):
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def map_states(cache: Cache, change) -> Cache:
    """``change(array, axis)`` of each array of each state; axis None: does not grow."""
    layers = []
    for layer in cache.layers:
        states = {
            name: state.replace(
                **{
                    field: change(value, state.growing.get(field))
                    for field, value in vars(state).items()
                    if value is not None
                }
            )
            for name, state in layer.states.items()
        }
        layers.append(LayerCache(states, layer.kind))
    return cache.replace(layers=tuple(layers))


def unused(cache: Cache, shape, axis: int | None) -> np.ndarray:
    """bool[b, places of the axis, ring slots for None]: what, by the counts, is empty.

    Entries from the closed count on; ring slots that no step from ``floor`` or later
    can ask for (a ring holds what one step reads, and ``undo`` more).
    """
    length, floor = (np.asarray(x)[:, None] for x in (cache.length, cache.floor))
    place = np.arange(shape[axis or 1])
    if axis:
        ratio = cache.spec.capacity // shape[axis]
        return place >= length // ratio
    position = length - 1 - (length - 1 - place) % shape[1]
    reach = shape[1] - cache.spec.undo
    return (position < 0) | (position < floor - reach)


def poison(cache: Cache, value: float = float("nan")) -> Cache:
    """The cache with ``value`` in every place that holds nothing."""

    def change(array, axis):
        mask = unused(cache, array.shape, axis)
        shape = [1] * array.ndim
        shape[0], shape[axis or 1] = mask.shape
        mask = mask.reshape(shape)
        return jnp.where(mask, jnp.asarray(value, array.dtype), array)

    def void(array):
        mask = np.asarray(cache.cut == 0).reshape(-1, *(1,) * (array.ndim - 1))
        return jnp.where(mask, jnp.asarray(value, array.dtype), array)

    cuts = jax.tree.map(void, cache.cuts)
    return map_states(cache, change).replace(cuts=cuts)


def unused_capacity(subject: Subject, check: Checks) -> None:
    """NaN in everything unused reaches no logit and no valid place."""
    phases = np.arange(subject.rows)
    rewound = transforms.rewind(subject.at(phases + UNDO), phases)
    for name, cache in (
        ("empty", subject.cache()),
        ("at phases", subject.at(phases)),
        ("rewound", rewound),
    ):
        start = poison(cache)
        holes = sum(np.isnan(x).sum() for x in jax.tree.leaves(_host(start.layers)))
        check.true(f"{name}: something is poisoned", holes > 0)
        for width, turns in ((1, 18), (CHUNK, 2)):
            cache = start
            for turn in range(turns):
                counts = np.full(subject.rows, width)
                counts = np.minimum(counts, subject.time - np.asarray(cache.length))
                (logits, want, where), cache = subject.advance(cache, counts, width)
                case = f"{name}, width {width}, turn {turn}"
                check.finite(case, logits)
                check.close(case, logits, want, where)
        begin = np.asarray(start.length)
        total = subject.time - begin
        tokens = subject.slice(begin, total, subject.time)
        logits, cache = prefill(subject.model, start, tokens, total)
        where = np.arange(subject.time) < total[:, None]
        column = np.minimum(begin[:, None] + np.arange(subject.time), subject.time - 1)
        want = np.take_along_axis(subject.full, column[..., None], axis=1)
        check.close(f"{name}, prefill", logits, want, where)
        # Whatever the counts call valid now must be free of poison.
        check.finite(f"{name}: valid places", poison(cache, 0.0).layers)
        check.finite(f"{name}: valid cuts", poison(cache, 0.0).cuts)


def rewinding(subject: Subject, check: Checks) -> None:
    """From every phase back by 0..undo wrong tokens, then on, as if never gone on."""
    phases = 8 + np.arange(subject.rows)
    base = subject.at(phases)
    vocab = subject.config.vocab_size
    for back in range(UNDO + 1):
        cache = base
        if back:
            wrong = (
                subject.slice(phases, np.full_like(phases, back), CHUNK) + 3
            ) % vocab
            _, cache = subject.step(cache, wrong, np.full_like(phases, back))
        cache = transforms.rewind(cache, phases)
        check.true(f"back {back}: length", np.asarray(cache.length) == phases)
        for turn in range(2):
            counts = np.minimum(CHUNK, subject.time - np.asarray(cache.length))
            (logits, want, where), cache = subject.advance(cache, counts, CHUNK)
            if where.any():
                check.close(f"back {back}, turn {turn}", logits, want, where)
    # Below the tokens that were true: from a long step back to the floor, by ones.
    cache = subject.at(phases + 8)
    check.true("floor", np.asarray(cache.floor) == np.asarray(cache.length) - UNDO)
    cache = transforms.rewind(cache, cache.floor)
    for turn in range(UNDO + 1):
        (logits, want, where), cache = subject.advance(cache, np.ones_like(phases), 1)
        check.close(f"from the floor, token {turn}", logits, want, where)
    _rewind_limits(subject, check)


def _rewind_limits(subject: Subject, check: Checks) -> None:
    cache = subject.at(20)
    low = int(cache.floor[0])
    check.raises(
        "below the floor",
        (str(low - 1), "20", str(20 - low)),
        lambda: transforms.rewind(cache, low - 1),
    )
    check.raises("above the length", ("21", "20"), lambda: transforms.rewind(cache, 21))
    # Going back does not lower the floor, and going on again raises it only when due.
    down = transforms.rewind(cache, low)
    check.true("floor stays", np.asarray(down.floor) == low)
    _, on = subject.advance(down, np.ones(subject.rows, int), 1)
    check.true("floor stays after a step", np.asarray(on.floor) == low)
    check.raises(
        "one below, gone on again",
        (str(low - 1),),
        lambda: transforms.rewind(on, low - 1),
    )
    # One row back, the others untouched.
    target = np.full(subject.rows, 20)
    target[3] = 15
    (logits, want, where), _ = subject.advance(
        transforms.rewind(cache, target), np.full(subject.rows, CHUNK), CHUNK
    )
    check.close("one row back", logits, want, where)


def forking(subject: Subject, check: Checks) -> None:
    """A fork shares no buffer: donating it leaves the donor's bytes as they were."""
    donor = subject.at(np.arange(subject.rows))
    before = _host(donor)
    copy = transforms.fork(donor)
    check.same("copy", copy, donor)
    run = compile_step(subject.model, donate=True)
    tokens = subject.slice(np.asarray(donor.length), np.ones(subject.rows), 1)
    _, copy = run(copy, tokens)
    _, copy = run(copy, tokens)
    alive = [not leaf.is_deleted() for leaf in jax.tree.leaves(donor)]
    check.true("donor's buffers live", alive, "a buffer was consumed")
    check.same("donor's bytes", donor, before)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(subject.cache())]
    check.true("no array twice", len(set(pointers)) == len(pointers))


def old_versions(subject: Subject, check: Checks) -> None:
    """`step` and `prefill` leave the cache they were given as it was."""
    cache = subject.at(7)
    before = _host(cache)
    subject.step(cache, subject.tokens[:, 7:12])
    prefill(subject.model, cache, subject.tokens[:, 7:32])
    alive = [not leaf.is_deleted() for leaf in jax.tree.leaves(cache)]
    check.true("buffers live", alive, "a buffer was consumed")
    check.same("bytes", cache, before)


def sealed_entries(subject: Subject, check: Checks) -> None:
    """A replay below ``sealed`` writes no entry there, and every entry from there."""
    mark, limit = 7.0, 16

    def marked(array, axis):
        return jnp.full_like(array, mark) if axis else array

    sealed = jnp.asarray(np.arange(subject.rows) % 2 * limit, jnp.int32)
    cache = map_states(subject.cache(), marked).replace(sealed=sealed)
    _, cache = subject.step(cache, subject.tokens[:, :9])
    _, cache = subject.step(cache, subject.tokens[:, 9:25])
    for layer in cache.layers:
        for state in layer.states.values():
            for field, axis in state.growing.items():
                array = getattr(state, field)
                if array is None:
                    continue
                array = np.moveaxis(np.asarray(array, np.float32), axis, 1)
                ratio = cache.spec.capacity // array.shape[1]
                untouched = (array == mark).reshape(*array.shape[:2], -1).all(-1)
                entry = np.arange(array.shape[1])
                want = (entry[None] * ratio < np.asarray(sealed)[:, None]) | (
                    entry >= 25 // ratio
                )
                check.true(f"{layer.kind} {field}", untouched == want)
    check.true("sealed stays", np.asarray(cache.sealed) == np.asarray(sealed))


def growing(subject: Subject, check: Checks) -> None:
    """`grow` keeps every valid bit, and goes on within tolerance."""
    lengths = np.arange(subject.rows)
    cache = subject.at(lengths)
    grown = transforms.grow(cache)
    check.true("capacity", grown.spec.capacity == 2 * cache.spec.capacity)
    small = poison(cache, 0.0)
    large = poison(grown, 0.0)

    def cut(array, axis):
        return jnp.split(array, 2, axis)[0] if axis else array

    check.same("valid bits", map_states(large, cut).layers, small.layers)
    for field in ("length", "floor", "sealed", "faults"):
        check.same(field, getattr(grown, field), getattr(cache, field))
    counts = np.full(subject.rows, CHUNK)
    (logits, want, where), _ = subject.advance(poison(grown), counts, CHUNK)
    check.close("going on", logits, want, where)
    check.raises("shrinking", ("capacity",), lambda: transforms.grow(cache, 1))


def selecting_rows(subject: Subject, check: Checks) -> None:
    """Rows reordered and repeated go on as themselves."""
    cache = subject.at(np.arange(subject.rows))
    order = (5 * np.arange(subject.rows) + 2) % (subject.rows - 3)
    picked = transforms.select_rows(cache, order)
    for leaf, old in zip(jax.tree.leaves(picked), jax.tree.leaves(cache), strict=True):
        check.same("bits", leaf, np.asarray(old)[order])
    tokens = subject.slice(np.arange(subject.rows), np.full(subject.rows, 9), 9)[order]
    logits, _ = subject.step(picked, tokens)
    column = order[:, None] + np.arange(CHUNK)
    check.close("going on", logits, subject.full[order[:, None], column])
    check.raises(
        "no such row",
        (str(subject.rows),),
        lambda: transforms.select_rows(cache, np.array([subject.rows])),
    )
