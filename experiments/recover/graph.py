"""Random events on the graph of cache groups, judged by a model of the values."""

from collections.abc import Mapping, Sequence

_SUMS = (
    "graph_violations",
    "graph_withheld",
    "graph_unreported",
    "graph_reads",
    "graph_reads_given",
    "graph_refused",
)


def run_graph(events: int, seed: int) -> dict[str, float]:
    """`random_campaign` of so many events."""
    from hybrid_attn.testing.graph_campaign import random_campaign

    return random_campaign(events, seed)


def merged(pieces: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of several campaigns, and microseconds an event in the mean."""
    events = sum(piece["events"] for piece in pieces)
    spent = sum(piece["events"] * piece["graph_us_per_event"] for piece in pieces)
    result: dict[str, float] = {
        key: sum(piece[key] for piece in pieces) for key in _SUMS
    }
    return {"graph_events": events, **result, "graph_us_per_event": spent / events}
