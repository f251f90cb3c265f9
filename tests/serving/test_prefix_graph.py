"""Held prompts: what a store's trouble means for those that would read them."""

from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.cache.layout import layout_of
from hybrid_attn.serving.prefix_graph import PrefixGraph
from hybrid_attn.serving.reuse import prefill_through
from hybrid_attn.store import Block
from hybrid_attn.store.chain import Boundary
from hybrid_attn.store.rebuild import BlockKey, Rebuilder
from hybrid_attn.testing import small_config

CONFIG = small_config("swa,csa")
SIZE = 16
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 4 * SIZE))
# Two blocks and a part of the third are common.
TOKENS[1, : 2 * SIZE + 5] = TOKENS[0, : 2 * SIZE + 5]


@pytest.fixture(scope="module")
def model():
    return ha.Model(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture
def scene(model, tmp_path):
    """(store, its copy, graph, the rows of both prompts)."""
    identity, stores = ha.model_id(model), []
    for name in ("store", "copy"):
        store = ha.store.open(f"file://{tmp_path}/{name}", model_id=identity)
        for prompt in TOKENS:
            _, cache, _ = prefill_through(store, model, prompt[None], capacity=96)
        stores.append(store)
    layout = layout_of(cache)
    assert layout.block_tokens == SIZE
    graph = PrefixGraph(stores[0], layout)
    return *stores, graph, [graph.hold(prompt) for prompt in TOKENS]


def damage(store, chain: str, group: str = "entries") -> None:
    """Flips a bit in blocks of a boundary; the store then finds it."""
    root = Path(store.url.removeprefix("file://"))
    for path in root.glob(f"blocks/**/{chain}*"):
        if group in str(path):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
    assert not store.verify().sound


def chain_of(store, graph, row):
    return store.chain(graph.layout.fingerprint, TOKENS[row], SIZE)


def levels(graph, rows):
    return [graph.readable(row) for row in rows]


def test_shared_blocks_are_lost_and_come_back_in_both_rows(scene):
    store, copy, graph, rows = scene
    assert levels(graph, rows) == [64, 64]
    assert graph.missing(rows[0]) == []
    damage(store, chain_of(store, graph, 0)[1])
    assert levels(graph, rows) == [SIZE, SIZE]
    (bad,) = graph.missing(rows[1])
    assert bad.chain == chain_of(store, graph, 1)[1]
    with Rebuilder(store, replicas=[copy]) as rebuilder:
        assert graph.mend(rows[0], rebuilder) == 1
    # A replica is the same again, so nothing that stands on it is touched.
    assert levels(graph, rows) == [64, 64]
    assert graph.missing(rows[1]) == []


def test_a_recomputed_block_has_those_behind_it_made_again(scene):
    store, copy, graph, rows = scene
    damage(store, chain_of(store, graph, 0)[1])
    made = []

    def recompute(key: BlockKey) -> Block:
        made.append(key)
        at = key.chain
        payload = copy.fetch(key.group, key.layout, at)
        assert isinstance(at, Boundary)
        return Block(
            *(key.group, key.layout, at, at.index, at.length, payload.data),
            origin="rebuild",
        )

    with Rebuilder(store, recompute=recompute) as rebuilder:
        assert graph.mend(rows[0], rebuilder) == len(made) > 1
    for name in {key.group for key in made}:
        indices = [key.chain.index for key in made if key.group == name]
        assert indices == ([3] if "recent" in name else [1, 2, 3])
    # What the other prompt has behind block 1 stands on the former values, and so do
    # the recent states at its end.
    assert levels(graph, rows) == [64, SIZE]
    assert graph.missing(rows[1])
    for row in range(2):
        tokens = TOKENS[row]
        cache = ha.transforms.restore(store, CONFIG, tokens[None], capacity=96)
        assert cache.length.tolist() == [64]


def test_what_cannot_be_made_is_said(scene):
    store, _, graph, rows = scene
    damage(store, chain_of(store, graph, 0)[0])
    with (
        Rebuilder(store) as rebuilder,
        pytest.raises(LookupError, match="no source has the block"),
    ):
        graph.mend(rows[0], rebuilder)
    assert levels(graph, rows) == [0, 0]


def test_eviction_and_prefilling_again(scene, model):
    store, _, graph, rows = scene
    store.gc(0)
    assert levels(graph, rows) == [0, 0]
    prefill_through(store, model, TOKENS[:1], capacity=96)
    assert levels(graph, rows) == [64, 2 * SIZE]
    prefill_through(store, model, TOKENS[1:], capacity=96)
    assert levels(graph, rows) == [64, 64]


def test_forgotten_here_or_by_another_process(scene, model):
    store, _, graph, rows = scene
    store.forget([chain_of(store, graph, 0)[2]])
    assert levels(graph, rows) == [2 * SIZE, 64]
    with ha.store.open(store.url, model_id=store.model_id) as other:
        other.forget([chain_of(store, graph, 1)[1]])
    graph.refresh()
    assert levels(graph, rows) == [SIZE, SIZE]
    with ha.store.open(store.url, model_id=store.model_id) as other:
        prefill_through(other, model, TOKENS[:1], capacity=96)
    graph.refresh()
    assert levels(graph, rows) == [64, 2 * SIZE]


def test_rows_are_released(scene):
    store, _, graph, rows = scene
    damage(store, chain_of(store, graph, 0)[1])
    graph.release(rows[0])
    with pytest.raises(KeyError):
        graph.readable(rows[0])
    assert graph.readable(rows[1]) == SIZE
    graph.release(rows[1])
    # Held anew, a prompt begins with what the store has.
    again = graph.hold(TOKENS[1])
    assert graph.readable(again) == SIZE
    assert graph.readable(graph.hold(TOKENS[0, : SIZE - 1])) == 0
