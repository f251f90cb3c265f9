"""A hybrid model trained from scratch on text, on two CPU cores.

    python -m experiments.train --config=configs/train.py --workdir=runs/train
    python -m experiments.train --config=configs/train.py:small --workdir=DIR

The text is the Python standard library's source unless `--config.scratch.path` gives
another. `:small` trains a tenth as long on shorter rows.

Time: 73 s on two CPU cores (measured). Result of that run, 400 steps of 220,272
parameters: 8.41 bits per byte of held-out text before, 2.34 after.
"""

import dataclasses

from ml_collections import ConfigDict, config_dict

from experiments.train_config import ScratchConfig
from hybrid_attn.training.optimizer import OptimizerConfig
from hybrid_attn.training.trainer import TrainConfig

SCRATCH = ScratchConfig(
    model={"slot_bias": 8.0},
    train=TrainConfig(
        steps=400,
        batch=16,
        length=256,
        optimizer=OptimizerConfig(peak_rate=4e-3, warmup=40),
    ),
)


def get_config(size: str = "full") -> ConfigDict:
    """The fields of `experiments.train_config.TrainProgramConfig`, its `scratch`.

    Args:
      size: "full" or "small".
    """
    if size not in ("full", "small"):
        raise ValueError(f"configs/train.py:{size}: expected 'full' or 'small'")
    fields = dataclasses.asdict(SCRATCH)
    fields["pattern"] = config_dict.placeholder(str)
    fields["path"] = config_dict.placeholder(str)
    if size == "small":
        fields["train"] |= {"steps": 60, "batch": 8, "length": 128}
        fields["windows"] = 32
    return ConfigDict({"scratch": fields})
