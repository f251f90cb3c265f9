"""Trains a model on text, or a converted one against the dense model it came from.

    python -m experiments.train --config=configs/train.py --workdir=DIR
        [--config.scratch.pattern="swa*2,csa"] [--config.scratch.train.steps=300]
    python -m experiments.train --config=configs/distill.py --workdir=DIR
        [--config.distill.model=FILE.gguf or a directory]
        [--config.distill.distill.steps=100] [--overwrite]

Run it again with the same directory after a kill: what is measured is not measured
again, and an unfinished training goes on from its last checkpoint to the same bits.

From scratch. Stages of the directory: before, train and after. summary.json has
``before.bits_per_byte`` and ``after.bits_per_byte`` (of held-out text),
``bits_per_byte_gain`` (after over before), ``loss_first`` and ``loss_last`` (nats a
byte, of the first and last line of the metrics), ``steps``, ``parameters``, ``model``,
``pattern``, ``text_bytes`` and ``total_seconds``.

Distilled. Stages: V.before.*, V.after.* (and V.* of the original) hold what was
measured as in `experiments.convert`, V.train the losses. summary.json has for each
variant ``V.before.perplexity``, ``V.after.perplexity``, ``V.perplexity_gain`` (after
over before: below 1 is better), the same of ``recall`` (a difference:
``V.recall_gain``) and of ``answer_nats`` (after over before: ``V.answer_nats_gain``),
``V.loss_first``, ``V.loss_last`` (of a layer, on texts that no step trains on, before
and after), ``V.output_error_first`` and ``_last``, ``V.indexer_loss_first`` and
``_last`` where an indexer chooses, ``V.steps``, ``V.trained_parameters``,
``V.bytes_per_token``, ``V.cache_share`` and ``V.pattern``; of the original D
``D.perplexity``, ``D.recall``, ``D.answer_nats``, ``D.bytes_per_token``; and
``original``, ``variants`` (those distilled), ``model``, ``context`` and
``total_seconds`` (of all processes, without imports).
"""

from absl import logging

from experiments import runner
from experiments.train_config import TrainProgramConfig
from experiments.train_distill import distill
from experiments.train_scratch import scratch


def main(config: TrainProgramConfig, workdir: runner.Workdir) -> None:
    """Trains and measures what the directory lacks, then writes the report."""
    # Orbax reports every save in a dozen lines.
    logging.set_verbosity(logging.WARNING)
    if workdir.resumed:
        print(f"Going on with the run in {workdir.path}.")
    if config.distill is not None:
        distill(config.distill, workdir)
    elif config.scratch is not None:
        scratch(config.scratch, workdir)


if __name__ == "__main__":
    runner.define_flags("configs/train.py")
    runner.run("train", TrainProgramConfig, main)
