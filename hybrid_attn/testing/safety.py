"""Invariants: causality, rows that see nothing, gradients, faults inside jit."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybrid_attn import transforms
from hybrid_attn.cache.states import Fault
from hybrid_attn.layers.parameters import trainable
from hybrid_attn.testing.report import Checks
from hybrid_attn.testing.subject import CHUNK, Subject
from hybrid_attn.training.loss import model_loss

_LIBRARY_KINDS = {"dense", "swa", "hca", "csa"}


def causality(subject: Subject, check: Checks) -> None:
    """Another token at p moves no logit before p, and moves the one at p."""
    place = 2 * np.arange(subject.rows) % (subject.time - 1)
    tokens = subject.tokens.copy()
    rows = np.arange(subject.rows)
    tokens[rows, place] = (tokens[rows, place] + 5) % subject.config.vocab_size
    before = np.arange(subject.time) < place[:, None]
    got = np.asarray(subject.whole(subject.cache(), tokens)[0])
    check.same("step", got[before], subject.full[before])
    moved = np.abs(got - subject.full).max(-1)
    check.true("step: own logit moves", moved[rows, place] > 1e-3)
    trained = subject.forward(subject.tokens)
    changed = subject.forward(tokens)
    check.same("forward", changed[before], trained[before])
    moved = np.abs(changed - trained).max(-1)
    check.true("forward: own logit moves", moved[rows, place] > 1e-3)
    # Later positions must hear of it, or the layer reads nothing but itself.
    check.true("forward: the next logit moves", moved[rows, place + 1] > 1e-6)


def masked_rows(subject: Subject, check: Checks) -> None:
    """Rows of length 0 are finite, untouched, and do not disturb the others."""
    empty = subject.cache()
    none = np.zeros(subject.rows, int)
    (logits, _, _), cache = subject.advance(empty, none, CHUNK)
    check.finite("all rows empty", logits)
    check.same("all rows empty: state", cache, empty)
    some = np.where(np.arange(subject.rows) % 3 == 0, 0, CHUNK)
    (logits, want, where), cache = subject.advance(empty, some, CHUNK)
    check.finite("some rows empty", logits)
    check.close("the others", logits, want, where)
    check.same("empty rows: state", cache, empty, some == 0)


def gradients(subject: Subject, check: Checks) -> None:
    """Gradients of the training loss are finite, with rows that count nothing too."""
    one_slot = any(layer.ratio == 1 for layer in subject.config.layers)
    library = {layer.kind for layer in subject.config.layers} <= _LIBRARY_KINDS
    graph, state, fixed = nnx.split(subject.model, trainable, ...)

    def loss(state, tokens, targets, dense):
        model = nnx.merge(graph, state, fixed)
        return model_loss(model, tokens, targets, dense=dense)

    run = jax.jit(jax.grad(loss, has_aux=True))
    tokens = jnp.asarray(subject.tokens[:4, :13])
    targets = jnp.asarray(subject.tokens[:4, 1:14])
    ignored = targets.at[:2].set(-1)
    for name, wanted, dense in (
        ("sparse", targets, False),
        ("dense warm-up", targets, True),
        ("rows without targets", ignored, False),
        ("no targets", jnp.full_like(targets, -1), False),
    ):
        slopes, metrics = run(state, tokens, wanted, jnp.asarray(dense))
        check.finite(name, slopes)
        check.finite(f"{name}: metrics", metrics)
        # A parameter that nothing reads is a defect here; a user's kind may have them.
        if name == "dense warm-up" and library:
            for key, leaf in jax.tree.leaves_with_path(slopes):
                text = jax.tree_util.keystr(key)
                if "slot_score" in text and one_slot:
                    continue  # the softmax over a single slot is 1, whatever its score
                check.true(text, np.any(np.asarray(leaf) != 0), "has no gradient")


def faults(subject: Subject, check: Checks) -> None:
    """Bad values inside jit: that row untouched and NaN, its bit set, no other row."""
    base = subject.at(6)
    good = np.full(subject.rows, 4)
    tokens = subject.slice(np.full(subject.rows, 6), good, CHUNK)
    want, sound = subject.run(base, tokens, good.astype(np.int32))
    bad_tokens, lengths = tokens.copy(), good.copy()
    bad_tokens[1, 2] = subject.config.vocab_size
    bad_tokens[2, 0] = -1
    bad_tokens[3, 7] = -5  # padding: not counted, so no fault
    lengths[4], lengths[5] = CHUNK + 1, -1
    bits = {1: Fault.TOKEN, 2: Fault.TOKEN, 4: Fault.LENGTHS, 5: Fault.LENGTHS}
    got, cache = subject.run(base, bad_tokens, lengths.astype(np.int32))
    got, want = np.asarray(got)[:, :4], np.asarray(want)[:, :4]
    _void_rows(check, "values", base, (got, cache), (want, sound), bits)
    check.true("names", Fault.names(Fault.TOKEN) == ["token outside the vocabulary"])

    full = base.spec.capacity - 3
    near = base.replace(
        length=base.length.at[7].set(full),
        floor=base.floor.at[7].set(full - base.spec.undo),
    )
    got, cache = subject.run(near, tokens, good.astype(np.int32))
    got = np.asarray(got)[:, :4]
    _void_rows(
        check, "capacity", near, (got, cache), (want, sound), {7: Fault.CAPACITY}
    )

    # The bit stays while the row goes on, and goes when it is cleared.
    _, later = subject.run(cache, tokens, np.zeros(subject.rows, np.int32))
    check.true("bit stays", np.asarray(later.faults)[7] == Fault.CAPACITY)
    mask = np.arange(subject.rows) == 7
    cleared = transforms.clear_faults(later, mask)
    check.true("cleared", np.asarray(cleared.faults) == 0)

    target = np.full(subject.rows, 6, np.int32)
    target[2], target[3] = 99, -1
    back = jax.jit(transforms.rewind)(base, target)
    check.true("rewind: length", np.asarray(back.length) == 6)
    bit = np.where((target != 6), Fault.REWIND, 0)
    check.true("rewind: bit", np.asarray(back.faults) == bit)


def _void_rows(check, name, base, result, reference, bits: dict[int, int]) -> None:
    (got, cache), (want, sound) = result, reference
    void = np.isin(np.arange(base.batch), list(bits))
    expected = np.zeros(base.batch, np.uint8)
    expected[list(bits)] = list(bits.values())
    check.same(f"{name}: bits", np.asarray(cache.faults), expected)
    check.true(f"{name}: NaN", np.isnan(got[void]))
    plain = cache.replace(faults=base.faults)
    check.same(f"{name}: void rows untouched", plain, base, void)
    check.same(f"{name}: other rows", plain, sound, ~void)
    check.same(f"{name}: other logits", got[~void], want[~void])


def choices(subject: Subject, check: Checks) -> None:
    """Chosen entries are visible, distinct, and as many as there are up to k."""
    check.true("gap", subject.gap > subject.table.score_gap, f"{subject.gap:.3g}")
    position = np.arange(subject.time)
    for spec, aux in zip(subject.config.layers, subject.aux, strict=True):
        if "chosen" not in aux:
            continue
        chosen = np.asarray(aux["chosen"])
        visible = (position + 1) // spec.ratio
        count = np.minimum(visible, spec.top_k)
        check.true("count", (chosen >= 0).sum(-1) == count[None])
        check.true("visible", chosen < np.maximum(visible, 1)[None, :, None])
        ordered = np.sort(chosen, axis=-1)
        twice = (np.diff(ordered, axis=-1) == 0) & (ordered[..., 1:] >= 0)
        check.true("distinct", ~twice)
