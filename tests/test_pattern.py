"""The grammar of layer patterns, and what it says to bad ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_attn.pattern import parse_pattern

A, B, C = ("hca", None), ("swa", None), ("csa", None)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("swa", (B,)),
        ("hca*2,swa*3,csa", (A, A, B, B, B, C)),
        ("swa*2,(csa,hca)*20,csa", (B, B, *((C, A) * 20), C)),
        ("csa:8", (("csa", 8),)),
        ("csa:8*2,hca:16", (("csa", 8), ("csa", 8), ("hca", 16))),
        ("((swa,csa)*2,hca)*2", ((B, C, B, C, A) * 2)),
        (" hca * 2 ,\tswa ", (A, A, B)),
        ("_own2", (("_own2", None),)),
        ("(swa)", (B,)),
    ],
)
def test_expands(text, layers):
    assert parse_pattern(text) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got the end, expected a layer kind"),
        ("  ", "got the end, expected a layer kind"),
        ("swa,", "got the end, expected a layer kind"),
        (",swa", "got ',' at character 0, expected a layer kind"),
        ("swa*", r"got the end, expected a repeat count \(a whole number from 1\)"),
        ("swa*0", "got '0' at character 4, expected a repeat count"),
        ("swa*-1", "unexpected '-' at character 4"),
        ("swa**2", r"got '\*' at character 4, expected a repeat count"),
        ("csa:", "got the end, expected a compression ratio"),
        ("csa:0", "got '0' at character 4, expected a compression ratio"),
        ("csa:x", "got 'x' at character 4, expected a compression ratio"),
        ("(swa", r"got the end, expected '\)'"),
        ("swa)", r"got '\)' at character 3, expected ',' or the end"),
        ("()", r"got '\)' at character 1, expected a layer kind"),
        ("swa swa", "got 'swa' at character 4, expected ',' or the end"),
        ("2*swa", "got '2' at character 0, expected a layer kind"),
        ("swa;csa", "unexpected ';' at character 3"),
        ("swa*1.5", "unexpected '.' at character 5"),
    ],
)
def test_refuses(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_pattern(text)
    assert repr(text) in str(error.value)


_KINDS = st.sampled_from(["hca", "swa", "csa", "dense"])
_ITEMS = st.tuples(_KINDS, st.integers(0, 9), st.integers(1, 4))


@given(st.lists(_ITEMS, min_size=1, max_size=5), st.integers(1, 3))
def test_expansion_is_the_product(items, repeat):
    text = ",".join(
        kind + (f":{ratio}" if ratio else "") + (f"*{n}" if n > 1 else "")
        for kind, ratio, n in items
    )
    once = [(kind, ratio or None) for kind, ratio, n in items for _ in range(n)]
    assert parse_pattern(f"({text})*{repeat}") == tuple(once * repeat)
