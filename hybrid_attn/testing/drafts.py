"""Invariant: verifying a draft and taking back what was refused is plain decoding."""

import math

import numpy as np

from hybrid_attn import transforms
from hybrid_attn.initial import init_cache
from hybrid_attn.testing.report import Checks
from hybrid_attn.testing.states import poison
from hybrid_attn.testing.subject import CHUNK, DRAFT, Subject

# Every draft length k and every number of accepted tokens 0..k: a row for each pair.
PAIRS = tuple((k, n) for k in range(1, DRAFT + 1) for n in range(k + 1))


def draft_phases(subject: Subject) -> int:
    """Lengths 0.. at which drafts begin: all phases of all ratios, 16 at least."""
    ratios = (max(1, layer.ratio) for layer in subject.config.layers)
    return max(DRAFT, math.lcm(*ratios))


def verified_drafts(subject: Subject, check: Checks) -> None:
    """Drafts of 1..16 tokens, accepted up to any length, begun at every phase.

    The draft is one padded step, the refused rest of it holds wrong tokens, and
    `rewind` takes it back. What stays has the bits of the accepted tokens alone at
    the same shape, and going on gives the logits of the whole.
    """
    check.true("default undo", init_cache(subject.config, 1, 1).spec.undo == DRAFT)
    phases = draft_phases(subject)
    drafts = subject.drafting(len(PAIRS), phases + DRAFT + 2 + CHUNK)
    drafted, accepted = np.asarray(PAIRS).T
    for turn in range(phases):
        begin = (turn + np.arange(len(PAIRS))) % phases
        _verify(drafts, check, f"turn {turn}", begin, drafted, accepted)
    _below_the_floor(drafts, check)


def _verify(drafts: Subject, check: Checks, case, begin, drafted, accepted) -> None:
    start = drafts.at(begin, keep=False)
    right = drafts.slice(begin, accepted, DRAFT)
    column = np.arange(DRAFT)
    (want, whole, where), plain = drafts.advance(start, accepted, DRAFT)
    # After the accepted tokens come other ones than the sequence has.
    wrong = (drafts.slice(begin, drafted, DRAFT) + 3) % drafts.config.vocab_size
    tokens = np.where(column < accepted[:, None], right, wrong)
    logits, cache = drafts.step(start, tokens, drafted)
    logits = np.asarray(logits)
    check.close(f"{case}: accepted", logits, whole, where)
    check.same(f"{case}: bits of the accepted", logits[where], want[where])
    cache = transforms.rewind(cache, begin + accepted)
    # Undo reaches less far back after a draft, and a cut taken in it goes with it: only
    # what both may read must agree.
    kept = np.asarray(cache.cut) > 0
    check.true(f"{case}: cut", (cache.cut == plain.cut) | ~kept)
    plain = plain.replace(floor=cache.floor, cut=plain.cut * kept)
    check.same(f"{case}: cache", poison(cache, 0.0), poison(plain, 0.0))
    for width in (1, 1, CHUNK):
        counts = np.full(drafts.rows, width)
        (logits, want, where), cache = drafts.advance(cache, counts, width)
        check.close(f"{case}: going on by {width}", logits, want, where)


def _below_the_floor(drafts: Subject, check: Checks) -> None:
    """The whole of the longest draft comes back, and not one token more."""
    cache = drafts.at(DRAFT + 4, keep=False)
    check.true("floor", np.asarray(cache.floor) == 4)
    transforms.rewind(cache, 4)
    check.raises(
        "below the floor",
        ("to 3", str(DRAFT + 4), str(DRAFT), "to 4"),
        lambda: transforms.rewind(cache, 3),
    )
