"""From what both sides measured to summary.json, the table, report.md and a figure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.peers.config import Config, Repeats, label
from experiments.peers.sizes import ACTIVE_LIMIT, feed_forward_parameters
from experiments.peers.torch_side import SHORT

BUSY = 0.05
"""Share of the cores in other hands above which the report doubts its figures."""

TABLE = (
    "context",
    "",
    "transformers",
    "hybrid_attn",
    "times faster",
    "full block",
    "times faster",
)
FULL = "hybrid_attn_full_block"


def _cases(answer: Mapping[str, Any]) -> dict[str, dict]:
    return {case["name"]: case for case in answer["cases"]}


def ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """How many times faster ours is: rates as ours / theirs, times the other way."""
    return {
        "prefill": ours["prefill_tokens_per_s"] / theirs["prefill_tokens_per_s"],
        "decode": theirs["decode_ms_per_token"] / ours["decode_ms_per_token"],
        "one_thread": theirs["one_thread_decode_ms_per_token"]
        / ours["decode_ms_per_token"],
        "stepwise": theirs["decode_ms_per_token"] / ours["step_ms_per_token"],
    }


def summarise(config: Config, results: Mapping[str, Any]) -> dict[str, Any]:
    """The flat keys of summary.json, all under `peers.`.

    Args:
        config: what was asked.
        results: answers of `transformers`, `hybrid_attn`, `hybrid_attn_full_block`
            (the peer's own weights) and, where they were asked for,
            `transformers_one_stream` and `growth`.
    """
    summary: dict[str, Any] = {}
    theirs = _cases(results["transformers"])
    ours = _cases(results["hybrid_attn"])
    full = _cases(results[FULL])
    for context in config.contexts:
        name = label(context)
        ratio = ratios(ours[name], theirs[name])
        summary |= {
            f"prefill_ratio_{name}": ratio["prefill"],
            f"decode_ratio_{name}": ratio["decode"],
            f"decode_ratio_{name}_stepwise": ratio["stepwise"],
            f"decode_ratio_{name}_one_thread": ratio["one_thread"],
            f"transformers_one_thread_decode_ms_per_token_{name}": theirs[name][
                "one_thread_decode_ms_per_token"
            ],
        }
        ratio = ratios(full[name], theirs[name])
        summary |= {
            f"full_block_prefill_ratio_{name}": ratio["prefill"],
            f"full_block_decode_ratio_{name}": ratio["decode"],
            f"full_block_decode_ratio_{name}_stepwise": ratio["stepwise"],
            f"full_block_logit_difference_{name}": full[name]["logit_difference"],
        }
        for side, cases in (
            ("transformers", theirs),
            ("hybrid_attn", ours),
            (FULL, full),
        ):
            case = cases[name]
            summary[f"{side}_prefill_tokens_per_s_{name}"] = case[
                "prefill_tokens_per_s"
            ]
            summary[f"{side}_decode_ms_per_token_{name}"] = case["decode_ms_per_token"]
            summary[f"{side}_decode_ms_fastest_{name}"] = 1e3 * min(case["decode_s"])
            if "step_ms_per_token" in case:
                summary[f"{side}_step_ms_per_token_{name}"] = case["step_ms_per_token"]
    longest = label(config.contexts[-1])
    chunked = theirs[f"{longest}_chunked"]
    ratio = ratios(ours[longest], chunked)
    summary |= {
        f"prefill_ratio_{longest}_chunked": ratio["prefill"],
        f"decode_ratio_{longest}_chunked": ratio["decode"],
        f"transformers_prefill_tokens_per_s_{longest}_chunked": chunked[
            "prefill_tokens_per_s"
        ],
        f"transformers_decode_ms_per_token_{longest}_chunked": chunked[
            "decode_ms_per_token"
        ],
        f"transformers_chunked_logit_difference_{longest}": chunked[
            "difference_from_first"
        ],
        f"transformers_largest_logit_{longest}": chunked["largest_logit"],
    }
    summary[f"full_block_logit_difference_{SHORT}"] = results[FULL][
        "short_logit_difference"
    ]
    if "transformers_one_stream" in results:
        for name, case in _cases(results["transformers_one_stream"]).items():
            for key in ("prefill_tokens_per_s", "decode_ms_per_token"):
                summary[f"transformers_one_stream_{key}_{name}"] = case[key]
    if "growth" in results:
        summary |= growth_keys(config, results["growth"])
    for side, answer in results.items():
        for key, value in answer.get("parameters", {}).items():
            summary[f"{side}_{key}"] = value
        summary[f"{side}_other_load"] = answer.get("other_load")
        if "versions" in answer:
            summary[f"{side}_versions"] = _versions(answer)
    summary["machine_was_idle"] = not doubts(results)
    return {f"peers.{key}": value for key, value in summary.items()}


def growth_keys(config: Config, found: Mapping[str, float]) -> dict[str, float]:
    """Keys such as ``decode_growth_4k_256k`` from what `growth.measure` returned."""
    names = {context: label(context) for context in config.growth.contexts}
    ends = f"{names[config.growth.contexts[0]]}_{names[config.growth.contexts[-1]]}"
    keys = {
        f"decode_growth_{ends}": found["decode_growth"],
        f"decode_growth_{ends}_stepwise": found["step_growth"],
        "decode_growth_prefilled_over_filled": found["prefilled"],
    }
    for context, name in names.items():
        keys[f"growth_decode_ms_per_token_{name}"] = found[f"decode_ms_{context}"]
        keys[f"growth_step_ms_per_token_{name}"] = found[f"step_ms_{context}"]
    return keys


def growth_lines(config: Config, summary: Mapping[str, Any]) -> list[str]:
    """How decoding slows down with the context, as Markdown; none if not measured."""
    if not config.growth.contexts:
        return []
    names = [label(context) for context in config.growth.contexts]
    ends = f"{names[0]}_{names[-1]}"

    def of(key: str) -> float:
        return summary[f"peers.{key}"]

    def times(key: str) -> str:
        texts = [f"{of(f'growth_{key}_ms_per_token_{name}'):.3g}" for name in names]
        return f"{', '.join(texts)} ms/token at {', '.join(names)}"

    return [
        f"- Ours at longer contexts: {times('decode')} through `ha.generate`, × "
        f"{of(f'decode_growth_{ends}'):.3g}; {times('step')} token by token, × "
        f"{of(f'decode_growth_{ends}_stepwise'):.3g}. These caches were not prefilled "
        "but filled with random numbers under the right counts; a prefilled one of "
        f"{names[0]} takes {of('decode_growth_prefilled_over_filled'):.3g} × as long."
    ]


def _versions(answer: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in answer["versions"].items())


def table_rows(config: Config, summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows under `TABLE`, as text."""
    rows = []
    for context in config.contexts:
        name = label(context)
        for what, key, unit in (
            ("prefill", "prefill_tokens_per_s", "tokens/s"),
            ("decode", "decode_ms_per_token", "ms/token"),
        ):
            sides = ("transformers", "hybrid_attn", FULL)
            theirs, ours, full = (
                _number(summary[f"peers.{side}_{key}_{name}"]) for side in sides
            )
            ratio = summary[f"peers.{what}_ratio_{name}"]
            full_ratio = summary[f"peers.full_block_{what}_ratio_{name}"]
            rows.append(
                (
                    name,
                    f"{what}, {unit}",
                    theirs,
                    ours,
                    f"{ratio:.3g}",
                    full,
                    f"{full_ratio:.3g}",
                )
            )
    return rows


def _counts(repeats: Repeats) -> str:
    counts = {repeats.prefill, repeats.prefill_longest}
    return " or ".join(str(count) for count in sorted(counts, reverse=True))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def doubts(results: Mapping[str, Any]) -> list[str]:
    """What speaks against the figures: cores that others used meanwhile."""
    found = []
    for side, answer in results.items():
        load = answer.get("other_load")
        if load is not None and load > BUSY:
            found.append(
                f"while {side} was measured, other processes used {100 * load:.0f} % of"
                " the cores: its times are too long and no ratio to them is to be"
                " quoted; measure again on an idle machine"
            )
    return found


def size_lines(config: Config, results: Mapping[str, Any]) -> list[str]:
    """The arithmetic of the active sizes, as lines of Markdown."""
    model, experts = config.model(), config.experts
    layers = len(model.layers)
    theirs = results["transformers"]["parameters"]
    ours = results["hybrid_attn"]["parameters"]
    weights = feed_forward_parameters(model.hidden_size, experts.active_width, layers)
    lines = [
        f"- transformers: {experts.routed} routed experts, of which a token uses"
        f" {experts.per_token}, and {experts.shared} shared: ({experts.per_token} +"
        f" {experts.shared}) × width {experts.width} = {experts.active_width} active;"
        f" 3 × {model.hidden_size} × {experts.active_width} × {layers} layers ="
        f" {weights:,} active weights (counted in the model:"
        f" {theirs['feed_forward_active']:,}).",
        f"- hybrid_attn: dense SwiGLU of width {model.feed_forward_size}: 3 ×"
        f" {model.hidden_size} × {model.feed_forward_size} × {layers} ="
        f" {ours['feed_forward_active']:,}, all active.",
        f"- At most {ACTIVE_LIMIT:,} parameters active per token, both vocabulary"
        f" matrices ({model.vocab_size} × {model.hidden_size} each) counted in full:",
        "",
        "| | total | active | total, no vocabulary | active, no vocabulary |",
        "|---|---:|---:|---:|---:|",
    ]
    keys = [
        f"parameters_{kind}{suffix}"
        for suffix in ("", "_without_embeddings")
        for kind in ("total", "active")
    ]
    full = results[FULL]["parameters"]
    for side, counts in (
        ("transformers", theirs),
        ("hybrid_attn", ours),
        ("hybrid_attn, full block", full),
    ):
        cells = " | ".join(f"{counts[key]:,}" for key in keys)
        lines.append(f"| {side} | {cells} |")
    return lines


def markdown(
    config: Config,
    results: Mapping[str, Any],
    summary: Mapping[str, Any],
    environment: Mapping[str, Any],
    command: str,
) -> str:
    """The text of report.md."""
    longest = label(config.contexts[-1])
    theirs, model = results["transformers"], config.model()

    def of(key: str) -> float:
        return summary[f"peers.{key}"]

    names = [label(context) for context in config.contexts]
    difference = max(of(f"full_block_logit_difference_{name}") for name in names)
    rows = ["| " + " | ".join(row) + " |" for row in table_rows(config, summary)]
    chunk = f"_{longest}_chunked"
    lines = [
        "# hybrid_attn beside transformers' DeepSeek-V4",
        "",
        f"    {command}",
        "",
        f"{environment['cpu_count']} CPU cores ({environment['platform']}), batch 1,"
        " float32 on both sides, one side after the other. transformers: attention"
        f" `{theirs['attention']}`, experts `{theirs['experts']}`,"
        f" {theirs['threads']} threads; {_versions(theirs)}; measured"
        f" {theirs['measured_at']}. hybrid_attn:"
        f" {_versions(results['hybrid_attn'])}; measured"
        f" {results['hybrid_attn']['measured_at']}.",
        "",
        *[f"**Caution:** {doubt}." for doubt in doubts(results)],
        "",
        "| " + " | ".join(TABLE) + " |",
        "|---|---|---:|---:|---:|---:|---:|",
        *rows,
        "",
        "Prefill, from an empty cache to the last token's logits: transformers in one"
        " `forward(use_cache=True, logits_to_keep=1)`, ours through"
        f" `ha.prefill(logits='last')`, whose grid has blocks of"
        f" {results['hybrid_attn']['block_tokens']} tokens; medians of"
        f" {_counts(config.transformers)} and {_counts(config.hybrid_attn)} runs."
        " Decode, greedy, on that cache: transformers the median of"
        f" {config.transformers.decode_steps} calls of `forward`, ours through"
        f" `ha.generate`, the median of {config.hybrid_attn.generate} calls divided by"
        f" their {config.hybrid_attn.generate_tokens} tokens. Compilation is not"
        " counted.",
        "",
        "hybrid_attn has the same attention and a dense feed-forward of the same active"
        " width. Full block is the peer's own model, with hyper-connections and"
        " experts, its weights read by `ha.weights.load`; it reads the peer's tokens."
        f" After {SHORT} of them its last logits differ from the peer's by at most"
        f" {of(f'full_block_logit_difference_{SHORT}'):.2g}, at the contexts of the"
        f" table by {difference:.2g}, the largest being"
        f" {of(f'transformers_largest_logit_{longest}'):.2g}. Random weights make near"
        " ties among experts and entries, which rounding decides otherwise now and"
        " then: the peer's own logits change by"
        f" {of(f'transformers_chunked_logit_difference_{longest}'):.2g} when its"
        " prompt is cut into pieces.",
        "",
        "## Beside the headline",
        "",
        f"- The peer's prefill of {longest} in one forward holds every query against"
        f" every key at once. In pieces of {config.chunk} tokens it reaches"
        f" {of(f'transformers_prefill_tokens_per_s{chunk}'):,.0f} tokens/s, against"
        f" which ours is {of(f'prefill_ratio{chunk}'):.3g} ×; it then decodes at"
        f" {of(f'transformers_decode_ms_per_token{chunk}'):.3g} ms/token (ratio"
        f" {of(f'decode_ratio{chunk}'):.3g}). Its logits then differ from the single"
        f" forward's by {of(f'transformers_chunked_logit_difference_{longest}'):.2g},"
        f" the largest being {of(f'transformers_largest_logit_{longest}'):.2g}.",
        "- Ours token by token through `ha.compile_step`, each waited for by the host"
        f" ({config.hybrid_attn.decode_steps} of them):"
        f" {of(f'hybrid_attn_step_ms_per_token_{longest}'):.3g} ms/token at {longest}"
        f" (ratio {of(f'decode_ratio_{longest}_stepwise'):.3g}), full block"
        f" {of(f'{FULL}_step_ms_per_token_{longest}'):.3g} (ratio"
        f" {of(f'full_block_decode_ratio_{longest}_stepwise'):.3g}).",
        "- The peer decoding with one thread:"
        f" {of(f'transformers_one_thread_decode_ms_per_token_{longest}'):.3g} ms/token"
        f" at {longest}, our ratio to that"
        f" {of(f'decode_ratio_{longest}_one_thread'):.3g}.",
    ]
    if "growth" in results:
        lines += growth_lines(config, summary)
    if "transformers_one_stream" in results:
        name = label(config.contexts[0])
        control = "transformers_one_stream"
        lines.append(
            "- DeepSeek-V4 has hyper-connections (four residual streams), our model"
            " with the dense feed-forward has one. The peer with one stream and one"
            " Sinkhorn iteration:"
            f" {of(f'{control}_prefill_tokens_per_s_{name}'):,.0f} tokens/s and"
            f" {of(f'{control}_decode_ms_per_token_{name}'):.3g} ms/token at {name},"
            f" {of(f'{control}_decode_ms_per_token{chunk}'):.3g} ms/token at {longest}"
            " after a chunked prefill."
        )
    lines += [
        "",
        "## Sizes",
        "",
        f"Both: hidden {model.hidden_size}, layers"
        f" {', '.join(layer.kind for layer in model.layers)}, {model.heads} heads ×"
        f" {model.head_dim}, window {model.window}, ratios {model.csa_ratio} and"
        f" {model.hca_ratio}, top-k {model.top_k}, indexer {model.index_heads} ×"
        f" {model.index_dim}, query rank {model.query_rank}, {model.output_groups}"
        f" output groups of rank {model.output_rank}, vocabulary {model.vocab_size};"
        " random weights.",
        "",
        *size_lines(config, results),
        "",
    ]
    return "\n".join(lines)


def draw(config: Config, summary: Mapping[str, Any], path: Path) -> None:
    """Draws the figures of every side, from summary.json's values alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [label(context) for context in config.contexts]
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.2), layout="constrained")
    for axis, key, title in (
        (axes[0], "prefill_tokens_per_s", "prefill, tokens/s (more is better)"),
        (axes[1], "decode_ms_per_token", "decode, ms/token (less is better)"),
    ):
        sides = ("transformers", "hybrid_attn", FULL)
        for offset, side in zip((-0.28, 0.0, 0.28), sides, strict=True):
            values = [summary[f"peers.{side}_{key}_{name}"] for name in names]
            places = [index + offset for index in range(len(names))]
            bars = axis.bar(places, values, width=0.26, label=side)
            axis.bar_label(bars, labels=list(map(_number, values)), fontsize=7)
        axis.set_xticks(range(len(names)), [f"{name} context" for name in names])
        axis.margins(y=0.15)
        axis.set_title(title, fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
