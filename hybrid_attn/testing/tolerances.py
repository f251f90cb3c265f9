"""The tolerance table: how far equal maths may drift, by stored dtype and backend.

A difference of logits is allowed up to ``relative × max(1, largest |logit|)``. A row
is widened only with a measurement beside it.
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Allowed drift of logits between two cuts of the same tokens."""

    relative: float
    # Largest score distance at the edge of a top-k choice that drift may cross.
    score_gap: float


TOLERANCES = {
    ("float32", "cpu"): Tolerance(relative=2e-5, score_gap=1e-5),
    ("float32", "gpu"): Tolerance(relative=2e-5, score_gap=1e-5),
    # Measured on CPU over {dense, swa, hca, csa, "hca,swa,csa"} × 8 seeds × 16 rows of
    # 32 tokens, whole step against chunks 1..9 and single tokens: 1e-6 in the median
    # row, 4.1e-4 at worst (a value that drifts by 1e-7 across a rounding edge of
    # bfloat16 moves by 4e-3 of itself). The limit is five times the worst.
    ("bfloat16", "cpu"): Tolerance(relative=2e-3, score_gap=1e-5),
    ("bfloat16", "gpu"): Tolerance(relative=2e-3, score_gap=1e-5),
}


def tolerance(stored: str = "float32", backend: str | None = None) -> Tolerance:
    """The row of a stored dtype on a backend (default: where JAX runs).

    Raises:
      ValueError: the table has no such row.
    """
    key = (stored, jax.default_backend() if backend is None else backend)
    if key not in TOLERANCES:
        raise ValueError(f"no tolerance for {key}; the table has {list(TOLERANCES)}")
    return TOLERANCES[key]
