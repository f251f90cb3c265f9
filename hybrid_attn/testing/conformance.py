"""Runs every invariant on a small model of one mixer kind."""

from collections.abc import Callable

from hybrid_attn.config import ModelConfig
from hybrid_attn.testing import cuts, documents, drafts, rows, safety, states, stores
from hybrid_attn.testing.report import Checks, Result
from hybrid_attn.testing.subject import Subject, as_config

Invariant = Callable[[Subject, Checks], None]

# A new invariant joins by being listed; tests run kind × invariant from this list.
INVARIANTS: tuple[Invariant, ...] = (
    cuts.training_equals_step,
    cuts.full_equals_chunked,
    cuts.full_equals_stepwise,
    cuts.exact_shapes,
    cuts.rows_at_phases,
    cuts.right_padding,
    cuts.batch_of_one,
    cuts.boundaries,
    cuts.prefill_any_split,
    cuts.stored_bfloat16,
    cuts.compile_counts,
    documents.packed_equals_separate,
    drafts.verified_drafts,
    rows.rows_keep_their_bits,
    states.unused_capacity,
    states.rewinding,
    states.forking,
    states.old_versions,
    states.sealed_entries,
    states.growing,
    states.selecting_rows,
    stores.restored_equals_cold,
    stores.decoded_boundaries,
    stores.replayed_equals_cold,
    stores.tiers,
    safety.causality,
    safety.masked_rows,
    safety.gradients,
    safety.faults,
    safety.choices,
)


def check_invariant(invariant: Invariant, subject: Subject) -> Result:
    """Runs one invariant; AssertionError names it, the case and the figures."""
    checks = Checks(invariant.__name__, subject.name, subject.table)
    invariant(subject, checks)
    return checks.result()


def conformance(mixer: str | ModelConfig, *, progress=None) -> list[Result]:
    """Holds a mixer to every invariant that the library's own mixers keep.

    Args:
      mixer: a registered kind (two layers of it are built), a layer pattern, or a
        `ModelConfig`.
      progress: called with each `Result` as it is there.

    Returns:
      One `Result` an invariant, with the worst error measured and its limit.

    Raises:
      AssertionError: an invariant does not hold; names it, the case and the figures.
      ValueError: the kind is not registered.
    """
    config = as_config(mixer)
    name = mixer if isinstance(mixer, str) else config.name
    subject = Subject(name, config)
    results = []
    for invariant in INVARIANTS:
        results.append(check_invariant(invariant, subject))
        if progress is not None:
            progress(results[-1])
    return results
