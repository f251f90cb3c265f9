"""The operations of pallas_kernels beside what a user would write instead.

    python -m experiments.bench_kernels --workdir=runs/bench_kernels
        [--ops=window_attention,pool] [--profile=cpu]

Under two minutes on two idle CPU cores. On a GPU every kernel is tuned first and the
table in pallas_kernels/tuned is written. Times and ratios go to summary.json.
"""

import dataclasses

from ml_collections import ConfigDict

from experiments.bench_kernels.config import Config


def get_config() -> ConfigDict:
    """The defaults of `experiments.bench_kernels.config.Config`."""
    return ConfigDict(dataclasses.asdict(Config()))
