"""The search for a configuration, by a clock that is told what each one takes."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels import autotune as module
from pallas_kernels.autotune import autotune
from pallas_kernels.timing import Times, interleaved


@dataclasses.dataclass(frozen=True)
class Config:
    block: int


class Bench:
    """Configurations whose call takes as many seconds as it is told."""

    def __init__(
        self, seconds: dict[int, float], results: dict[int, float] | None = None
    ):
        self.seconds, self.results = seconds, results or {}
        self.rounds: list[int] = []

    def build(self, config: Config):
        if config.block not in self.seconds:
            raise ValueError(f"block {config.block} does not fit")

        def call():
            self.last = config.block
            return np.full(3, self.results.get(config.block, 1.0))

        return call

    def timer(self, functions, *, seconds):
        self.rounds.append(len(functions))
        times = {}
        for name, function in functions.items():
            function()
            taken = self.seconds[self.last]
            times[name] = Times(taken, taken, (taken,))
        return times


def run(bench: Bench, blocks, default=16):
    return autotune(
        [Config(block) for block in blocks],
        bench.build,
        Config(default),
        timer=bench.timer,
    )


def test_the_fastest_is_chosen_and_written_down():
    bench = Bench({16: 3.0, 32: 1.0, 64: 1.05, 128: 2.0})
    tuning = run(bench, (16, 32, 64, 128))
    assert tuning.config == Config(32) and tuning.seconds == 1.0
    assert tuning.default_seconds == 3.0 and tuning.timed == 4
    # Each alone, then the near ones and the default together.
    assert bench.rounds == [1, 1, 1, 1, 3]
    entry = tuning.entry("op", {"t": 8}, np.float32)
    assert (entry.config, entry.dtype) == ({"block": 32}, "float32")
    assert entry.microseconds == 1e6


def test_noise_does_not_replace_the_default():
    assert run(Bench({16: 1.01, 32: 1.0}), (32,)).config == Config(16)
    assert run(Bench({16: 1.03, 32: 1.0}), (32,)).config == Config(32)


def test_what_fails_or_gives_other_numbers_is_passed_over():
    bench = Bench({16: 2.0, 32: 1.0, 64: 1.5}, {32: 1.5})
    seen = []
    tuning = autotune(
        [Config(block) for block in (16, 8, 32, 64)],
        bench.build,
        Config(16),
        timer=bench.timer,
        progress=seen.append,
    )
    assert tuning.config == Config(64)
    assert "does not fit" in tuning.failures[Config(8)]
    assert "differs" in tuning.failures[Config(32)]
    assert seen == sorted(seen) and seen[-1] == 1.0


def test_a_default_that_fails():
    tuning = run(Bench({32: 1.0}), (32,))
    assert tuning.config == Config(32) and tuning.default_seconds is None


def test_a_default_that_only_the_kernel_knows():
    bench = Bench({16: 1.0, 32: 1.01})
    tuning = autotune(
        [Config(16), Config(32)],
        lambda config: bench.build(config or Config(32)),
        timer=bench.timer,
    )
    assert tuning.config == Config(16)
    assert (tuning.seconds, tuning.default_seconds, tuning.timed) == (1.0, 1.01, 3)


def test_a_budget_ends_the_search():
    bench = Bench({n: 1.0 / n for n in range(1, 9)})
    now = iter(range(100))
    tuning = autotune(
        [Config(n) for n in range(1, 9)],
        lambda config: bench.build(config or Config(1)),
        budget=4.5,
        timer=bench.timer,
        clock=lambda: next(now),
    )
    assert tuning.timed == 4
    # Not the first ones of the list.
    assert tuning.config.block > 3


def test_none_runs():
    with pytest.raises(module.NoConfiguration, match="block 32 does not fit"):
        run(Bench({}), (32,))


def test_nan_is_no_agreement():
    bench = Bench({16: 2.0, 32: 1.0}, {32: float("nan")})
    assert run(bench, (32,)).config == Config(16)


def test_timing_takes_turns_and_least_samples():
    now, order = [0.0], []

    def function(name, seconds):
        def call():
            order.append(name)
            now[0] += seconds
            return np.zeros(1)

        return call

    times = interleaved(
        {"slow": function("slow", 1.0), "fast": function("fast", 0.1)},
        seconds=0.5,
        least=2,
        clock=lambda: now[0],
    )
    assert times["slow"].samples == pytest.approx((1.0, 1.0))
    assert len(times["fast"].samples) in (5, 6)
    assert times["fast"].least == pytest.approx(0.1)
    # Two warm-ups of each, the second of the slow one counted; then in turn.
    assert order[4:8] == ["slow", "fast", "fast", "fast"]


def test_one_call_of_compiled_code_may_be_enough():
    def never():
        raise AssertionError

    times = interleaved({"slow": never}, seconds=0.5, least=1, first={"slow": 0.7})
    assert times["slow"] == Times(0.7, 0.7, (0.7,))
