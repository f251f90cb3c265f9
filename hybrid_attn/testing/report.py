"""What a conformance run measures, and how it fails."""

import dataclasses

import jax
import numpy as np

from hybrid_attn.testing.tolerances import Tolerance


@dataclasses.dataclass(frozen=True)
class Result:
    """The worst figure of one invariant: ``error`` where ``allowed`` is the limit."""

    invariant: str
    cases: int
    worst_case: str
    error: float
    allowed: float


class Checks:
    """The checks of one invariant; each raises AssertionError with its figures."""

    def __init__(self, invariant: str, subject: str, table: Tolerance):
        self.invariant, self.subject, self.table = invariant, subject, table
        self._measured: list[tuple[float, float, str]] = []

    def fail(self, case: str, message: str) -> None:
        raise AssertionError(f"{self.subject}: {self.invariant}: {case}: {message}")

    def true(self, case: str, condition, message: str = "does not hold") -> None:
        self._measured.append((0.0, 0.0, case))
        if not bool(np.all(condition)):
            self.fail(case, message)

    def close(
        self, case: str, got, want, where=None, table: Tolerance | None = None
    ) -> None:
        """Logits [..., v] agree within the table where bool[...] ``where`` holds."""
        table = self.table if table is None else table
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        if got.shape != want.shape:
            self.fail(case, f"shape {got.shape}, expected {want.shape}")
        where = np.ones(got.shape[:-1], bool) if where is None else np.asarray(where)
        got, want = got[where], want[where]
        if not got.size:
            self.fail(case, "compares nothing")
        largest = np.max(np.abs(want))
        allowed = table.relative * max(1.0, largest)
        difference = np.abs(got - want)
        # A NaN compares false with every limit, so it is looked for by name.
        error = float("nan") if np.isnan(got).any() else float(np.max(difference))
        self._measured.append((error, allowed, case))
        if not error <= allowed:
            place = np.argwhere(where)[
                np.argmax(np.nan_to_num(difference, nan=np.inf).max(-1))
            ]
            self.fail(
                case,
                f"differs by {error:.3g} at {tuple(place.tolist())}, allowed "
                f"{allowed:.3g} (largest logit {largest:.3g})",
            )
        ranked = np.sort(want, axis=-1)
        clear = ranked[:, -1] - ranked[:, -2] > 2 * allowed
        same = got.argmax(-1) == want.argmax(-1)
        if not same[clear].all():
            self.fail(case, "another likeliest token beyond twice the tolerance")

    def same(self, case: str, got, want, rows=None) -> None:
        """Two trees hold the same bits (NaN equals itself), in the given rows."""
        got, want = jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(want)
        self._measured.append((0.0, 0.0, case))
        if [key for key, _ in got] != [key for key, _ in want]:
            self.fail(case, "other leaves")
        for (key, a), (_, b) in zip(got, want, strict=True):
            a, b = np.asarray(a), np.asarray(b)
            if rows is not None:
                a, b = a[rows], b[rows]
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                differing = (
                    np.sum(a != b) if a.shape == b.shape else f"{a.shape}/{b.shape}"
                )
                self.fail(case, f"{jax.tree_util.keystr(key)} differs ({differing})")

    def finite(self, case: str, tree) -> None:
        self._measured.append((0.0, 0.0, case))
        for key, leaf in jax.tree.leaves_with_path(tree):
            if not np.isfinite(np.asarray(leaf, np.float32)).all():
                self.fail(case, f"{jax.tree_util.keystr(key)} is not finite")

    def raises(self, case: str, words: tuple[str, ...], call) -> None:
        """``call`` raises a ValueError whose text has every word."""
        self._measured.append((0.0, 0.0, case))
        try:
            call()
        except ValueError as error:
            missing = [word for word in words if word not in str(error)]
            if missing:
                self.fail(case, f"{error!s} does not name {missing}")
        else:
            self.fail(case, "raised nothing, expected a ValueError")

    def result(self) -> Result:
        if not self._measured:
            self.fail("all", "checked nothing")
        error, allowed, case = max(
            self._measured, key=lambda m: m[0] / m[1] if m[1] else 0.0
        )
        return Result(self.invariant, len(self._measured), case, error, allowed)
