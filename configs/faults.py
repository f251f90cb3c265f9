"""The fault campaign of 10,000 flips, and every measurement of `recover`.

python -m experiments.recover --config=configs/faults.py --workdir=DIR
    [--config.flips.count=1000]
"""

import dataclasses

from ml_collections import ConfigDict

from experiments.recover.config import Config


def get_config() -> ConfigDict:
    """The defaults of `experiments.recover.config.Config`."""
    return ConfigDict(dataclasses.asdict(Config()))
