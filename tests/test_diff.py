"""`ha.diff` names the first valid place that differs, and no other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hybrid_attn as ha
from hybrid_attn.cache.states import Cache, LayerCache
from hybrid_attn.testing import small_config
from hybrid_attn.testing.states import poison

UNDO = 5
LENGTHS = (21, 9, 0)


@pytest.fixture(scope="module")
def cache() -> Cache:
    """Random bits everywhere; the counts alone say what is valid."""
    config = small_config("dense,swa,hca,csa")
    empty = ha.init_cache(config, batch=3, capacity=32, undo=UNDO)
    keys = iter(jax.random.split(jax.random.key(0), 64))
    layers = jax.tree.map(
        lambda x: jax.random.normal(next(keys), x.shape, x.dtype), empty.layers
    )
    length = jnp.asarray(LENGTHS, jnp.int32)
    return empty.replace(
        layers=layers, length=length, floor=jnp.maximum(length - UNDO, 0)
    )


def change(cache: Cache, layer: int, name: str, field: str, where, value) -> Cache:
    states = dict(cache.layers[layer].states)
    array = getattr(states[name], field)
    states[name] = states[name].replace(**{field: array.at[where].set(value)})
    layers = list(cache.layers)
    layers[layer] = LayerCache(states, cache.layers[layer].kind)
    return cache.replace(layers=tuple(layers))


def test_equal(cache):
    assert ha.diff(cache, cache) is None
    assert ha.diff(cache, ha.transforms.fork(cache)) is None


def test_invalid_places_do_not_count(cache):
    assert any(np.isnan(x).any() for x in jax.tree.leaves(poison(cache).layers))
    assert ha.diff(cache, poison(cache)) is None
    assert ha.diff(cache, poison(cache, 0.0), tolerance=0.1) is None


@pytest.mark.parametrize(
    ("layer", "name", "field", "where", "position", "index"),
    [
        (0, "entries", "key", (0, 20, 1, 3), 20, (1, 3)),
        (1, "window", "key", (0, 20 % 12, 0, 2), 20, (0, 2)),
        (2, "entries", "key", (1, 0, 0, 7), 0, (0, 7)),
        (3, "entries", "key", (0, 4, 0, 0), 16, (0, 0)),
        (3, "index", "key", (0, 5, 4), 16, (5,)),
        (3, "index", "content", (1, 8, 2), 8, (2,)),
    ],
)
def test_names_the_place(cache, layer, name, field, where, position, index):
    other = change(cache, layer, name, field, where, 77.0)
    found = ha.diff(cache, other)
    assert found is not None
    assert (found.state, found.layer) == (f"{name}.{field}", layer)
    assert found.kind == cache.layers[layer].kind
    assert (found.row, found.position, found.index) == (where[0], position, index)
    assert found.b == 77.0 and found.a != 77.0
    assert f"layer {layer} ({found.kind}), row {where[0]}, position" in str(found)


def test_every_valid_place_and_no_other_is_seen(cache):
    """One place at a time, against where `poison` writes."""
    for layer, name, field in [(2, "entries", "key"), (3, "window", "key")]:
        array = getattr(cache.layers[layer][name], field)
        holes = np.isnan(getattr(poison(cache).layers[layer][name], field))
        for row in range(3):
            for place in range(array.shape[1]):
                other = change(cache, layer, name, field, (row, place, 0, 0), 5.0)
                seen = ha.diff(cache, other) is not None
                assert seen != holes[row, place, 0, 0], (name, row, place)


def test_first_by_row_and_position_in_a_ring(cache):
    other = cache
    for position in (20, 13, 17):  # slots 8, 1, 5 of 12
        where = (0, position % 12, 0, 0)
        other = change(other, 1, "window", "key", where, 9.0)
    found = ha.diff(cache, other)
    assert found is not None and found.position == 13


def test_sealed_entries_are_held(cache):
    """A replay below `sealed` reads entries that lie above `length`."""
    other = change(cache, 3, "entries", "key", (1, 3, 0, 0), 9.0)
    assert ha.diff(cache, other) is None
    sealed = jnp.asarray([0, 16, 0], jnp.int32)
    found = ha.diff(cache.replace(sealed=sealed), other.replace(sealed=sealed))
    assert found is not None and (found.row, found.position) == (1, 12)


def test_cuts(cache):
    """By position; rows before position 0, and cuts at the start, hold nothing."""
    cache = cache.replace(cut=jnp.asarray([16, 4, 0], jnp.int32))
    reach = cache.cuts[1]["window.key"].shape[1]  # 7, one less than the window

    def cut_changed(row, place):
        cuts = [dict(cut) for cut in cache.cuts]
        array = cuts[1]["window.key"]
        cuts[1]["window.key"] = array.at[row, place, 0, 1].set(5.0)
        return ha.diff(cache, cache.replace(cuts=tuple(cuts)))

    found = cut_changed(0, 2)
    assert found is not None
    assert (found.state, found.layer, found.kind) == ("cut window.key", 1, "swa")
    assert (found.row, found.position, found.index) == (0, 16 - reach + 2, (0, 1))
    assert cut_changed(1, reach - 5) is None
    assert cut_changed(1, reach - 4) is not None
    assert cut_changed(2, reach - 1) is None
    found = ha.diff(cache, cache.replace(cut=cache.cut.at[1].set(8)))
    assert found is not None and str(found) == "counts: cut, row 1: 4 != 8"


def test_tolerance(cache):
    where = (0, 0, 0, 0)
    value = cache.layers[0]["entries"].key[where]
    other = change(cache, 0, "entries", "key", where, value + 0.25)
    assert ha.diff(cache, other, tolerance=0.26) is None
    assert ha.diff(cache, other, tolerance=0.24) is not None
    zero = change(cache, 0, "entries", "key", where, 0.0)
    minus = change(cache, 0, "entries", "key", where, -0.0)
    assert ha.diff(zero, minus) is not None
    assert ha.diff(zero, minus, tolerance=1e-9) is None
    nan = change(cache, 0, "entries", "key", where, jnp.nan)
    assert ha.diff(cache, nan, tolerance=1e9) is not None
    assert ha.diff(nan, nan, tolerance=1e-9) is None
    with pytest.raises(ValueError, match="tolerance=-1"):
        ha.diff(cache, cache, tolerance=-1)


def test_counts_spec_structure(cache):
    found = ha.diff(cache, cache.replace(faults=cache.faults.at[2].set(4)))
    assert found is not None
    assert (found.state, found.kind, found.row, found.b) == ("faults", "counts", 2, 4)
    assert str(found) == "counts: faults, row 2: 0 != 4"
    stepped = cache.replace(on_grid=cache.on_grid.at[0].set(7))
    found = ha.diff(cache, stepped)
    assert found is not None and str(found) == "counts: on_grid, row 0: 0 != 7"
    assert ha.diff(cache, stepped, tolerance=1e-6) is None
    found = ha.diff(cache, ha.transforms.grow(cache))
    assert found is not None and str(found) == "spec: capacity: 32 != 64"
    found = ha.diff(cache, ha.transforms.select_rows(cache, [0, 1]))
    assert found is not None and str(found) == "structure: batch: 3 != 2"
    states = {k: v for k, v in cache.layers[3].states.items() if k != "index"}
    layers = (*cache.layers[:3], LayerCache(states, "csa"))
    found = ha.diff(cache, cache.replace(layers=layers))
    assert found is not None and (found.state, found.layer) == ("index", 3)
    assert (found.a, found.b) == ("IndexerState", "(absent)")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.row = 1  # type: ignore[misc]


def test_stored_dtype(cache):
    where = (0, 0, 0, 0)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), cache.layers)
    half = cache.replace(layers=half)
    assert ha.diff(half, half) is None
    found = ha.diff(half, change(half, 0, "entries", "key", where, 3.0))
    assert found is not None and found.b == 3.0
