"""The measurements of `recover` without the fault campaign.

python -m experiments.recover --config=configs/recover.py --workdir=DIR
"""

import dataclasses

from ml_collections import ConfigDict

from experiments.recover.config import TASKS, Config


def get_config() -> ConfigDict:
    """The defaults of `experiments.recover.config.Config`, but for its tasks."""
    tasks = tuple(task for task in TASKS if task != "flips")
    return ConfigDict(dataclasses.asdict(Config(tasks=tasks)))
