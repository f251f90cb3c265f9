"""What `convert` is asked to convert and to measure."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from ml_collections import config_dict

from experiments.evaluate_config import (
    EvaluateConfig,
    EvaluateSettings,
    GenerateSettings,
    NeedleSettings,
    TextSettings,
)
from hybrid_attn.pattern import parse_pattern


@dataclasses.dataclass(frozen=True)
class Variant:
    """One conversion of the model.

    Attributes:
      pattern: a layer pattern, such as "dense*10,hca:8*20".
      sinks, entries: as in `hybrid_attn.weights.convert`.
      window, top_k: None takes the program's.
    """

    pattern: str
    sinks: Literal["none", "logit", "key"] = "key"
    entries: Literal["once", "plain"] = "once"
    window: int | None = None
    top_k: int | None = None


def beside(dense: tuple[int, ...], kind: str, layers: int = 30) -> str:
    """The pattern with layers ``dense`` kept and all others of ``kind``."""
    return ",".join("dense" if i in dense else kind for i in range(layers))


# SmolLM2's layers whose heads look back at a needle, the most attentive first: by the
# greatest mass that one head gives to the number, on haystacks of 1024 tokens.
_LOOK_BACK = (18, 20, 14, 21, 17, 7, 8, 15, 23, 6, 19, 22)
_EIGHT, _TWELVE = _LOOK_BACK[:8], _LOOK_BACK


def default_variants() -> dict[str, Variant]:
    """SmolLM2's patterns."""
    return {
        "dense": Variant("dense*30"),
        "swa": Variant("swa*30"),
        "dense12_swa_no_sink": Variant(beside(_TWELVE, "swa"), sinks="none"),
        "dense12_swa_sink_logit": Variant(beside(_TWELVE, "swa"), sinks="logit"),
        "dense12_swa": Variant(beside(_TWELVE, "swa")),
        "dense8_swa": Variant(beside(_EIGHT, "swa")),
        "dense10_swa_every_third": Variant("(dense,swa*2)*10"),
        "dense12_hca8": Variant(beside(_TWELVE, "hca:8")),
        "dense8_hca4": Variant(beside(_EIGHT, "hca:4")),
        "dense8_csa4": Variant(beside(_EIGHT, "csa:4")),
        "hca2": Variant("hca:2*30"),
        "hca2_plain": Variant("hca:2*30", entries="plain"),
        "csa2": Variant("csa:2*30"),
    }


@dataclasses.dataclass(frozen=True)
class ConvertSettings:
    """Which conversions of which model, and what is measured on them.

    Attributes:
      model: as in `EvaluateConfig`.
      variants: by name; one has `dense` layers alone, and the others are compared
        with it.
      window, top_k: of every variant that does not say otherwise.
      text, needle, chunk, seed: as in `EvaluateSettings`. Cache bytes are those of
        the longest context among them.
      calibration_texts, calibration_length: texts from the files that are not held
        out, for the sinks.
    """

    model: str | None = None
    variants: dict[str, Variant] = dataclasses.field(default_factory=default_variants)
    window: int = 128
    top_k: int = 64
    text: TextSettings = dataclasses.field(
        default_factory=lambda: TextSettings(windows=2, length=2048)
    )
    needle: NeedleSettings = dataclasses.field(
        default_factory=lambda: NeedleSettings(
            lengths=(2048,), depths=(0.1, 0.5, 0.8), trials=2
        )
    )
    chunk: int = 256
    seed: int = 0
    calibration_texts: int = 4
    calibration_length: int = 512

    def __post_init__(self) -> None:
        dense = [name for name in self.variants if self._is_dense(name)]
        if len(dense) != 1:
            raise ValueError(
                f"variants {dense} have dense layers alone: expected one, the original"
            )
        if not (self.text.windows and self.needle.lengths):
            raise ValueError("text.windows and needle.lengths: expected both tasks")
        if self.calibration_texts < 1 or self.calibration_length < 1:
            raise ValueError(
                f"calibration_texts={self.calibration_texts}, calibration_length="
                f"{self.calibration_length}: expected whole numbers from 1"
            )

    def _is_dense(self, name: str) -> bool:
        pattern = parse_pattern(self.variants[name].pattern)
        return all(kind == "dense" for kind, _ in pattern)

    @property
    def original(self) -> str:
        """The variant that the others are compared with."""
        return next(name for name in self.variants if self._is_dense(name))

    @property
    def model_path(self) -> Path:
        """Where the model lies; `ConfigError` if nowhere."""
        return EvaluateConfig(model=self.model).model_path

    @property
    def settings(self) -> EvaluateSettings:
        """What is measured on each variant."""
        return EvaluateSettings(
            text=self.text,
            needle=self.needle,
            generate=GenerateSettings(tokens=0),
            chunk=self.chunk,
            seed=self.seed,
        )

    @property
    def context(self) -> int:
        """The longest context that is evaluated, tokens."""
        return max(self.text.length, *self.needle.lengths)


def config_fields(
    settings: ConvertSettings, names: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The fields for a config file, with places for what is None.

    Args:
      names: of variants: these alone, on one short text and one short haystack.
    """
    fields = dataclasses.asdict(settings)
    fields["model"] = config_dict.placeholder(str)
    fields["text"]["path"] = config_dict.placeholder(str)
    for variant in fields["variants"].values():
        variant["window"] = config_dict.placeholder(int)
        variant["top_k"] = config_dict.placeholder(int)
    if names:
        fields["variants"] = {name: fields["variants"][name] for name in names}
        fields["text"] |= {"windows": 1, "length": 512}
        fields["needle"] |= {"lengths": (512,), "depths": (0.5,), "trials": 1}
    return fields


@dataclasses.dataclass(frozen=True)
class ConvertConfig(ConvertSettings):
    """The program's config.

    Attributes:
      save: names of variants to write into models/ of the directory, for
        `hybrid_attn.weights.load`. A form that no family has is reported instead.
    """

    save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = sorted(set(self.save) - set(self.variants))
        if unknown:
            raise ValueError(f"save names {unknown}: expected some of variants")
