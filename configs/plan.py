"""DeepSeek-V4-Pro at a million tokens on 32 devices, beside Flash and a dense model.

    python -m experiments.plan --config=configs/plan.py --workdir=runs/plan
    python -m experiments.plan --model=tiny_hybrid --context=65536 --workdir=DIR

Seconds on any machine: nothing is allocated and nothing is compiled. Result of the
defaults: Pro has 1573.0B parameters (48.9B active) and 9,848 bytes of bfloat16 cache
a token, 0.039 × that of dense attention with 8 key/value heads.
"""

import dataclasses

from ml_collections import ConfigDict

from experiments.plan_config import PlanConfig


def get_config() -> ConfigDict:
    """The defaults of `experiments.plan_config.PlanConfig`."""
    return ConfigDict(dataclasses.asdict(PlanConfig()))
