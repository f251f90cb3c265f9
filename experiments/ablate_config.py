"""What `ablate` is asked to train and measure; checked before anything is trained."""

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from typing import Any

import hybrid_attn as ha
from experiments.ablate_results import BUCKETS, LAYOUTS
from experiments.runner import ConfigError, to_dataclass
from hybrid_attn.sizes import count_parameters, equal_size, spread
from hybrid_attn.training.data import RecallTask, TextData, buckets
from hybrid_attn.training.trainer import TrainConfig

MAX_SPREAD = 0.05
"""Largest difference of parameter counts between variants that is called equal."""

EVALUATION_SEED = 1_000_003
"""Of the recall rows that are evaluated: the same for all, and trained on by none."""

# The program sets these itself, for each variant and task.
_RESERVED = ("name", "pattern", "vocab_size")


@dataclasses.dataclass(frozen=True)
class RecallConfig:
    """Training on recall and its evaluation.

    Attributes:
      task: rows of the layout "offset"; "aligned" is evaluated too.
      train: steps, batch and rates; `length` is not used, `seed` is added to a seed.
      model: fields of ModelConfig that differ from `AblateConfig.model` here.
      rows: rows evaluated on each layout.
      evaluation_batch: rows at once; divides `rows`.
    """

    task: RecallTask = dataclasses.field(default_factory=RecallTask)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: int = 512
    evaluation_batch: int = 64

    def __post_init__(self) -> None:
        if self.task.layout != "offset":
            raise ValueError(f"task.layout={self.task.layout!r}: expected 'offset'")
        if self.rows < 1 or self.evaluation_batch < 1:
            raise ValueError("rows and evaluation_batch must be at least 1")
        if self.rows % self.evaluation_batch:
            raise ValueError(
                f"rows={self.rows} is not a multiple of "
                f"evaluation_batch={self.evaluation_batch}"
            )

    def evaluation_task(self, layout: str) -> RecallTask:
        """The task on a layout."""
        return to_dataclass(
            RecallTask, dataclasses.asdict(self.task) | {"layout": layout}
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text: a file, a directory or a glob; None is the standard library."""

    path: str | None = None


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Training on bytes of text and its evaluation.

    Attributes:
      train: steps, batch, length and rates; `seed` is added to a seed.
      model: fields of ModelConfig that differ from `AblateConfig.model` here.
      windows: held-out windows of `train.length` bytes that are evaluated.
      evaluation_batch: windows at once.
    """

    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    windows: int = 256
    evaluation_batch: int = 8

    def __post_init__(self) -> None:
        if self.windows < 1 or self.evaluation_batch < 1:
            raise ValueError("windows and evaluation_batch must be at least 1")


@dataclasses.dataclass(frozen=True)
class MeasureConfig:
    """What is timed on the text model of the first seed; lengths in tokens.

    Attributes:
      contexts: lengths at which decoding is timed, on a synthetic fill.
      prefill_lengths: lengths at which prefill is timed, on held-out text.
      decode_warmup, decode_steps: steps before and in the median.
      capacity: of the cache whose bytes are counted.
    """

    contexts: tuple[int, ...] = (1024, 8192, 65536)
    prefill_lengths: tuple[int, ...] = (1024, 4096)
    decode_warmup: int = 5
    decode_steps: int = 40
    capacity: int = 65536

    def __post_init__(self) -> None:
        for name in ("contexts", "prefill_lengths"):
            lengths = getattr(self, name)
            if not lengths or min(lengths) < 1:
                raise ValueError(f"{name}={lengths}: expected lengths from 1")
        if self.decode_steps < 1 or self.decode_warmup < 1 or self.capacity < 1:
            raise ValueError(
                "decode_warmup, decode_steps and capacity must be at least 1"
            )


@dataclasses.dataclass(frozen=True)
class AblateConfig:
    """The ablation.

    Attributes:
      variants: names of those to train, in their order.
      patterns: name -> layer pattern (`hybrid_attn.pattern`).
      model: fields of ModelConfig that all variants share; `feed_forward_size` is
        that of the largest variant, the others are widened to its parameter count.
      seeds: number of seeds, 0..seeds-1.
      save_every: training steps between checkpoints.
      log_every: training steps between lines of metrics.jsonl.

    Raises:
      ConfigError: a variant without a pattern, an unknown kind of layer or field, more
        than `MAX_SPREAD` between parameter counts, text that is too short, or too few
        recall rows for a distance class.
    """

    variants: tuple[str, ...]
    patterns: dict[str, str]
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    recall: RecallConfig = dataclasses.field(default_factory=RecallConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    measure: MeasureConfig = dataclasses.field(default_factory=MeasureConfig)
    seeds: int = 1
    save_every: int = 200
    log_every: int = 20

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.save_every < 1 or self.log_every < 1:
            raise ConfigError("config: seeds, save_every, log_every: expected from 1")
        if not self.variants or len(set(self.variants)) < len(self.variants):
            raise ConfigError(
                f"config.variants={self.variants}: expected different names"
            )
        for name in self.variants:
            if name not in self.patterns:
                raise ConfigError(_unknown_variant(name, self.patterns))
        for models in (self.recall_models, self.text_models):
            check_equal_size(models)
        self._check_distances()
        self._check_text()

    @functools.cached_property
    def recall_models(self) -> dict[str, ha.ModelConfig]:
        """The models trained on recall, by variant, at equal size."""
        return self._models("recall", self.recall.model, self.recall.task.vocab)

    @functools.cached_property
    def text_models(self) -> dict[str, ha.ModelConfig]:
        """The models trained on text, by variant, at equal size."""
        return self._models("text", self.text.model, 256)

    @functools.cached_property
    def layers(self) -> int:
        """Layers of the deepest variant: its windows reach farthest."""
        return max(len(model.layers) for model in self.recall_models.values())

    @property
    def window(self) -> int:
        """W, tokens."""
        return self._any_recall_model.window

    @property
    def token_shift(self) -> int:
        """Tokens that a key looks back by itself, 0 or 1."""
        return int(self._any_recall_model.token_shift)

    @property
    def reach(self) -> int:
        """Tokens over which a stack of windows carries information in any variant."""
        return self.layers * (self.window - 1 + self.token_shift)

    @property
    def text_data(self) -> TextData:
        """The text, read once in a process."""
        return load_text(self.data.path)

    @property
    def _any_recall_model(self) -> ha.ModelConfig:
        return self.recall_models[self.variants[0]]

    def _models(
        self, task: str, changes: Mapping[str, Any], vocab: int
    ) -> dict[str, ha.ModelConfig]:
        for where, fields in (("model", self.model), (f"{task}.model", changes)):
            for key in fields:
                if key in _RESERVED:
                    raise ConfigError(f"config.{where}.{key} is set by the program")
        shared = {**self.model, **changes, "vocab_size": vocab}
        models = {}
        for name in self.variants:
            fields = {"name": f"{name}_{task}", "pattern": self.patterns[name]}
            models[name] = to_dataclass(
                ha.ModelConfig, shared | fields, f"config.model, variant {name}"
            )
            try:
                count_parameters(models[name])
            except ValueError as error:
                raise ConfigError(
                    f"config.patterns.{name}={self.patterns[name]!r}: {error}"
                ) from error
        return equal_size(models)

    def _check_distances(self) -> None:
        for layout in LAYOUTS:
            task = self.recall.evaluation_task(layout)
            distance = task.batch(EVALUATION_SEED, 0, self.recall.rows).distance
            masks = buckets(
                distance, self.window, self.layers, token_shift=self.token_shift
            )
            empty = [name for name in BUCKETS if not masks[name].any()]
            if empty:
                raise ConfigError(
                    f"config.recall: {self.recall.rows} rows of the layout "
                    f"{layout!r} have no query {' and none '.join(empty)} (window "
                    f"{self.window}, reach {self.reach}): take more rows, a longer "
                    "task or a smaller window"
                )

    def _check_text(self) -> None:
        data, length = self.text_data, self.text.train.length
        longest = max(self.measure.prefill_lengths)
        for split, held, needed in (
            ("train", len(data.train_bytes), length + 1),
            ("held-out", len(data.heldout_bytes), max(length + 1, longest)),
        ):
            if held < needed:
                raise ConfigError(
                    f"config.data.path: the {split} split has {held} bytes, fewer than "
                    f"the {needed} that training and measuring need"
                )


def check_equal_size(models: Mapping[str, ha.ModelConfig]) -> None:
    """Raises: ConfigError naming both, if two variants differ by over `MAX_SPREAD`."""
    counts = {name: count_parameters(model) for name, model in models.items()}
    share, least, most = spread(counts)
    if share > MAX_SPREAD:
        raise ConfigError(
            f"{most} has {counts[most]:,} parameters and {least} {counts[least]:,}, "
            f"{100 * share:.1f} % apart; at most {100 * MAX_SPREAD:.0f} % is fair"
        )


@functools.lru_cache(maxsize=2)
def load_text(path: str | None) -> TextData:
    """`TextData` of a path."""
    return TextData(path)


def _unknown_variant(name: str, patterns: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(name, patterns, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"config.variants: unknown variant {name!r}, config.patterns has "
        f"{', '.join(patterns) or 'none'}{hint}"
    )
