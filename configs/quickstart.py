"""Five attention modes at equal size, trained and measured on two CPU cores.

    make quickstart
    python -m experiments.ablate --config=configs/quickstart.py --workdir=DIR

Time: 598 s on two idle CPU cores with one seed (measured); --config.seeds=3 takes three
times the training. Result of that run: recall beyond reach 1.00 dense, 0.03 swa, 0.58
hca, 0.94 csa, 0.99 hybrid; bits per byte 3.01, 2.31, 2.42, 2.52, 2.35; the hybrid's
cache has 0.17 × dense's bytes.
"""

import dataclasses

from ml_collections import ConfigDict, config_dict

from experiments.ablate_config import MeasureConfig, RecallConfig, TextConfig
from hybrid_attn.training.data import RecallTask
from hybrid_attn.training.optimizer import OptimizerConfig
from hybrid_attn.training.trainer import TrainConfig

VARIANTS = {
    "dense": "dense*2",
    "swa": "swa*2",
    "hca": "hca*2",
    "csa": "csa*2",
    "hybrid": "hca,swa,csa",
}

MODEL = {
    "hidden_size": 64,
    "feed_forward_size": 128,  # of the largest variant; the others are widened
    "heads": 4,
    "head_dim": 16,
    "kv_heads": 4,
    "dense_kv_heads": 4,
    "shared_kv": False,
    "token_shift": True,
    "window": 8,
    "decay": "learned",
    "csa_ratio": 4,
    "hca_ratio": 16,
    "slot_bias": 8.0,
    "top_k": 8,
    "index_heads": 4,
    "index_dim": 16,
    "rope_dims": 8,
}

RECALL_OPTIMIZER = OptimizerConfig(peak_rate=6e-3, warmup=40, beta2=0.98)
TEXT_OPTIMIZER = OptimizerConfig(peak_rate=4e-3, warmup=40, beta2=0.98)

RECALL = RecallConfig(
    task=RecallTask(
        vocab=64, pairs=8, queries=8, near_queries=6, near_window=8, length=80
    ),
    train=TrainConfig(steps=2000, batch=16, optimizer=RECALL_OPTIMIZER),
    model={},
    rows=512,
)

TEXT = TextConfig(
    train=TrainConfig(steps=400, batch=16, length=256, optimizer=TEXT_OPTIMIZER),
    model={},
    windows=512,
)

MEASURE = MeasureConfig(
    contexts=(1024, 8192, 65536), prefill_lengths=(1024, 4096), decode_steps=40
)


def get_config() -> ConfigDict:
    """The fields of `experiments.ablate_config.AblateConfig`, each one settable."""
    return ConfigDict(
        {
            "variants": tuple(VARIANTS),
            "patterns": VARIANTS,
            "model": MODEL,
            "recall": dataclasses.asdict(RECALL),
            "data": {"path": config_dict.placeholder(str)},
            "text": dataclasses.asdict(TEXT),
            "measure": dataclasses.asdict(MEASURE),
            "seeds": 1,
            "save_every": 200,
            "log_every": 20,
        }
    )
