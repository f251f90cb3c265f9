"""What `train` is asked to train: from scratch, or against a dense teacher."""

import dataclasses
from typing import Any

import hybrid_attn as ha
from experiments.convert_config import ConvertSettings, Variant, default_variants
from experiments.runner import ConfigError, to_dataclass
from hybrid_attn.pattern import parse_pattern
from hybrid_attn.sizes import count_parameters
from hybrid_attn.training.distillation import DistillConfig
from hybrid_attn.training.trainer import TrainConfig

# The program sets these itself.
_RESERVED = ("name", "pattern", "vocab_size")


@dataclasses.dataclass(frozen=True)
class ScratchConfig:
    """A model trained from scratch on bytes of text.

    Attributes:
      preset: a name of `hybrid_attn.presets`.
      pattern: layers in place of the preset's; None keeps them.
      model: fields of ModelConfig that differ from the preset's.
      train: steps, batch, length and rates.
      path: a file, a directory or a glob; None is the standard library's source.
      windows: held-out windows of `train.length` bytes that are evaluated.
      evaluation_batch: windows at once.
      save_every, log_every: steps between checkpoints, and lines of metrics.jsonl.
    """

    preset: str = "tiny_hybrid"
    pattern: str | None = None
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    path: str | None = None
    windows: int = 256
    evaluation_batch: int = 8
    save_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        counts = (self.windows, self.evaluation_batch, self.save_every, self.log_every)
        if min(counts) < 1:
            raise ValueError(
                "windows, evaluation_batch, save_every and log_every are "
                f"{counts}: expected whole numbers from 1"
            )
        wrong = [key for key in self.model if key in _RESERVED]
        if wrong:
            raise ValueError(f"model.{wrong[0]} is set by the program")
        count_parameters(self.model_config)

    @property
    def model_config(self) -> ha.ModelConfig:
        """The model: the preset with the changes, over bytes."""
        preset = ha.presets.get(self.preset)
        fields = {f.name: getattr(preset, f.name) for f in dataclasses.fields(preset)}
        fields |= {**self.model, "vocab_size": 256, "name": f"{self.preset}_text"}
        if self.pattern is not None:
            fields["pattern"] = self.pattern
        # Nested configs of a preset are dataclasses already.
        plain = {
            key: dataclasses.asdict(value)
            if dataclasses.is_dataclass(value) and not isinstance(value, type)
            else value
            for key, value in fields.items()
        }
        return to_dataclass(ha.ModelConfig, plain, "config.scratch.model")


def pooled_variants() -> dict[str, Variant]:
    """The original, windows alone as the control, and what pools or routes."""
    names = ("dense", "dense12_swa", "dense12_hca8", "dense8_hca4", "dense8_csa4")
    variants = default_variants()
    return {name: variants[name] for name in names}


@dataclasses.dataclass(frozen=True)
class DistillationConfig(ConvertSettings):
    """Conversions of a model, each then distilled; texts and needles before and after.

    Attributes:
      distill: steps, what is trained, and rates.
      rows, length: texts of a step and their tokens, from the files not held out.
      probes: batches that no step trains on, on which the loss is measured before
        and after.
      save_every: steps between checkpoints.
    """

    variants: dict[str, Variant] = dataclasses.field(default_factory=pooled_variants)
    distill: DistillConfig = dataclasses.field(
        default_factory=lambda: DistillConfig(steps=32)
    )
    rows: int = 1
    length: int = 1024
    probes: int = 2
    save_every: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = (self.rows, self.length, self.probes, self.save_every)
        if min(counts) < 1:
            raise ValueError(
                f"rows, length, probes and save_every are {counts}: expected whole "
                "numbers from 1"
            )
        windows = {
            name: variant.window or self.window
            for name, variant in self.variants.items()
            if name != self.original
        }
        long = [name for name, window in windows.items() if window >= self.length]
        if long:
            raise ValueError(
                f"length={self.length} lies within the window of {long[0]}: nothing "
                "would be read but the window"
            )
        if not windows:
            raise ValueError("variants: expected one to distill beside the original")
        for name in windows:
            if not _parts(self.variants[name]) & set(self.distill.parts):
                raise ValueError(
                    f"variants.{name} has none of distill.parts={self.distill.parts}: "
                    "there is nothing to train"
                )


def _parts(variant: Variant) -> set[str]:
    """What distillation may train in the layers of a variant."""
    kinds = {kind for kind, _ in parse_pattern(variant.pattern)}
    parts = {"none": set(), "logit": {"sink"}, "key": {"sink_key"}}[variant.sinks]
    if kinds & {"hca", "csa"}:
        parts |= {"compressor"}
    return parts | ({"indexer"} if "csa" in kinds else set())


@dataclasses.dataclass(frozen=True)
class TrainProgramConfig:
    """The program's config: one of the two.

    Raises:
      ConfigError: both, or neither.
    """

    scratch: ScratchConfig | None = None
    distill: DistillationConfig | None = None

    def __post_init__(self) -> None:
        if (self.scratch is None) == (self.distill is None):
            raise ConfigError(
                "config: expected one of config.scratch (configs/train.py) and "
                "config.distill (configs/distill.py)"
            )
