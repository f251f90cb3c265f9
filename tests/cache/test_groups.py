"""The state graph: each rule of its table by hand, and all of them at random."""

import pytest

from hybrid_attn.cache import groups as groups_module
from hybrid_attn.cache.events import (
    TABLE,
    Append,
    Close,
    Effect,
    Evict,
    Fork,
    NewWeights,
    Open,
    Quantise,
    Quarantine,
    Realign,
    Rebuild,
    Rewind,
)
from hybrid_attn.cache.groups import TOKENS, Group, Node, StateGraph, meet
from hybrid_attn.testing.graph_campaign import GROUPS, random_campaign


def node(group: str, block: int, row: int = 0, cache: str = "a") -> Node:
    return Node(cache, row, group, block)


@pytest.fixture
def graph() -> StateGraph:
    """Row 0 of cache "a" with three blocks, all recent states kept."""
    graph = StateGraph(GROUPS)
    graph.apply(Open("a", 0, "model"))
    for _ in range(3):
        graph.apply(Append("a", 0))
    return graph


def effects(changes) -> dict[tuple[str, int], Effect]:
    return {(c.node.group, c.node.block): c.effect for c in changes}


def unreadable(graph: StateGraph) -> set[tuple[str, int]]:
    return {(n.group, n.block) for n in graph.nodes() if graph.read(n) is None}


def test_evicted_history_blocks_what_stands_above(graph):
    found = effects(graph.apply(Evict(node("hca", 1))))
    above = {("hca", 2), ("window", 1), ("window", 2), ("frontier", 1), ("frontier", 2)}
    assert found == {("hca", 1): Effect.DROPPED, **dict.fromkeys(above, Effect.BLOCKED)}
    assert unreadable(graph) == set(found)
    assert graph.rebuild_order(node("window", 2))[0] == node("hca", 1)
    found = effects(graph.apply(Rebuild(node("hca", 1))))
    assert found == {("hca", 1): Effect.UPDATED, **dict.fromkeys(above, Effect.CURRENT)}
    assert not unreadable(graph)
    assert graph.read(node("hca", 1)) == 2
    assert graph.rebuild_order(node("window", 2)) == []


def test_index_goes_with_its_entries(graph):
    found = effects(graph.apply(Evict(node("csa", 2))))
    assert found["csa.index", 2] is Effect.DROPPED
    graph.apply(Rebuild(node("csa", 2)))
    assert graph.read(node("csa.index", 2)) is None
    graph.apply(Rebuild(node("csa.index", 2)))
    assert not unreadable(graph)
    # Not the other way round: entries do not need their index to be what they are.
    graph.apply(Evict(node("csa.index", 2)))
    assert graph.read(node("csa", 2)) is not None


def test_other_values_must_be_followed(graph):
    graph.apply(Quantise(node("csa", 1), "csa.int8"))
    found = effects(graph.apply(Rebuild(node("csa", 1), exact=False)))
    assert found["csa", 1] is Effect.UPDATED
    assert found["csa", 2] is found["csa.index", 1] is Effect.REBUILD
    assert found["window", 1] is Effect.REBUILD
    assert found["csa.int8", 1] is Effect.STALE
    with pytest.raises(ValueError, match=r"cannot be rebuilt yet.*csa.*not current"):
        graph.apply(Rebuild(node("window", 2)))
    for _ in range(20):
        for waiting in graph.rebuild_order(node("window", 2)):
            if graph.read(waiting) is None:
                graph.apply(Rebuild(waiting))
    assert graph.read(node("window", 2)) is not None


def test_copy_outlives_its_evicted_source_but_no_doubt(graph):
    graph.apply(Quantise(node("csa", 0), "csa.int8"))
    graph.apply(Realign(node("csa.int8", 0), "csa.int8.256"))
    graph.apply(Evict(node("csa", 0)))
    # The chain goes on over the lower rung.
    assert graph.read(node("csa", 0)) is None
    assert graph.read(node("csa", 1)) is not None
    graph.apply(Evict(node("csa.int8", 0)))
    assert graph.read(node("csa.int8.256", 0)) is not None
    assert graph.read(node("window", 2)) is None  # the index went with the entries
    graph.apply(Quarantine(node("csa", 0)))
    assert graph.read(node("csa.int8.256", 0)) is None
    assert graph.read(node("csa", 1)) is None


def test_resident_doubt_spreads_and_a_replica_does_not_end_it(graph):
    graph.apply(Append("a", 0))
    found = effects(graph.apply(Quarantine(node("hca", 1), resident=True)))
    assert found["hca", 1] is Effect.INVALID
    assert found["hca", 2] is found["hca", 3] is found["window", 3] is Effect.REBUILD
    graph.apply(Rebuild(node("hca", 1)))
    assert graph.read(node("hca", 2)) is None
    # What is computed over doubtful blocks is doubtful from the start.
    found = effects(graph.apply(Append("a", 0)))
    assert found["hca", 4] is found["window", 4] is Effect.REBUILD
    assert found["csa", 4] is Effect.ADDED


def test_new_weights_end_all_but_the_tokens(graph):
    found = effects(graph.apply(NewWeights("model")))
    assert set(found.values()) == {Effect.INVALID}
    assert {name for name, _ in found} == {g.name for g in GROUPS if g.source is None}
    assert graph.read(node(TOKENS, 2)) == 1
    graph.apply(Rebuild(node("hca", 0)))
    assert graph.read(node("hca", 0)) == 2


def test_forks_share_until_they_part(graph):
    graph.apply(Fork("a", 0, "b", 7, blocks=2))
    there = node("hca", 1, row=7, cache="b")
    assert graph.references(node("hca", 1)) == graph.references(there) == 2
    assert graph.references(node("hca", 2)) == 1
    graph.apply(Append("b", 7))
    graph.apply(Rewind("a", 0, 1))
    assert graph.references(node("hca", 1)) == 0
    assert graph.references(there) == 1
    assert graph.read(node("window", 2, row=7, cache="b")) is not None
    # A shared block is one block: both rows hear of it.
    changes = graph.apply(Quarantine(node("hca", 0)))
    assert {(c.node.cache, c.node.block) for c in changes if c.node.group == "hca"} == {
        ("a", 0),
        ("b", 0),
        ("b", 1),
        ("b", 2),
    }
    graph.apply(Close("b", 7))
    assert {n.cache for n in graph.nodes()} == {"a"}
    # The slot is used again: nothing of the former row is read.
    graph.apply(Open("b", 7, "model"))
    assert graph.read(there) is None


def test_rewind_drops_copies_of_copies(graph):
    graph.apply(Quantise(node("csa", 2), "csa.int8"))
    graph.apply(Realign(node("csa.int8", 2), "csa.int8.256"))
    found = effects(graph.apply(Rewind("a", 0, 2)))
    assert set(found.values()) == {Effect.DROPPED}
    assert {name for name, _ in found} == {g.name for g in GROUPS} | {TOKENS}
    assert len(list(graph.nodes())) == 2 * 6


def test_meet_of_a_row(graph):
    families = {g.name: g.family for g in GROUPS if g.source is None}
    assert meet(graph.available("a", 0, 16), families) == 48
    graph.apply(Append("a", 0, recent=False))
    assert meet(graph.available("a", 0, 16), families) == 48
    graph.apply(Quarantine(node("csa.index", 1)))
    assert meet(graph.available("a", 0, 16), families) == 16


def test_refuses(graph):
    with pytest.raises(ValueError, match="row 0 of cache 'a' is open"):
        graph.apply(Open("a", 0, "model"))
    with pytest.raises(ValueError, match="cache 'z' has no open row 1"):
        graph.apply(Append("z", 1))
    with pytest.raises(ValueError, match="the row has 3 blocks"):
        graph.apply(Rewind("a", 0, 4))
    with pytest.raises(ValueError, match="holds tokens"):
        graph.apply(Evict(node(TOKENS, 0)))
    with pytest.raises(ValueError, match=r"'csa\.int8' is no group copied from hca"):
        graph.apply(Quantise(node("hca", 0), "csa.int8"))
    with pytest.raises(ValueError, match=r"block=9\) is unknown"):
        graph.apply(Evict(node("hca", 9)))
    with pytest.raises(TypeError, match="unknown event str"):
        graph.apply("rewind")
    with pytest.raises(ValueError, match="names 'x': expected one before it"):
        StateGraph([Group("i", "history", entries="x")])
    with pytest.raises(ValueError, match="expected unique names"):
        StateGraph([Group("i", "history"), Group("i", "recent")])
    assert not unreadable(graph)


@pytest.mark.parametrize("seed", range(3))
def test_random_events(seed):
    found = random_campaign(1500, seed)
    for key in ("violations", "withheld", "unreported"):
        assert found[f"graph_{key}"] == 0, key
    # Both answers must be common, or nothing was tested.
    assert 0.2 < found["graph_reads_given"] / found["graph_reads"] < 0.8
    assert found["graph_us_per_event"] > 0


def test_many_random_events():
    found = random_campaign(10_000, seed=10)
    assert found["graph_violations"] == found["graph_withheld"] == 0


def test_same_seed_same_campaign():
    one, other = random_campaign(200, 5), random_campaign(200, 5)
    one.pop("graph_us_per_event"), other.pop("graph_us_per_event")
    assert one == other


def _no_chain(block):
    before = block.trusted, block.readable, block.available
    judge(block)
    block.readable = block.trusted and block.present
    block.available = block.present
    return before != (block.trusted, block.readable, block.available)


def _no_versions(block):
    block.needs = [(need, edge, need.content) for need, edge, _ in block.needs]
    return judge(block)


judge = groups_module.judge


@pytest.mark.parametrize("broken", [_no_chain, _no_versions])
def test_campaign_finds_a_broken_graph(monkeypatch, broken):
    monkeypatch.setattr(groups_module, "judge", broken)
    if broken is _no_versions:  # marks alone would still hold it
        monkeypatch.setitem(TABLE, "rebuild, other values", {})
    assert random_campaign(1500, 0)["graph_violations"] > 0


@pytest.mark.parametrize("event", ["quarantine, resident", "new weights"])
def test_campaign_finds_a_missing_rule(monkeypatch, event):
    monkeypatch.setitem(TABLE, event, {})
    assert random_campaign(1500, 1)["graph_violations"] > 0
