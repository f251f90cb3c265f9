"""The meet of groups against brute force over every boundary."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_attn.cache.groups import Availability, meet

LIMIT = 48


def brute(available, families) -> int:
    """The largest boundary that every group's definition allows, tried in turn."""
    best = 0
    for boundary in range(1, LIMIT + 1):
        good = True
        for name, group in available.items():
            whole, rest = divmod(boundary, group.stride)
            needed = range(whole) if families[name] == "history" else [whole - 1]
            good &= not rest and set(needed) <= group.blocks
        best = boundary if good else best
    return best


@st.composite
def cases(draw):
    available, families = {}, {}
    for name in draw(st.sets(st.sampled_from("abcd"), min_size=1)):
        stride = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
        count = LIMIT // stride
        # Mostly full chains with a few holes: random sets nearly always meet at 0.
        holes = draw(st.sets(st.integers(0, count - 1), max_size=3))
        blocks = frozenset(range(draw(st.integers(0, count)))) - holes
        available[name] = Availability(stride, blocks)
        families[name] = draw(st.sampled_from(["history", "recent"]))
    return available, families


@settings(max_examples=400, deadline=None)
@given(cases())
def test_brute_force(case):
    assert meet(*case) == brute(*case)


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_monotone(case, data):
    """One more block never makes the meet shallower."""
    available, families = case
    name = data.draw(st.sampled_from(sorted(available)))
    group = available[name]
    block = data.draw(st.integers(0, LIMIT // group.stride))
    more = Availability(group.stride, group.blocks | {block})
    assert meet({**available, name: more}, families) >= meet(available, families)


def test_published_case():
    available = {
        "full": Availability.at(32, 32, 64),
        "ssm": Availability.at(16, 32, 48),
    }
    assert meet(available, {"full": "history", "ssm": "recent"}) == 32


@pytest.mark.parametrize(
    ("full", "window", "expected"),
    [
        ((32, 64, 96), (64, 96), 96),
        ((32, 96), (32, 96), 32),  # a hole in the chain
        ((64, 96), (64,), 0),  # no first block
        ((32, 64), (96,), 0),
    ],
)
def test_families(full, window, expected):
    available = {"full": Availability.at(32, *full), "w": Availability.at(32, *window)}
    assert meet(available, {"full": "history", "w": "recent"}) == expected


def test_refuses():
    one = Availability(4, frozenset({0}))
    with pytest.raises(ValueError, match=r"\['a'\], families \['b'\]"):
        meet({"a": one}, {"b": "recent"})
    with pytest.raises(ValueError, match="expected 'history' or 'recent'"):
        meet({"a": one}, {"a": "ancient"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="at least one"):
        meet({}, {})
    with pytest.raises(ValueError, match="boundary 33: expected a multiple of 32"):
        Availability.at(32, 33)
    with pytest.raises(ValueError, match="stride=0"):
        Availability(0, frozenset())
