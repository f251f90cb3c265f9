"""Loading and saving Llama checkpoints: numbers, bits, names, errors, memory."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import hybrid_attn as ha
from hybrid_attn.weights.config_llama import from_json, to_json
from hybrid_attn.weights.fields import ConfigError
from tests.weights.models import check_streamed, leaves, same

DATA = Path(__file__).parent.parent / "data"
CASES = ("llama_tiny", "llama_tied")


@pytest.fixture
def copy(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(DATA / "llama_tiny" / name, tmp_path / name)
    return tmp_path


def change(directory, edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def change_config(directory, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    """transformers' logits, in the training form and in two steps."""
    config, model = ha.weights.load(DATA / name)
    case = load_file(DATA / name / "case.safetensors")
    tokens, want = case["input_ids"], case["logits"]
    got = jax.jit(ha.forward)(model, tokens)
    assert np.max(np.abs(got - want)) < 2e-5
    cache = ha.init_cache(config, len(tokens), tokens.shape[1])
    first, cache = ha.step(model, cache, tokens[:, :40])
    second, _ = ha.step(model, cache, tokens[:, 40:])
    got = np.concatenate([first, second], axis=1)
    assert np.max(np.abs(got - want)) < 2e-5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_round_trip(name, shard_bytes, tmp_path):
    config, model = ha.weights.load(DATA / name)
    ha.weights.save(tmp_path, config, model, shard_bytes=shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 2) == (shard_bytes < 1 << 20)
    again, reloaded = ha.weights.load(tmp_path)
    assert again == config
    assert same(model, reloaded)
    written = {name: t for file in files for name, t in load_file(file).items()}
    original = load_file(DATA / name / "model.safetensors")
    assert written.keys() == original.keys()
    for tensor, want in original.items():
        assert written[tensor].tobytes() == want.tobytes(), tensor


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_dtypes_round_trip(dtype, tmp_path):
    config, model = ha.weights.load(DATA / "llama_tiny")
    config = config.replace(compute_dtype=dtype)
    graph, state = nnx.split(model)
    small = nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), state))
    ha.weights.save(tmp_path, config, small)
    again, reloaded = ha.weights.load(tmp_path)
    assert again == config
    assert same(small, reloaded)
    assert all(x.dtype == jnp.dtype(dtype) for x in leaves(reloaded))


def test_other_places(copy):
    """No prefix, stored frequencies, theta in its old place, a repeated tied head."""
    want = ha.weights.load(copy)[1]
    values = json.loads((copy / "config.json").read_text())
    theta = values.pop("rope_parameters")["rope_theta"]
    values |= {"rope_theta": theta, "rope_scaling": None, "torch_dtype": "float32"}
    (copy / "config.json").write_text(json.dumps(values))

    def edit(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        name = "layers.0.self_attn.rotary_emb.inv_freq"
        tensors[name] = np.zeros(8, np.float32)

    change(copy, edit)
    assert same(ha.weights.load(copy)[1], want)
    change_config(copy, tie_word_embeddings=True)
    config, model = ha.weights.load(copy)
    assert config.tie_embeddings and model.unembed is None


def test_errors_list_names(copy):
    def edit(tensors):
        tensors.pop("model.layers.1.self_attn.k_proj.weight")
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(96, np.float32)
        tensors["model.norm.weight"] = np.zeros(49, np.float32)

    change(copy, edit)
    with pytest.raises(ValueError, match="missing") as error:
        ha.weights.load(copy)
    for name in (
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.norm.weight [49] instead of [48]",
    ):
        assert name in str(error.value)


def test_truncated(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        ha.weights.load(copy)


ROPE = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_parameters": ROPE | {"rope_type": "llama3"}}, "rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": 4}, "rope_parameters"),
        ({"dtype": "float64"}, "dtype"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_key_value_heads": 4}, "kv_heads"),
        ({"head_dim": 15}, "rope_dims"),
        ({"head_dim": None, "num_attention_heads": 7}, "head_dim"),
    ],
)
def test_unsupported_field(copy, changes, field):
    change_config(copy, **changes)
    with pytest.raises(ValueError, match=field):
        ha.weights.load(copy)


def test_what_the_form_cannot_say(tmp_path):
    config = ha.weights.load(DATA / "llama_tiny")[0]
    assert from_json(to_json(config)) == config
    for changes in (
        {"pattern": "dense,swa"},
        {"pattern": "dense*2,dense:4"},
        {"sink": True},
        {"query_norm": True},
        {"token_shift": True},
        {"query_rank": 8},
        {"rope_dims": 8},
        {"swiglu_limit": 1.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            to_json(config.replace(**changes))
    tied = config.replace(tie_embeddings=True, tied_scale=None)
    with pytest.raises(ConfigError, match="tied_scale"):
        to_json(tied)
    with pytest.raises(ConfigError, match="pattern"):
        ha.weights.save(tmp_path / "x", config.replace(pattern="hca"), None)
    assert not (tmp_path / "x").exists()


def test_streamed(tmp_path):
    """Loading holds the model and one tensor, saving one tensor."""
    config = ha.weights.load(DATA / "llama_tiny")[0].replace(
        vocab_size=8192, hidden_size=256, feed_forward_size=2048
    )
    check_streamed(config, tmp_path, parts=3)
