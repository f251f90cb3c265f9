"""Loading and saving DeepSeek-V4 checkpoints: bits, names, errors, memory."""

import json
import shutil
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import hybrid_attn as ha
from hybrid_attn.config import HyperConfig, MoEConfig
from hybrid_attn.weights.config_deepseek_v4 import ConfigError, from_json, to_json
from tests.weights.models import check_streamed, leaves, same

CASE = Path(__file__).parent.parent / "data" / "flash_tiny"
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


@pytest.fixture(scope="module")
def loaded():
    return ha.weights.load(CASE)


@pytest.fixture
def copy(tmp_path):
    """A directory with the case, and functions to change it."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(CASE / name, tmp_path / name)
    return tmp_path


def change(directory, edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


# -- round trips -----------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [1 << 30, 200_000])
def test_round_trip(loaded, tmp_path, shard_bytes):
    config, model = loaded
    ha.weights.save(tmp_path, config, model, shard_bytes=shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 5) == (shard_bytes < 1 << 20)
    again, reloaded = ha.weights.load(tmp_path)
    assert again == config
    assert same(model, reloaded)
    # The package reads the files, and finds what the original holds.
    written = {name: t for file in files for name, t in load_file(file).items()}
    original = load_file(CASE / "model.safetensors")
    assert written.keys() == original.keys()
    for name, want in original.items():
        assert written[name].dtype == want.dtype, name
        assert written[name].tobytes() == want.tobytes(), name


def test_save_replaces(loaded, tmp_path):
    config, model = loaded
    ha.weights.save(tmp_path, config, model, shard_bytes=200_000)
    ha.weights.save(tmp_path, config, model)
    assert [f.name for f in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert same(ha.weights.load(tmp_path)[1], model)


def test_bfloat16_round_trip(loaded, tmp_path):
    config, model = loaded
    graph, state = nnx.split(model)

    def floats(x):
        return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x

    small = nnx.merge(graph, jax.tree.map(floats, state))
    ha.weights.save(tmp_path, config, small)
    assert same(ha.weights.load(tmp_path)[1], small)


def test_presets_round_trip():
    for name in ("deepseek_v4_flash", "deepseek_v4_pro"):
        config = ha.presets.get(name)
        again = from_json(json.loads(json.dumps(to_json(config))))
        assert again.layers == config.layers
        assert (again.moe, again.hyper) == (config.moe, config.hyper)


def test_what_the_form_cannot_say(tmp_path):
    moe, hyper = MoEConfig(experts=4, chosen=2, width=8), HyperConfig()
    fields = dict(query_rank=8, output_rank=8, pattern="hca,swa")
    config = ha.ModelConfig(moe=moe, hyper=hyper, feed_forward_size=8, **fields)
    to_json(config)
    for change in (
        {"token_shift": True},
        {"pattern": "dense,swa"},
        {"pattern": "hca:8,swa"},
        {"feed_forward_size": 16},
        {"sink": False},
        {"decay": "learned"},
    ):
        with pytest.raises(ConfigError, match=next(iter(change))):
            to_json(config.replace(**change))
    with pytest.raises(ConfigError, match="moe"):
        to_json(config.replace(moe=None))


# -- the official release's names and numbers ------------------------------------------

OFFICIAL = [
    ("model.layers.", "layers."),
    ("model.embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("model.norm.", "norm."),
    ("model.hc_head.", "hc_head_"),
    ("hc_head_hc_", "hc_head_"),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".compressor.indexer.q_b_proj.", ".indexer.wq_b."),
    (".compressor.indexer.scorer.weights_proj.", ".indexer.weights_proj."),
    (".compressor.indexer.", ".indexer.compressor."),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".position_bias", ".ape"),
    (".self_attn.sinks", ".attn.attn_sink"),
    (".self_attn.", ".attn."),
    (".q_a_proj.", ".wq_a."),
    (".q_a_norm.", ".q_norm."),
    (".q_b_proj.", ".wq_b."),
    (".kv_proj.", ".wkv."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".e_score_correction_bias", ".bias"),
    (".shared_experts.gate_proj.", ".shared_experts.w1."),
    (".shared_experts.down_proj.", ".shared_experts.w2."),
    (".shared_experts.up_proj.", ".shared_experts.w3."),
    (".mlp.", ".ffn."),
]


def official(tensors: dict) -> dict:
    """The case under the names of the official release, experts one by one."""
    out = {}
    for name, value in tensors.items():
        for old, new in OFFICIAL:
            name = name.replace(old, new)
        if ".attn." in name:
            name = name.replace(".gate_proj.", ".wgate.")
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(value):
                gate, up = np.split(both, 2)
                out[name.replace("gate_up_proj", f"{e}.w1.weight")] = gate.copy()
                out[name.replace("gate_up_proj", f"{e}.w3.weight")] = up.copy()
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(value):
                out[name.replace("down_proj", f"{e}.w2.weight")] = down
        else:
            out[name] = value
    return out


def test_official_names(loaded, copy):
    tensors = official(load_file(copy / "model.safetensors"))
    tensors["mtp.0.attn.wq_a.weight"] = np.zeros((2, 2), np.float32)
    assert "layers.2.attn.indexer.compressor.norm.weight" in tensors
    assert "hc_head_fn" in tensors
    save_file(tensors, copy / "model.safetensors")
    assert same(ha.weights.load(copy)[1], loaded[1])


def write(path: Path, tensors: dict) -> None:
    """A safetensors file with dtypes that the package's numpy form cannot write."""
    names = {E4M3: "F8_E4M3", E8M0: "F8_E8M0", np.float32: "F32"}
    names |= {np.int8: "I8", np.int64: "I64"}
    codes = {np.dtype(dtype): code for dtype, code in names.items()}
    header, data = {}, b""
    for name, value in tensors.items():
        end = len(data) + value.nbytes
        header[name] = dict(dtype=codes[value.dtype], shape=list(value.shape))
        header[name]["data_offsets"] = [len(data), end]
        data += value.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_block_scaled(copy):
    """FP8 attention, FP4 experts: the model holds number times scale."""
    rng = np.random.default_rng(0)
    plain, scaled = {}, {}
    for name, value in official(load_file(copy / "model.safetensors")).items():
        scaled[name] = plain[name] = value
        if ".experts." in name and value.shape[1] % 32 == 0:
            packed = rng.integers(-128, 128, (value.shape[0], value.shape[1] // 2))
            packed = packed.astype(np.int8)
            scale = (2.0 ** rng.integers(-6, 0, (value.shape[0], 2))).astype(E8M0)
            bits = packed.view(np.uint8)
            nibbles = np.stack([bits & 15, bits >> 4], -1).reshape(value.shape)
            numbers = nibbles.astype(ml_dtypes.uint4).view(ml_dtypes.float4_e2m1fn)
            factor = np.repeat(scale.astype(np.float32), 32, axis=1)
        elif name.endswith((".wq_b.weight", ".wo_a.weight")):
            packed = numbers = value.astype(E4M3)
            scale = (2.0 ** rng.integers(-3, 3, (1, 1))).astype(E8M0)
            factor = scale.astype(np.float32)
        else:
            continue
        scaled[name] = packed
        scaled[name.removesuffix("weight") + "scale"] = scale
        plain[name] = numbers.astype(np.float32) * factor
    assert sum(value.dtype == np.int8 for value in scaled.values()) > 20
    write(copy / "model.safetensors", plain)
    want = ha.weights.load(copy)[1]
    write(copy / "model.safetensors", scaled)
    got = ha.weights.load(copy)[1]
    changed = 0
    for a, b in zip(leaves(got), leaves(want), strict=True):
        assert (a.astype(b.dtype) == b).all()
        changed += a.dtype == jnp.bfloat16
    assert changed > 10


# -- errors ----------------------------------------------------------------------------


def test_missing_extra_misshaped(copy):
    def edit(tensors):
        tensors.pop("model.layers.2.self_attn.sinks")
        tensors.pop("model.layers.4.mlp.experts.down_proj")
        tensors["model.layers.0.self_attn.q_a_proj.bias"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(65, np.float32)

    change(copy, edit)
    with pytest.raises(ValueError, match="missing") as error:
        ha.weights.load(copy)
    for name in (
        "model.layers.2.self_attn.sinks",
        "model.layers.4.mlp.experts.down_proj",
        "model.layers.0.self_attn.q_a_proj.bias",
        "model.norm.weight [65] instead of [64]",
    ):
        assert name in str(error.value)


@pytest.mark.parametrize("keep", [0, 4, 60, 20_000, -1])
def test_truncated(copy, keep):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        ha.weights.load(copy)


@pytest.mark.parametrize("at", [0, 3, 7, 8, 40, 200])
def test_bad_header(copy, at):
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        ha.weights.load(copy)


def test_damaged_shards(loaded, tmp_path):
    config, model = loaded
    ha.weights.save(tmp_path, config, model, shard_bytes=200_000)
    third = sorted(tmp_path.glob("*.safetensors"))[2]
    data = third.read_bytes()
    third.write_bytes(data[:-5])
    with pytest.raises(ValueError, match=third.name):
        ha.weights.load(tmp_path)
    third.unlink()
    with pytest.raises(ValueError, match=third.name):
        ha.weights.load(tmp_path)
    third.write_bytes(data)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace("lm_head.weight", "lm_head.other"))
    with pytest.raises(ValueError, match=r"lm_head\.other"):
        ha.weights.load(tmp_path)
    index.write_text(text[:-30])
    with pytest.raises(ValueError, match=r"index\.json"):
        ha.weights.load(tmp_path)


def test_no_files(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        ha.weights.load(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        ha.weights.load(copy)
    with pytest.raises(ValueError, match="nowhere"):
        ha.weights.load(copy / "nowhere")


def expert_out_of_range(tensors):
    tensors["model.layers.1.mlp.gate.tid2eid"][5, 1] = 4


def test_table_out_of_range(copy):
    change(copy, expert_out_of_range)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.gate\.tid2eid"):
        ha.weights.load(copy)


NESTED = json.loads((CASE / "config.json").read_text())["rope_parameters"]


def rope(part: str, **changes):
    return {"rope_parameters": NESTED | {part: NESTED[part] | changes}}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"attention_bias": True}, "attention_bias"),
        ({"dtype": "float16"}, "dtype"),
        ({"layer_types": None}, "layer_types"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types"),
        ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types"),
        ({"compress_rates": {"other": 4}}, "compress_rates"),
        ({"hc_mult": None}, "hc_mult"),
        ({"hc_mult": 0}, "streams"),
        ({"head_dim": None}, "head_dim"),
        ({"o_groups": 3}, "groups"),
        (rope("main", rope_type="yarn"), "main.rope_type"),
        (rope("compress", rope_type="llama3"), "compress.rope_type"),
        (rope("compress", attention_factor=1.2), "attention_factor"),
        (rope("compress", attention_factor=None), "attention_factor"),
        (rope("compress", truncate=False), "truncate"),
        (rope("compress", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (rope("compress", original_max_position_embeddings=None), "original_max"),
    ],
)
def test_unsupported_field(copy, changes, field):
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=field):
        ha.weights.load(copy)


def test_official_config():
    """The flat form: compress_ratios with the draft layers, rope_scaling, no types."""
    values = json.loads((CASE / "config.json").read_text())
    want = from_json(values)
    for field in ("layer_types", "mlp_layer_types", "rope_parameters"):
        values.pop(field)
    yarn = {k: v for k, v in NESTED["compress"].items() if k != "attention_factor"}
    yarn["type"] = yarn.pop("rope_type")
    values |= {
        "compress_ratios": [0, 0, 4, 128, 4, 0],
        "num_hash_layers": 3,
        "rope_scaling": yarn,
    }
    assert from_json(values) == want


# -- memory ----------------------------------------------------------------------------


def test_streamed(tmp_path):
    """Loading holds the model and one tensor, saving one tensor."""
    config = ha.ModelConfig(
        vocab_size=8192,
        hidden_size=256,
        pattern="swa*3",
        feed_forward_size=512,
        swiglu_limit=10.0,
        moe=MoEConfig(experts=8, chosen=2, width=512),
        hyper=HyperConfig(streams=2),
        query_rank=64,
        output_rank=64,
    )
    check_streamed(config, tmp_path, parts=4)
