"""A pretrained dense model converted layer by layer, without training.

    python -m experiments.convert --config=configs/convert.py --workdir=DIR
        [--config.model=FILE.gguf or a directory] [--config.window=256]
        [--config.variants.swa.pattern="swa*30"] [--overwrite]

Run it again with the same directory after a kill: finished windows and haystacks are
not read again.

Stages of the directory: VARIANT.text.I and VARIANT.needle.LENGTH.TRIAL hold what was
measured, VARIANT.cache the bytes, VARIANT.saved where it was written, process.N the
seconds of each process. summary.json has, for each variant: ``V.perplexity`` (of a
token), ``V.recall`` (share of needles), ``V.answer_nats`` (of a token of the needles'
answers), ``V.cache_bytes`` (of a row at the longest context, float32, without undo),
``V.bytes_per_token``, ``V.cache_share`` and ``V.perplexity_ratio`` (of the
original's), ``V.pattern``; and ``context``, ``model``, ``original`` (the variant of
dense layers), ``variants`` (all names, the largest cache first),
``total_seconds`` (of all processes, without imports).
"""

import time
from typing import Any

import numpy as np

import hybrid_attn as ha
from experiments import runner
from experiments.convert_config import ConvertConfig, ConvertSettings, Variant
from experiments.convert_report import write_report
from experiments.evaluate import Stages
from experiments.evaluate_tasks import evaluate_model
from hybrid_attn import weights
from hybrid_attn.training.data import TextData

# Expected seconds on two cores, for the bar alone: of compiling, and of a token.
_COMPILE, _TOKEN = 25.0, 2.6e-3


class VariantStages(Stages):
    """The stages of one variant, under its name."""

    def __init__(self, workdir: runner.Workdir, variant: str):
        super().__init__(workdir)
        self._variant = variant

    def _named(self, name: object) -> str:
        return f"{self._variant}.{name}"

    def __contains__(self, name: object) -> bool:
        return self._workdir.is_done(self._named(name))

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._workdir.result(self._named(name))

    def __setitem__(self, name: str, result: dict[str, Any]) -> None:
        task, _, number = name.partition(".")
        self._record(self._named(task), number, result)
        self._workdir.mark_done(self._named(name), result)


def main(config: ConvertConfig, workdir: runner.Workdir) -> None:
    """Measures what the directory lacks, then writes report, figure and summary."""
    begin = time.monotonic()
    source, tokenizer = load_source(config, "config.model")
    print(f"{source[0].name}: {len(config.variants)} variants of {source[0].pattern}")
    if workdir.resumed:
        print(f"Going on with the run in {workdir.path}.")
    keys: dict[str, Any] = {}
    calibration = calibrate(config, tokenizer)
    try:
        with runner.Progress(_plan(config)) as progress:
            for name, variant in config.variants.items():
                if _is_done(config, workdir, name):
                    measured = _measured(config, workdir, name)
                    progress.skip(name)
                else:
                    progress.start(name)
                    measured = _measure(
                        config, workdir, name, variant, source, tokenizer,
                        calibration, progress,
                    )  # fmt: skip
                    progress.finish()
                keys |= {f"{name}.{key}": value for key, value in measured.items()}
    finally:
        seconds = workdir.add_seconds(time.monotonic() - begin)
    keys = _compared(config, keys) | {
        "context": config.context,
        "model": source[0].name,
        "original": config.original,
        "variants": sorted(
            config.variants, key=lambda name: -keys[f"{name}.cache_bytes"]
        ),
        "total_seconds": seconds,
    }
    workdir.write_summary(keys)
    written = write_report(workdir.path)
    rows = [
        [
            name,
            f"{keys[f'{name}.bytes_per_token']:,.0f}",
            f"{keys[f'{name}.perplexity']:.3f}",
            f"{keys[f'{name}.recall']:.2f}",
        ]
        for name in keys["variants"]
    ]
    columns = ["variant", "bytes/token", "perplexity", "recall"]
    runner.print_table(f"Without training, at {config.context} tokens", columns, rows)
    print(f"{seconds:.0f} s in all. Report: {written}")


def load_source(
    config: ConvertSettings, key: str
) -> tuple[tuple[ha.ModelConfig, ha.Model], Any]:
    """((config, model), tokenizer) of the model to convert.

    Raises:
      ConfigError: it cannot be read, by the ``key`` of the config that names it.
    """
    path = config.model_path
    try:
        return weights.load(path), weights.load_tokenizer(path)
    except (ModuleNotFoundError, ValueError) as error:
        raise runner.ConfigError(f"{key}: {error}") from error


def convert_variant(
    config: ConvertSettings,
    name: str,
    variant: Variant,
    source: tuple[ha.ModelConfig, ha.Model],
    calibration: np.ndarray,
) -> tuple[ha.ModelConfig, ha.Model]:
    """A variant of the model, with the program's window and top k by default.

    Raises:
      ConfigError: the variant cannot be made, by its name.
    """
    try:
        return weights.convert(
            source[0],
            source[1],
            variant.pattern,
            window=variant.window or config.window,
            top_k=variant.top_k or config.top_k,
            sinks=variant.sinks,
            entries=variant.entries,
            calibration=calibration,
        )
    except ValueError as error:
        raise runner.ConfigError(f"config.variants.{name}: {error}") from error


def _measure(
    config, workdir, name, variant, source, tokenizer, calibration, progress
) -> dict[str, Any]:
    """Converts, counts, reads the texts and the haystacks; returns `_measured`."""
    new_config, model = convert_variant(config, name, variant, source, calibration)
    count_cache(config, workdir, name, new_config)
    if name in config.save:
        workdir.mark_done(f"{name}.saved", _save(workdir, name, new_config, model))
    measure(
        config, new_config, model, tokenizer, VariantStages(workdir, name), progress
    )
    return _measured(config, workdir, name)


def count_cache(
    config: ConvertSettings, workdir: runner.Workdir, name: str, model: ha.ModelConfig
) -> None:
    """Stores the cache bytes of a row at the longest context, as ``name``.cache."""
    ledger = ha.cache_bytes(ha.init_cache(model, 1, config.context, undo=0))
    workdir.mark_done(
        f"{name}.cache",
        {
            "bytes": ledger.total,
            "per_token": ledger.per_token,
            "capacity": ledger.capacity,
            "by_state": dict(ledger.by_state),
        },
    )


def measure(
    config: ConvertSettings,
    model_config: ha.ModelConfig,
    model: ha.Model,
    tokenizer: Any,
    stages: VariantStages,
    progress: runner.Progress,
) -> None:
    """Reads the texts and the haystacks that the stages lack."""
    # Windows and haystacks by what they read.
    text, total = tokens_read(config)[0], sum(tokens_read(config))
    shares = {"text": (0.0, text / total), "needle": (text / total, 1 - text / total)}

    def report(task: str, share: float, note: str) -> None:
        first, part = shares[task]
        progress.update(first + part * share, note)

    evaluate_model(
        model_config,
        model,
        tokenizer,
        config.settings,
        results=stages,
        report=report,
    )


def _save(workdir: runner.Workdir, name: str, config, model) -> dict[str, Any]:
    """Where the variant was written, or why no family of checkpoints has its form."""
    directory = workdir.file(f"models/{name}")
    try:
        weights.save(directory, config, model)
    except ValueError as error:
        print(f"{name} is not saved: {error}")
        return {"refused": str(error)}
    return {"directory": f"models/{name}"}


def quality_stages(config: ConvertSettings, name: str) -> list[str]:
    """Names of the stages that `quality` reads."""
    needle = config.needle
    return [
        *(f"{name}.text.{i}" for i in range(config.text.windows)),
        *(
            f"{name}.needle.{length}.{trial}"
            for length in needle.lengths
            for trial in range(needle.trials)
        ),
    ]


def _stage_names(config: ConvertConfig, name: str) -> list[str]:
    return [
        *quality_stages(config, name),
        f"{name}.cache",
        *([f"{name}.saved"] if name in config.save else []),
    ]


def _is_done(config: ConvertConfig, workdir: runner.Workdir, name: str) -> bool:
    return all(workdir.is_done(stage) for stage in _stage_names(config, name))


def _measured(config: ConvertConfig, workdir: runner.Workdir, name: str):
    """The keys of one variant, from its stages."""
    stages = VariantStages(workdir, name)
    cache = stages["cache"]
    return quality(config, stages) | {
        "cache_bytes": cache["bytes"],
        "bytes_per_token": cache["per_token"],
        "pattern": config.variants[name].pattern,
    }


def quality(config: ConvertSettings, stages: VariantStages) -> dict[str, float]:
    """``perplexity``, ``recall`` and ``answer_nats`` of finished stages."""
    windows = [stages[f"text.{i}"] for i in range(config.text.windows)]
    nats = sum(w["nats"] for w in windows) / sum(w["tokens"] for w in windows)
    asked = [
        row
        for length in config.needle.lengths
        for trial in range(config.needle.trials)
        for row in stages[f"needle.{length}.{trial}"]["asked"]
    ]
    return {
        "perplexity": float(np.exp(nats)),
        "recall": float(np.mean([row["found"] for row in asked])),
        "answer_nats": float(np.mean([row["nats"] for row in asked])),
    }


def _compared(config: ConvertConfig, keys: dict[str, Any]) -> dict[str, Any]:
    for name in config.variants:
        for of, to in (
            ("cache_bytes", "cache_share"),
            ("perplexity", "perplexity_ratio"),
        ):
            keys[f"{name}.{to}"] = (
                keys[f"{name}.{of}"] / keys[f"{config.original}.{of}"]
            )
    return keys


def calibrate(config: ConvertSettings, tokenizer) -> np.ndarray:
    """int32[texts, length] from files that are not held out."""
    try:
        data = TextData(config.text.path).train_bytes
    except (OSError, ValueError) as error:
        raise runner.ConfigError(f"config.text.path: {error}") from error
    texts, length = config.calibration_texts, config.calibration_length
    rows = [
        token_row(data, i * len(data) // texts, length, tokenizer) for i in range(texts)
    ]
    return np.stack(rows)


def token_row(data: np.ndarray, first: int, length: int, tokenizer) -> np.ndarray:
    """int32[length], the tokens of the bytes from ``first`` on.

    Raises:
      ConfigError: the bytes end before that.
    """
    # No token is longer than 16 bytes on average.
    text = data[first : first + 16 * length].tobytes().decode("utf-8", "ignore")
    ids = tokenizer.encode(text.replace("\0", "\n\n")).ids
    if len(ids) < length:
        raise runner.ConfigError(
            f"config.text: the text from byte {first} of the files that are not held "
            f"out has {len(ids)} tokens, fewer than {length}"
        )
    return np.array(ids[:length], np.int32)


def tokens_read(config: ConvertSettings) -> tuple[float, float]:
    """Tokens that one variant reads of texts and of haystacks."""
    needle = config.needle
    read = sum(1 - depth for depth in needle.depths) + max(needle.depths)
    return (
        config.text.windows * config.text.length,
        needle.trials * read * sum(needle.lengths),
    )


def _plan(config: ConvertConfig) -> dict[str, float]:
    """Expected seconds of every variant."""
    seconds = _COMPILE + _TOKEN * sum(tokens_read(config))
    return dict.fromkeys(config.variants, seconds)


if __name__ == "__main__":
    runner.define_flags("configs/convert.py")
    runner.run("convert", ConvertConfig, main)
