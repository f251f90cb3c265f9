"""GGUF files: numbers of every kind, names, damage, tokenizer."""

import json
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

import hybrid_attn as ha
from hybrid_attn.weights.gguf_files import Quantized, read_gguf
from tests.weights.llama_files import (
    byte_level,
    metadata,
    of_case,
    tokenizer_fields,
    write,
)
from tests.weights.models import same

DATA = Path(__file__).parent.parent / "data"
CASES = ("llama_tiny", "llama_tied")
Q = gguf.GGMLQuantizationType
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def case(name):
    config = json.loads((DATA / name / "config.json").read_text())
    tensors = load_file(DATA / name / "model.safetensors")
    return metadata(config), of_case(config, tensors)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, *case("llama_tiny"))
    return path


@pytest.mark.parametrize("name", CASES)
def test_same_as_hugging_face(name, tmp_path):
    """The two forms are one model, and it goes back to Hugging Face's."""
    write(tmp_path / "x.gguf", *case(name), extra={"general.name": "llama"})
    config, model = ha.weights.load(tmp_path / "x.gguf")
    want_config, want = ha.weights.load(DATA / name)
    assert config == want_config
    assert same(model, want)
    ha.weights.save(tmp_path / "saved", config, model)
    again, reloaded = ha.weights.load(tmp_path / "saved")
    assert again == config
    assert same(reloaded, model)


def test_plain_types(tmp_path):
    """Halves stay halves."""
    fields, tensors = case("llama_tied")
    for name, value in tensors.items():
        if value.ndim == 2:
            tensors[name] = value.astype(np.float16)
    name = "blk.1.ffn_down.weight"
    tensors[name] = (gguf.quants.quantize(tensors[name], Q.BF16), Q.BF16)
    write(tmp_path / "x.gguf", fields, tensors)
    model = ha.weights.load(tmp_path / "x.gguf")[1]
    assert model.embedding[...].dtype == np.float16
    assert (model.embedding[...] == tensors["token_embd.weight"]).all()
    down = np.asarray(model.blocks[1].feed_forward.down.weight[...])
    assert down.dtype.name == "bfloat16"
    want = load_file(DATA / "llama_tied" / "model.safetensors")
    want = want["model.layers.1.mlp.down_proj.weight"].T
    assert np.max(np.abs(down.astype(np.float32) - want) / np.abs(want)) < 2**-7


def blocks(rng, kind, shape) -> np.ndarray:
    """Random blocks of a type; bytes below 0x40 are no infinity in any scale."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (*shape[:-1], shape[-1] // block * size)
    return rng.integers(0, 0x40, shape).astype(np.uint8)


@pytest.mark.parametrize("kind", [*QUANTIZED, *K_QUANTS])
def test_quantized(kind, tmp_path):
    kind, rng = Q[kind], np.random.default_rng(0)
    values = {"model.embed_tokens.weight": (512, 256)}
    path = tmp_path / "x.gguf"
    name = "token_embd.weight"
    data = blocks(rng, kind, values["model.embed_tokens.weight"])
    write(path, {}, {name: (data, kind), "last": np.ones(3, np.float32)})
    _, stored = read_gguf(path)
    assert isinstance(stored[name], Quantized)
    want = gguf.quants.dequantize(data, kind)
    got = stored[name].read()
    assert got.dtype == np.float32 and got.shape == (512, 256)
    assert (got == want).all()
    assert (stored[name].read(3, 2) == want[3:5]).all()
    assert (stored["last"].read() == 1).all()


def test_q4_1_by_hand(tmp_path):
    """A block: scale and least value as halves, then two numbers of 0..15 a byte."""
    rng = np.random.default_rng(1)
    scale, least = np.float16([0.25, -0.5]), np.float16([1.5, -2])
    nibbles = rng.integers(0, 16, (2, 32)).astype(np.uint8)
    packed = nibbles[:, :16] | nibbles[:, 16:] << 4
    halves = np.stack([scale, least], axis=1).view(np.uint8)
    data = np.concatenate([halves, packed], axis=1).reshape(1, -1)
    write(tmp_path / "x.gguf", {}, {"t": (data, Q.Q4_1)})
    got = read_gguf(tmp_path / "x.gguf")[1]["t"].read()
    want = nibbles * scale[:, None].astype(np.float32) + least[:, None]
    assert (got == want.reshape(1, 64)).all()


# -- errors ----------------------------------------------------------------------------


def test_errors_list_names(tmp_path):
    fields, tensors = case("llama_tiny")
    tensors.pop("blk.1.attn_k.weight")
    tensors["rope_freqs.weight"] = np.ones(8, np.float32)
    tensors["output_norm.weight"] = np.ones(49, np.float32)
    write(tmp_path / "x.gguf", fields, tensors)
    with pytest.raises(ValueError, match=r"x\.gguf.*missing") as error:
        ha.weights.load(tmp_path / "x.gguf")
    for name in (
        "blk.1.attn_k.weight",
        "rope_freqs.weight",
        "output_norm.weight [49] instead of [48]",
    ):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"attention.value_length": 8}, "value_length"),
        ({"expert_count": 4}, "expert_count"),
        ({"attention.head_count": None}, "head_count"),
        ({"attention.head_count_kv": [2, 2, 1]}, "kv_heads"),
        ({"attention.layer_norm_rms_epsilon": None}, "epsilon"),
    ],
)
def test_unsupported_field(changes, field, tmp_path):
    fields, tensors = case("llama_tiny")
    given = {k: v for k, v in (fields | changes).items() if v is not None}
    write(tmp_path / "x.gguf", given, tensors)
    with pytest.raises(ValueError, match=rf"x\.gguf.*{field}"):
        ha.weights.load(tmp_path / "x.gguf")


def test_other_architecture(file):
    data = file.read_bytes().replace(b"llama", b"gpt2x")
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"general\.architecture"):
        ha.weights.load(file)


def test_unknown_type(tmp_path):
    fields, tensors = case("llama_tied")
    data = np.zeros((32, 34), np.uint8)
    for number, what in ((int(Q.Q8_1), "Q8_1"), (99, "99")):
        tensors["blk.0.attn_q.weight"] = (data, Q.Q8_0)
        path = tmp_path / f"{what}.gguf"
        write(path, fields, tensors)
        raw = bytearray(path.read_bytes())
        at = raw.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight")
        raw[at + 20] = number
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=rf"{what}\.gguf: blk\.0\.attn_q\.weight"):
            ha.weights.load(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 30, 100, 900])
def test_truncated_header(file, keep):
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"tiny\.gguf"):
        ha.weights.load(file)


def test_truncated_data(file):
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"tiny\.gguf: .*weight is truncated"):
        ha.weights.load(file)


def test_damaged_header(file):
    """Any byte: a model, or an error that names the file."""
    data, rng = file.read_bytes(), np.random.default_rng(0)
    places = [*range(24), *rng.integers(24, 2500, 200)]
    refused = 0
    for at in places:
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        file.write_bytes(damaged)
        try:
            ha.weights.load(file)
        except ValueError as error:
            assert "tiny.gguf" in str(error), (at, error)
            refused += 1
    assert refused > len(places) / 2


def test_damaged_scale(tmp_path):
    data = np.zeros((8, 34), np.uint8)
    data[3, :2] = 0xFF
    write(tmp_path / "x.gguf", {}, {"some.weight": (data, Q.Q8_0)})
    with pytest.raises(ValueError, match=r"x\.gguf: some\.weight"):
        read_gguf(tmp_path / "x.gguf")[1]["some.weight"].read()


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.gguf"):
        ha.weights.load(tmp_path / "nowhere.gguf")


def test_streamed(tmp_path):
    """Loading holds the model, one tensor and a piece of it."""
    fields, tensors = case("llama_tied")
    fields |= {"vocab_size": 65536}
    table = np.random.default_rng(0).standard_normal((65536, 32)).astype(np.float32)
    tensors["token_embd.weight"] = (gguf.quants.quantize(table, Q.Q8_0), Q.Q8_0)
    write(tmp_path / "x.gguf", fields, tensors)
    tracemalloc.start()
    model = ha.weights.load(tmp_path / "x.gguf")[1]
    loading = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.max(np.abs(model.embedding[...] - table)) < 0.03
    assert loading < 2.2 * table.nbytes + 16e6


# -- tokenizer -------------------------------------------------------------------------

TEXT = "def f(x1234):\n    return x1234 + 5  # it's\t naïve\r\n\n\n  日本 42nd\n"


@pytest.fixture(scope="module")
def trained():
    source = Path(json.__file__).read_text()
    return byte_level([source, TEXT * 3])


def test_tokenizer(trained, tmp_path):
    built, model = trained
    path = tmp_path / "x.gguf"
    write(path, {}, {}, tokenizer_fields(model))
    got = ha.weights.load_tokenizer(path)
    for text in (TEXT, Path(json.__file__).read_text(), "", "<|end|>a<|end|>"):
        assert got.encode(text).ids == built.encode(text).ids
        assert got.decode(got.encode(text).ids, skip_special_tokens=False) == text
    assert len(got.encode(TEXT).ids) < len(TEXT.encode()) - 10
    write(
        path, {}, {}, tokenizer_fields(model) | {"tokenizer.ggml.add_bos_token": True}
    )
    first = ha.weights.load_tokenizer(path).encode(TEXT).ids
    assert first == [0, *built.encode(TEXT).ids]
    built.save(str(tmp_path / "tokenizer.json"))
    assert ha.weights.load_tokenizer(tmp_path).encode(TEXT).ids == first[1:]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokenizer.ggml.model": "llama"}, "ggml.model"),
        ({"tokenizer.ggml.pre": "other"}, "ggml.pre"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges"),
    ],
)
def test_tokenizer_errors(trained, changes, field, tmp_path):
    write(tmp_path / "x.gguf", {}, {}, tokenizer_fields(trained[1]) | changes)
    with pytest.raises(ValueError, match=rf"x\.gguf.*{field}"):
        ha.weights.load_tokenizer(tmp_path / "x.gguf")


def test_no_tokenizer(file, tmp_path):
    with pytest.raises(ValueError, match=r"tiny\.gguf.*tokenizer\.ggml\.model"):
        ha.weights.load_tokenizer(file)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        ha.weights.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        ha.weights.load_tokenizer(tmp_path)
