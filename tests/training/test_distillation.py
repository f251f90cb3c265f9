"""Distillation on tiny models: losses worked out on paper, what learns, resuming."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.cache.span import Span
from hybrid_attn.training.checkpoint import TrainCheckpoints
from hybrid_attn.training.data import IGNORE, Batch
from hybrid_attn.training.distillation import DistillConfig, Distiller
from hybrid_attn.training.fit import fit
from hybrid_attn.training.optimizer import OptimizerConfig
from hybrid_attn.weights import convert

TIME, WINDOW = 24, 6
CONFIG = ha.ModelConfig(
    name="tiny",
    vocab_size=50,
    hidden_size=16,
    pattern="dense*3",
    feed_forward_size=16,
    heads=4,
    head_dim=4,
    kv_heads=2,
    dense_kv_heads=2,
    shared_kv=False,
    query_norm=False,
    key_norm=False,
    sink=False,
    rope_dims=4,
)
OPTIMIZER = OptimizerConfig(peak_rate=5e-3, warmup=2, weight_decay=0.0)


def batch_at(step: int) -> Batch:
    rng = np.random.default_rng((0, step))
    tokens = rng.integers(0, 50, (2, TIME)).astype(np.int32)
    return Batch(tokens, np.full_like(tokens, IGNORE), np.zeros_like(tokens))


def teacher_of(seed: int = 3) -> ha.Model:
    """Larger weights than at initialisation: attention that is far from uniform."""
    graph, params = nnx.split(ha.Model(CONFIG, rngs=nnx.Rngs(seed)))
    return nnx.merge(graph, jax.tree.map(lambda x: 2 * x, params))


@pytest.fixture(scope="module")
def teacher() -> ha.Model:
    return teacher_of()


def distiller_of(teacher, pattern, config=None, **kwargs) -> Distiller:
    fields = {"window": WINDOW, "top_k": 2, "calibration": batch_at(9).tokens} | kwargs
    _, student = convert(CONFIG, teacher, pattern, **fields)
    return Distiller(
        teacher, student, config or DistillConfig(steps=4, optimizer=OPTIMIZER)
    )


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# -- on paper --------------------------------------------------------------------------


def test_a_student_that_is_its_teacher_learns_nothing(teacher):
    """The window holds every token: loss 0, and a gradient of exactly 0."""
    distiller = distiller_of(teacher, "hca:4,csa:2,swa", window=TIME)
    begin = jax.tree.map(np.asarray, distiller.init().params)
    state, metrics = distiller.update(distiller.init(), batch_at(0).tokens)
    assert 0 <= float(metrics["output_error"]) < 1e-12
    # No entry may be read, so there is nothing to score either.
    assert float(metrics["indexer_loss"]) == 0
    assert_same_bits(state.params, begin)
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert moments and not any(np.asarray(x).any() for x in moments)


def test_uniform_attention_is_exact_by_means(teacher):
    """Queries of zero: a mean that counts as its tokens is what dense attention is.

    And the mass of all groups is equal, which scores of zero say too: KL 0.
    """
    model = uniform(teacher)
    distiller = distiller_of(model, "hca:4,csa:2*2", sinks="none", top_k=TIME)
    _, metrics = distiller.update(distiller.init(), batch_at(0).tokens)
    assert 0 <= float(metrics["output_error"]) < 1e-11
    assert abs(float(metrics["indexer_loss"])) < 1e-6


def test_uniform_attention_over_a_window(teacher):
    """The mean of the last tokens instead of the mean of all: error in float64."""
    model = uniform(teacher)
    distiller = distiller_of(model, "swa,dense*2", sinks="key")
    state = distiller.init()
    zero = jax.tree.map(jnp.zeros_like, state)
    tokens = batch_at(0).tokens
    _, metrics = distiller.update(zero, tokens)
    block = model.blocks[0]
    y = np.asarray(block.mixer_norm(model.embed(tokens)), np.float64)
    weight = np.asarray(block.mixer.key_value.project.weight[...], np.float64)
    value = np.split(y @ weight, 2, axis=-1)[1].reshape(2, TIME, 2, 4)
    value = np.repeat(value, 2, axis=2).reshape(2, TIME, 16)
    up = np.asarray(block.mixer.output_up.weight[...], np.float64)
    want = np.stack([value[:, : t + 1].mean(1) for t in range(TIME)], 1) @ up

    def windowed(t):
        near = value[:, max(0, t - WINDOW + 1) : t + 1]
        # The sink's value is zero here, and its logit too: it takes one part.
        return near.sum(1) / (near.shape[1] + (t >= WINDOW))

    got = np.stack([windowed(t) for t in range(TIME)], 1) @ up
    error = ((got - want) ** 2).sum() / (want**2).sum()
    np.testing.assert_allclose(metrics["error.0"], error, rtol=1e-5)
    assert float(metrics["loss"]) == float(metrics["error.0"])


def uniform(model: ha.Model) -> ha.Model:
    graph, params = nnx.split(model)
    flat = nnx.to_flat_state(params)
    zero = {
        path: leaf.replace(jnp.zeros_like(leaf[...])) if "query_up" in path else leaf
        for path, leaf in flat
    }
    return nnx.merge(graph, nnx.from_flat_state(zero))


def test_indexer_loss_of_the_dense_mass_in_float64(teacher):
    """KL of the dense softmax, summed over the tokens of each group."""
    ratio = 3
    distiller = distiller_of(teacher, f"csa:{ratio},dense*2")
    tokens = batch_at(1).tokens
    _, metrics = distiller.update(distiller.init(), tokens)
    block, student = teacher.blocks[0], distiller.student.blocks[0].mixer
    span = Span.training(*tokens.shape)
    y = block.mixer_norm(teacher.embed(tokens))
    inputs, _ = block.mixer.inputs(y, None, span)
    key, _ = block.mixer.key_value(y, span.positions)
    query = np.asarray(inputs.query, np.float64)
    key = np.repeat(np.asarray(key, np.float64), 2, axis=2)
    index = student.indexer.queries(y, y, span)
    scores = np.asarray(_scores(*index, student.indexer.keys(y, None, span)[0]))
    terms = []
    for b in range(2):
        for t in range(TIME):
            groups = max(0, t + 1 - (WINDOW - ratio + 1)) // ratio
            if not groups:
                continue
            logits = np.einsum("nh,snh->ns", query[b, t], key[b, : t + 1]) / 2
            share = np.exp(logits - logits.max(1, keepdims=True))
            share = (share / share.sum(1, keepdims=True)).mean(0)
            mass = share[: groups * ratio].reshape(groups, ratio).sum(1)
            mass /= mass.sum()
            guess = np.exp(scores[b, t, :groups].astype(np.float64))
            terms.append((mass * np.log(mass / (guess / guess.sum()))).sum())
    np.testing.assert_allclose(metrics["indexer_loss"], np.mean(terms), rtol=1e-4)
    total = float(metrics["error.0"]) + float(metrics["indexer_loss"])
    np.testing.assert_allclose(metrics["loss"], total, rtol=1e-6)


def _scores(query, weight, key):
    products = np.einsum("btic,bce->btie", *(np.asarray(x) for x in (query, key)))
    return np.einsum("bti,btie->bte", np.asarray(weight), np.maximum(products, 0))


# -- what is trained -------------------------------------------------------------------


@pytest.fixture(scope="module")
def distiller(teacher) -> Distiller:
    return distiller_of(
        teacher,
        "hca:4,dense,csa:2",
        DistillConfig(steps=30, optimizer=OPTIMIZER),
        sinks="key",
    )


@pytest.fixture(scope="module")
def trained(distiller):
    """The last state, and the metrics of every step."""
    lines = []
    state = fit(
        distiller,
        batch_at,
        log_every=1,
        on_metrics=lambda step, values: lines.append(values),
    )
    return state, lines


def test_loss_falls(trained):
    _, lines = trained
    for key in ("loss", "output_error", "indexer_loss", "error.0", "error.2"):
        first, last = (
            np.mean([x[key] for x in part]) for part in (lines[:5], lines[-5:])
        )
        assert last < 0.9 * first, (key, first, last)


def test_only_the_parts_are_trained(distiller, trained, teacher):
    """They alone have a gradient and a state; the rest is the teacher's own array."""
    state, _ = trained
    assert sorted(state.params) == sorted(state.optimizer) == ["0", "2"]
    begin = distiller.init()
    names = {path[0] for path, _ in nnx.to_flat_state(state.params["2"])}
    assert names == {"compressor", "indexer", "sink_key"}
    for index in ("0", "2"):
        old = dict(nnx.to_flat_state(begin.params[index]))
        for path, new in nnx.to_flat_state(state.params[index]):
            assert np.isfinite(new[...]).all()
            assert (np.asarray(new[...]) != np.asarray(old[path][...])).any(), path
    model = distiller.model(state)
    for index in range(3):
        mixer, dense = model.blocks[index].mixer, teacher.blocks[index].mixer
        assert (
            mixer.key_value.project.weight[...] is dense.key_value.project.weight[...]
        )
    assert model.embedding[...] is teacher.embedding[...]


@pytest.mark.parametrize("parts", [("sink_key",), ("indexer",)])
def test_other_parts_stay(teacher, parts):
    config = DistillConfig(steps=3, parts=parts, optimizer=OPTIMIZER)
    distiller = distiller_of(teacher, "hca:4,csa:2,csa:2", config, sinks="key")
    state = fit(distiller, batch_at)
    assert set(state.params) == {str(index) for index in distiller.layers}
    assert distiller.layers == ((0, 1, 2) if "sink_key" in parts else (1, 2))
    begin = nnx.to_flat_state(nnx.state(distiller.student))
    for (path, old), (_, new) in zip(
        begin, nnx.to_flat_state(nnx.state(distiller.model(state))), strict=True
    ):
        same = old[...] is new[...]
        assert same != (path[0] == "blocks" and path[3] in parts), path


def test_a_layer_does_not_depend_on_the_others(teacher, trained):
    """The same layer beside others: its parameters after all steps."""
    config = DistillConfig(steps=30, optimizer=OPTIMIZER)
    alone = distiller_of(teacher, "swa,dense,csa:2", config, sinks="key")
    state = fit(alone, batch_at)
    for got, want in zip(
        jax.tree.leaves(state.params["2"]),
        jax.tree.leaves(trained[0].params["2"]),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_logit_sinks_are_trained(teacher):
    """And dense layers keep the sink that stands for none."""
    distiller = distiller_of(teacher, "swa,dense,swa", sinks="logit")
    state = fit(distiller, batch_at)
    assert [path for path, _ in nnx.to_flat_state(state.params["0"])] == [("sink",)]
    model = distiller.model(state)
    assert (np.asarray(model.blocks[1].mixer.sink[...]) == -1e9).all()
    before = np.asarray(distiller.student.blocks[0].mixer.sink[...])
    assert (np.asarray(model.blocks[0].mixer.sink[...]) != before).all()


def test_distilled_model_is_the_same_for_every_cut(distiller, trained):
    model, tokens = distiller.model(trained[0]), batch_at(5).tokens
    whole = np.asarray(ha.forward(model, tokens))
    assert (
        np.abs(whole - np.asarray(ha.forward(distiller.student, tokens))).max() > 0.01
    )
    for cuts in ([], [1, 2, 3], [7, 14], [5, 6, 18]):
        cache, parts = ha.init_cache(model.config, 2, TIME), []
        for piece in np.split(tokens, cuts, axis=1):
            logits, cache = ha.step(model, cache, piece)
            parts.append(np.asarray(logits))
        scale = max(1.0, float(np.abs(whole).max()))
        np.testing.assert_allclose(
            np.concatenate(parts, axis=1), whole, atol=2e-5 * scale
        )


# -- resuming --------------------------------------------------------------------------


def test_stopped_and_resumed_run_is_bit_identical(teacher, tmp_path):
    class Stop(Exception):
        pass

    def stop(step: int) -> None:
        if step == 3:
            raise Stop

    def fresh() -> Distiller:
        return distiller_of(teacher, "hca:4,dense,csa:2", sinks="key")

    uninterrupted = fit(fresh(), batch_at)
    with pytest.raises(Stop):
        fit(fresh(), batch_at, checkpoints=tmp_path, save_every=2, on_step=stop)
    with TrainCheckpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 2
    steps: list[int] = []
    state = fit(
        fresh(), batch_at, checkpoints=tmp_path, save_every=2, on_step=steps.append
    )
    assert steps == [3, 4]
    assert_same_bits(state, uninterrupted)


# -- refusals --------------------------------------------------------------------------


def test_refuses(teacher, distiller):
    swa = convert(CONFIG, teacher, "swa*3", window=WINDOW)[1]
    with pytest.raises(ValueError, match=r"no layer of swa\*3 has any of compressor"):
        Distiller(teacher, swa, DistillConfig())
    with pytest.raises(ValueError, match=r"teacher has layers \['swa'\]"):
        Distiller(swa, swa, DistillConfig())
    short = ha.Model(CONFIG.replace(pattern="dense*2"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"\(3, 16, 50\) in the teacher and \(2, 16"):
        Distiller(teacher, short, DistillConfig())
    tokens = batch_at(0).tokens
    with pytest.raises(ValueError, match="rows of one document"):
        distiller.update(distiller.init(), tokens, segment_ids=tokens)
    with pytest.raises(ValueError, match=r"tokens \(24,\): expected \[batch, time\]"):
        distiller.update(distiller.init(), tokens[0])


@pytest.mark.parametrize("bad", [{"steps": 0}, {"parts": ()}, {"parts": ("query",)}])
def test_bad_config_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        DistillConfig(**bad)


def test_default_optimizer_does_not_pull_weights_from_the_teachers():
    assert DistillConfig().optimizer.weight_decay == 0
