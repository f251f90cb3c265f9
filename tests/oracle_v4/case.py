"""A reference case of DeepSeek-V4, and ways to step through it."""

import functools
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

import hybrid_attn as ha

DATA = Path(__file__).parent.parent / "data"
CASES = ("flash_tiny", "pro_tiny", "short_rates")
# Unusual shapes, of scripts/make_odd_cases.py.
ODD = ("odd_clamp", "odd_least", "odd_tied")
ROWS = 3
# (row of the reference, position) where a router of the last layer is undecided: in
# float64 its second and third score are 5.7e-7 apart, in the reference 4.8e-7, and
# float32 rounding of the hidden states (2e-6 rms, the reference's own too) decides. No
# later layer reads the position; its logits and last hidden state are left out.
NEAR_TIES = {"pro_tiny": [(0, 392)]}
# Absolute, float32, at every position.
LOGITS, HIDDEN = 2e-4, 5e-4


class Case:
    """One case over `ROWS` rows, each a row of the reference.

    Attributes:
      tokens: int32[rows, time]; logits: float32[rows, time, v].
      positions: int32[p], where hidden states are known.
      hidden: per block float32[rows, p, ...]; the last one is after the final norm.
      decided: bool[rows, time], see `NEAR_TIES`.
      chosen: by layer, int32[rows, time, k] sorted, -1 = none.
    """

    def __init__(self, directory: Path):
        self.config, self.model = ha.weights.load(directory)
        case = load_file(directory / "case.safetensors")
        row = np.arange(ROWS) % case["input_ids"].shape[0]
        self.decided = np.ones((ROWS, case["input_ids"].shape[1]), bool)
        for tied, position in NEAR_TIES.get(directory.name, ()):
            self.decided[row == tied, position] = False
        self.tokens, self.logits = case["input_ids"][row], case["logits"][row]
        self.time = self.tokens.shape[1]
        self.positions = case.get("positions", np.arange(self.time))
        layers = range(1, len(self.config.layers) + 1)
        self.hidden = [case[f"hidden.{i}"][row] for i in layers]
        self.chosen = {
            int(name.removeprefix("topk.")): np.sort(value[row], axis=-1)
            for name, value in case.items()
            if name.startswith("topk.")
        }
        self.final = jax.jit(lambda x: self.model.final(x))

    def cache(self):
        return ha.init_cache(self.config, ROWS, self.time)

    def replay(self, plan) -> tuple[np.ndarray, list[np.ndarray], dict]:
        """Steps through all tokens; ``plan(step, lengths)`` says how many of each row.

        Returns:
          (logits, hidden per block, chosen by layer), each for all positions.
        """
        cache, number = self.cache(), 0
        hidden: list = [None] * len(self.config.layers)
        out: dict = {"logits": np.full(self.logits.shape, np.nan, np.float32)}
        while (begin := np.asarray(cache.length)).min() < self.time:
            counts = np.minimum(plan(number, begin), self.time - begin)
            width = int(counts.max())
            column = np.minimum(begin[:, None] + np.arange(width), self.time - 1)
            tokens = np.take_along_axis(self.tokens, column, axis=1)
            logits, cache, aux = ha.step(self.model, cache, tokens, counts, aux=True)
            got = {"logits": logits}
            for i, layer in enumerate(aux):
                last = i == len(aux) - 1
                got[i, "hidden"] = (
                    self.final(layer["hidden"]) if last else layer["hidden"]
                )
                if "chosen" in layer:
                    got[i, "chosen"] = layer["chosen"]
            for name, value in got.items():
                value = np.asarray(value)
                if name not in out:
                    shape = (ROWS, self.time, *value.shape[2:])
                    out[name] = np.full(shape, -9, value.dtype)
                for r in range(ROWS):
                    span = slice(begin[r], begin[r] + counts[r])
                    out[name][r, span] = value[r, : counts[r]]
            number += 1
        hidden = [out[i, "hidden"] for i in range(len(self.config.layers))]
        chosen = {i: np.sort(out[i, "chosen"], axis=-1) for i in self.chosen}
        return out["logits"], hidden, chosen

    def logits_error(self, logits) -> float:
        """The largest error over all decided positions."""
        return float(np.max(np.abs(logits - self.logits)[self.decided]))

    def check(self, logits, hidden, chosen) -> dict[str, float]:
        """Asserts all limits; returns the largest errors."""
        errors = {"logits": self.logits_error(logits)}
        for i, (got, want) in enumerate(zip(hidden, self.hidden, strict=True), 1):
            wrong = np.abs(got[:, self.positions] - want)
            if i == len(hidden):
                wrong = wrong[self.decided[:, self.positions]]
            errors[f"hidden.{i}"] = float(np.max(wrong))
        for name, error in errors.items():
            limit = LOGITS if name == "logits" else HIDDEN
            assert error <= limit, f"{name}: {error:.3g} above {limit}"
        for layer, want in self.chosen.items():
            got = chosen[layer]
            # Where fewer are visible than may be chosen, one side may be narrower.
            width = max(got.shape[-1], want.shape[-1])
            got, want = (_widened(x, width) for x in (got, want))
            wrong = np.argwhere((got != want).any(axis=-1))
            assert not len(wrong), (
                f"layer {layer}: other choice at {wrong[:5].tolist()}"
            )
        return errors


def _widened(x: np.ndarray, width: int) -> np.ndarray:
    pad = [(0, 0), (0, 0), (width - x.shape[-1], 0)]
    return np.pad(x, pad, constant_values=-1)


@functools.cache
def load(name: str) -> Case:
    return Case(DATA / name)


def chunks(size: int):
    """A plan of equal chunks."""
    return lambda number, lengths: np.full(lengths.shape, size)


def ragged(seed: int, most: int):
    """A plan of random chunks 0..most, each row its own."""

    def plan(number, lengths):
        drawn = np.random.default_rng((seed, number)).integers(
            0, most + 1, len(lengths)
        )
        drawn[number % len(drawn)] = most
        return drawn

    return plan
