"""Allocated bytes, from arithmetic."""

import jax
import pytest

import hybrid_attn as ha
from hybrid_attn.cache.states import State, check_state, register_state
from hybrid_attn.testing import small_config

UNDO = 5
# length, floor, sealed, faults, cut, on_grid: bytes a row
COUNTS = 4 + 4 + 4 + 1 + 4 + 4


def _shift(config, undo=UNDO):
    return (1 + undo) * config.hidden_size * 4


def test_every_state_by_arithmetic():
    config = small_config("dense,swa,hca,csa")
    batch, capacity = 3, 64
    ledger = ha.cache_bytes(ha.init_cache(config, batch, capacity, undo=UNDO))
    window = (8 - 1 + UNDO) * 8 * 4
    entries = {
        "dense": capacity * 2 * 2 * 8 * 4,  # key and value of two heads of eight
        "hca": capacity // 8 * 8 * 4,
        "csa": capacity // 4 * 8 * 4,
    }
    tail = {
        "hca": (8 - 1 + UNDO) * 8 * 2 * 4,  # content and score
        "csa": (2 * 4 - 1 + UNDO) * 16 * 2 * 4,  # two halves each
    }
    index = capacity // 4 * 8 * 4 + (2 * 4 - 1 + UNDO) * 16 * 2 * 4
    shift = _shift(config)
    # Without the undo rows, once more at the last boundary.
    window_cut, shift_cut = (8 - 1) * 8 * 4, _shift(config, 0)
    hca_cut, csa_cut = (8 - 1) * 8 * 2 * 4, (2 * 4 - 1) * 16 * 2 * 4
    cuts = {
        "dense": shift_cut,
        "swa": window_cut + shift_cut,
        "hca": window_cut + hca_cut + shift_cut,
        "csa": window_cut + 2 * csa_cut + shift_cut,
    }
    by_kind = {
        "dense": entries["dense"] + shift + cuts["dense"],
        "swa": window + shift + cuts["swa"],
        "hca": window + entries["hca"] + tail["hca"] + shift + cuts["hca"],
        "csa": window + entries["csa"] + tail["csa"] + index + shift + cuts["csa"],
        "counts": COUNTS,
    }
    assert ledger.by_kind == {kind: batch * n for kind, n in by_kind.items()}
    assert ledger.by_state == {
        "CompressedKV": batch * sum(entries.values()),
        "SlidingWindow": batch * 3 * window,
        "UncompressedTail": batch * (sum(tail.values()) + 4 * shift),
        "IndexerState": batch * index,
        "cuts": batch * sum(cuts.values()),
        "counts": batch * COUNTS,
    }
    assert ledger.total == batch * sum(by_kind.values())
    assert sum(ledger.by_tier.values()) == ledger.total
    assert ledger.per_token == ledger.total / (capacity * batch)


def test_windows_do_not_grow():
    """A window layer's bytes are those of its window, whatever the capacity."""
    config = small_config("swa*3")
    small = ha.cache_bytes(ha.init_cache(config, 1, 64, undo=UNDO))
    large = ha.cache_bytes(ha.init_cache(config, 1, 1 << 20, undo=UNDO))
    assert small.total == large.total
    assert small.by_state["SlidingWindow"] == 3 * (8 - 1 + UNDO) * 8 * 4


def test_stored_dtypes():
    config = small_config("csa")
    full = ha.cache_bytes(ha.init_cache(config, 1, 64, undo=UNDO))
    half = ha.cache_bytes(ha.init_cache(config, 1, 64, undo=UNDO, dtypes="bfloat16"))
    for state in ("CompressedKV", "SlidingWindow"):
        assert 2 * half.by_state[state] == full.by_state[state]
    # The frontier stays in float32: it is summed over, and small.
    assert half.by_state["UncompressedTail"] == full.by_state["UncompressedTail"]
    own = ha.init_cache(config, 1, 64, undo=UNDO, dtypes={"index": "bfloat16"})
    saved = 64 // 4 * 8 * 2
    assert ha.cache_bytes(own).total == full.total - saved


def test_abstract_cache_counts_too():
    config = small_config("csa")
    abstract = jax.eval_shape(lambda: ha.init_cache(config, 2, 64))
    assert ha.cache_bytes(abstract).total == (
        ha.cache_bytes(ha.init_cache(config, 2, 64)).total
    )


def test_capacity_is_whole_blocks():
    cache = ha.init_cache(small_config("csa,hca"), 1, 17)
    assert (cache.spec.block_tokens, cache.spec.capacity) == (16, 32)
    assert ha.init_cache(ha.ModelConfig(pattern="hca"), 1, 1).spec.block_tokens == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch=0: expected a whole number from 1"),
        ({"capacity": 0}, "capacity=0: expected a whole number from 1"),
        ({"undo": -1}, "undo=-1: expected a whole number from 0"),
        ({"dtypes": "int8"}, "'int8': expected a floating dtype"),
        ({"dtypes": {"entry": "float32"}}, r"unknown roles \['entry'\]; expected some"),
    ],
)
def test_init_cache_refuses(changes, message):
    arguments = {"batch": 1, "capacity": 16, **changes}
    with pytest.raises(ValueError, match=message):
        ha.init_cache(small_config("csa"), **arguments)


def test_unknown_state_is_refused():
    class Stray:
        pass

    with pytest.raises(TypeError, match="unknown state kind Stray; expected one of"):
        check_state(Stray())
    with pytest.raises(ValueError, match="expected 'history' or 'recent'"):
        register_state(type("NoFamily", (State,), {}))
    with pytest.raises(ValueError, match="named CompressedKV is already registered"):
        register_state(type("CompressedKV", (State,), {"family": "history"}))
