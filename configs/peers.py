"""hybrid_attn beside the eager PyTorch DeepSeek-V4 of transformers 5.24.

    python -m experiments.peers --workdir=runs/peers

About six minutes on two idle CPU cores, besides making the PyTorch environment at
first use. Writes peers.prefill_ratio_8k, peers.decode_ratio_8k,
peers.decode_growth_4k_256k (ours alone) and the figures that
they are made of to summary.json.
"""

import dataclasses

from ml_collections import ConfigDict

from experiments.peers.config import Config


def get_config() -> ConfigDict:
    """The defaults of `experiments.peers.config.Config`."""
    return ConfigDict(dataclasses.asdict(Config()))
