"""`load` and `save`: one tensor at a time, between files and a model."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybrid_attn.config import ModelConfig
from hybrid_attn.model import Model
from hybrid_attn.weights import (
    config_deepseek_v4,
    config_llama,
    names_deepseek_v4,
    names_llama,
)
from hybrid_attn.weights.dequantize import dequantize
from hybrid_attn.weights.files import (
    NAMES,
    Outgoing,
    Stored,
    WeightsError,
    listed,
    read_headers,
    write_files,
)
from hybrid_attn.weights.gguf_files import read_gguf
from hybrid_attn.weights.mapping import LAYOUTS, Entry, Piece, layout_of


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of checkpoints.

    Attributes:
      from_json, to_json: its config.json.
      entries: every parameter of a model and the tensors it is made of.
      ignored: (config) -> patterns of names that are no part of the model.
    """

    from_json: Callable[[dict[str, Any]], ModelConfig]
    to_json: Callable[[ModelConfig], dict[str, Any]]
    entries: Callable[[ModelConfig], Iterator[Entry]]
    ignored: Callable[[ModelConfig], tuple[str, ...]]


FAMILIES = {
    "deepseek_v4": Family(
        config_deepseek_v4.from_json,
        config_deepseek_v4.to_json,
        names_deepseek_v4.entries,
        lambda config: names_deepseek_v4.IGNORED,
    ),
    "llama": Family(
        config_llama.from_json,
        config_llama.to_json,
        names_llama.entries,
        names_llama.ignored,
    ),
}


def load(path: str | Path) -> tuple[ModelConfig, Model]:
    """Reads a Hugging Face directory (DeepSeek-V4, Llama) or a .gguf file (Llama).

    A directory holds config.json and safetensors, single or sharded. Numbers keep the
    dtype they are stored in; block-scaled FP8 and FP4 become bfloat16 (exact where
    scales are powers of two), the quantised types of GGUF float32. At any time memory
    holds the model and one tensor.

    Returns:
      (config, model).

    Raises:
      ValueError: a config field that is missing or not supported, by name; tensors
        that are missing, too many or of the wrong shape, by name; a damaged file, by
        name.
      ModuleNotFoundError: a quantised .gguf file without the package `gguf`.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        fields, stored = read_gguf(path)
        config = config_llama.from_gguf(fields, stored, str(path))
        try:
            model = _read(config, stored, names_llama.gguf_entries, ())
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error
        return config, model
    if not path.is_dir():
        raise WeightsError(
            f"{path}: expected a directory with config.json or a .gguf file"
        )
    values = _read_json(path / "config.json")
    family = FAMILIES.get(values.get("model_type", ""))
    if family is None:
        raise WeightsError(
            f"config.json: model_type={values.get('model_type')!r}: expected one of "
            f"{', '.join(FAMILIES)}"
        )
    config = family.from_json(values)
    stored = read_headers(path)
    return config, _read(config, stored, family.entries, family.ignored(config))


def _read(
    config: ModelConfig,
    stored: Mapping[str, Stored],
    entries: Callable[[ModelConfig], Iterator[Entry]],
    ignored: tuple[str, ...],
) -> Model:
    """The model of the stored tensors, read one by one."""
    model = nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0)))
    for source in _match(list(entries(config)), model, stored, ignored):
        value = source.read()
        if source.entry.layout == "table" and config.moe is not None:
            _check_table(source.tensors[0].name, value, config.moe.experts)
        _variable(model, source.entry.path).set_value(value)
    return model


def _check_table(name: str, table, experts: int) -> None:
    least, most = int(table.min()), int(table.max())
    if least < 0 or most >= experts:
        raise WeightsError(
            f"{name} names experts {least}..{most}; the model has 0..{experts - 1}"
        )


def save(
    path: str | Path, config: ModelConfig, model: Model, *, shard_bytes: int = 5 << 30
) -> None:
    """Writes config.json and safetensors in Hugging Face's names.

    A model with experts or several residual streams is written as DeepSeek-V4, any
    other as Llama.

    Args:
      path: a directory; made if it is not there. Files named model*.safetensors* in it
        are replaced.
      config, model: a model that one of the families can express.
      shard_bytes: above this size the tensors go into several files with an index.

    Raises:
      ValueError: names the field of the config that no family has.
    """
    directory = Path(path)
    # Each family says what it lacks; only DeepSeek-V4 has experts and streams.
    mixed = config.moe is not None or config.hyper is not None
    family = FAMILIES["deepseek_v4" if mixed else "llama"]
    values = family.to_json(config)
    directory.mkdir(parents=True, exist_ok=True)
    write_files(directory, _outgoing(family.entries(config), model), shard_bytes)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: not a readable config.json ({error})") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path}: expected an object of fields")
    return values


def _variable(model: Model, path: str) -> nnx.Variable:
    at: Any = model
    for part in path.split("."):
        at = at[int(part)] if part.isdigit() else getattr(at, part)
    return at


# -- which tensor goes where ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A stored tensor and, where it is block-scaled, its scales."""

    name: str
    stored: Stored
    scales: Stored | None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.stored.shape
        if self.scales is not None and self.stored.dtype in ("I8", "U8"):
            return (*shape[:-1], 2 * shape[-1])
        return shape

    def read(self, first: int = 0, count: int | None = None) -> np.ndarray:
        values = self.stored.read(first, count)
        if self.scales is None:
            return values
        scales = self.scales.read(first, count) if count else self.scales.read()
        try:
            return dequantize(values, scales)
        except ValueError as error:
            raise WeightsError(f"{self.name}: {error}") from error

    @property
    def dtype(self) -> Any:
        """The dtype of what `read` returns."""
        if self.scales is not None:
            return jnp.float32 if self.scales.dtype == "F32" else jnp.bfloat16
        return self.stored.read(0, 0).dtype if self.shape else self.stored.read().dtype


@dataclasses.dataclass(frozen=True)
class _Source:
    """A parameter and the tensors that it is read from, [expert][piece] or [piece]."""

    entry: Entry
    shape: tuple[int, ...]
    tensors: list[_Tensor]
    apart: bool

    def read(self):
        """The parameter as a JAX array."""
        layout = layout_of(self.entry)
        if self.entry.layout == "table":
            dtype = np.dtype(np.int32)
        else:
            dtypes = [tensor.dtype for tensor in self.tensors]
            dtype = np.dtype(jnp.result_type(*dtypes))
        whole = _aligned(self.shape, dtype)
        if self.apart:
            pieces = len(self.tensors) // self.shape[0]
            for number, tensor in enumerate(self.tensors):
                expert, i = divmod(number, pieces)
                LAYOUTS["linear"].place(whole[expert], i, pieces, tensor.read())
        elif self.entry.layout == "experts":
            # One expert at a time: all of a layer's are the largest tensor of all.
            for e in range(self.shape[0]):
                layout.place(whole[e : e + 1], 0, 1, self.tensors[0].read(e, 1))
        else:
            for i, tensor in enumerate(self.tensors):
                layout.place(whole, i, len(self.tensors), tensor.read())
        return jnp.asarray(whole)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that JAX on a CPU can take over without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.empty((size + 64,), np.uint8)
    first = -data.ctypes.data % 64
    return data[first : first + size].view(dtype).reshape(shape)


def _match(
    entries: list[Entry],
    model: Model,
    stored: Mapping[str, Stored],
    ignored: tuple[str, ...],
) -> list[_Source]:
    """Finds the tensors of every parameter; everything wrong is one error."""
    sources, missing, shapes, used = [], [], [], set()

    def find(names: Piece, shape: tuple[int, ...]) -> _Tensor | None:
        name = next((n for n in names if n in stored), None)
        if name is None:
            missing.append(names[0])
            return None
        scale = next((s for s in _scale_names(name) if s in stored), None)
        used.update({name} if scale is None else {name, scale})
        tensor = _Tensor(name, stored[name], stored.get(scale) if scale else None)
        if tensor.shape != shape:
            shapes.append(f"{name} {list(tensor.shape)} instead of {list(shape)}")
        return tensor

    for entry in entries:
        shape = tuple(_variable(model, entry.path).shape)
        layout = layout_of(entry)
        whole = any(name in stored for piece in entry.pieces for name in piece)
        apart = (
            bool(entry.experts)
            and not whole
            and any(name in stored for name in entry.experts[0][0])
        )
        if apart:
            pieces = [piece for expert in entry.experts for piece in expert]
            layout, count = LAYOUTS["linear"], len(entry.experts[0])
            expected = layout.shape(shape[1:], count)
        else:
            pieces = list(entry.pieces)
            expected = layout.shape(shape, len(pieces))
        tensors = [find(piece, expected) for piece in pieces]
        sources.append(
            _Source(entry, shape, [t for t in tensors if t is not None], apart)
        )
    extra = [
        name
        for name in stored
        if name not in used and not any(re.search(pattern, name) for pattern in ignored)
    ]
    problems = [
        f"{what}: {listed(sorted(names))}"
        for what, names in (
            ("missing tensors", missing),
            ("tensors that the model does not have", extra),
            ("tensors of the wrong shape", shapes),
        )
        if names
    ]
    if problems:
        raise WeightsError("; ".join(problems))
    return sources


def _scale_names(name: str) -> Iterator[str]:
    yield f"{name}_scale_inv"
    if name.endswith(".weight"):
        yield name.removesuffix(".weight") + ".scale"


def _outgoing(entries: Iterator[Entry], model: Model) -> Iterator[Outgoing]:
    for entry in entries:
        value = _variable(model, entry.path)[...]
        layout = layout_of(entry)
        count = len(entry.pieces)
        dtype = np.dtype(np.int64) if entry.layout == "table" else np.dtype(value.dtype)
        if dtype not in NAMES:
            raise WeightsError(f"{entry.path}: dtype {dtype} has no place in a file")
        for i, names in enumerate(entry.pieces):

            def make(value=value, layout=layout, i=i, count=count) -> np.ndarray:
                return layout.take(np.asarray(value), i, count)

            shape = layout.shape(tuple(value.shape), count)
            yield Outgoing(names[0], dtype, shape, make)
