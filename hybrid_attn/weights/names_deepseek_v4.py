"""DeepSeek-V4: tensor names of Hugging Face's form and of the official release.

Names and shapes as transformers 5.24 writes them, and as the official files have them
(`layers.0.attn.wq_a.weight`; experts one by one).
"""

from collections.abc import Iterator

from hybrid_attn.config import ModelConfig
from hybrid_attn.weights.mapping import Entry, Piece

# Draft layers are no part of the model.
IGNORED = (r"(^|\.)mtp\.",)

# (attribute path in a block, layout, [(Hugging Face name, official names)]).
Row = tuple[str, str, list[tuple[str, ...]]]

_BLOCK: list[Row] = [
    ("mixer_norm.weight", "same", [("input_layernorm.weight", "attn_norm.weight")]),
    (
        "feed_forward_norm.weight",
        "same",
        [("post_attention_layernorm.weight", "ffn_norm.weight")],
    ),
    ("mixer_hyper.mix.project.weight", "linear", [("attn_hc.fn", "hc_attn_fn")]),
    ("mixer_hyper.base", "same", [("attn_hc.base", "hc_attn_base")]),
    ("mixer_hyper.scale", "same", [("attn_hc.scale", "hc_attn_scale")]),
    ("feed_forward_hyper.mix.project.weight", "linear", [("ffn_hc.fn", "hc_ffn_fn")]),
    ("feed_forward_hyper.base", "same", [("ffn_hc.base", "hc_ffn_base")]),
    ("feed_forward_hyper.scale", "same", [("ffn_hc.scale", "hc_ffn_scale")]),
]

# Under self_attn and attn.
_ATTENTION: list[Row] = [
    ("query_down.weight", "linear", [("q_a_proj.weight", "wq_a.weight")]),
    ("query_down_norm.weight", "same", [("q_a_norm.weight", "q_norm.weight")]),
    ("query_up.weight", "linear", [("q_b_proj.weight", "wq_b.weight")]),
    ("key_value.project.weight", "linear", [("kv_proj.weight", "wkv.weight")]),
    # `save_pretrained` of transformers 5.24 turns kv_norm into norm as it goes back to
    # the official names.
    (
        "key_value.norm.weight",
        "same",
        [("kv_norm.weight", "kv_norm.weight", "norm.weight")],
    ),
    ("sink", "same", [("sinks", "attn_sink")]),
    ("output_down.weight", "grouped", [("o_a_proj.weight", "wo_a.weight")]),
    ("output_up.weight", "linear", [("o_b_proj.weight", "wo_b.weight")]),
]


def _compressor(ours: str, norm: str, theirs: str, official: str) -> list[Row]:
    return [
        (
            f"{ours}.project.weight",
            "linear",
            [
                (f"{theirs}.kv_proj.weight", f"{official}.wkv.weight"),
                (f"{theirs}.gate_proj.weight", f"{official}.wgate.weight"),
            ],
        ),
        (
            f"{ours}.slot_score",
            "same",
            [(f"{theirs}.position_bias", f"{official}.ape")],
        ),
        (norm, "same", [(f"{theirs}.kv_norm.weight", f"{official}.norm.weight")]),
    ]


_COMPRESSED = _compressor("compressor", "entry_norm.weight", "compressor", "compressor")
_INDEXED: list[Row] = [
    *_compressor(
        "indexer.compressor",
        "indexer.norm.weight",
        "compressor.indexer",
        "indexer.compressor",
    ),
    (
        "indexer.query.weight",
        "linear",
        [("compressor.indexer.q_b_proj.weight", "indexer.wq_b.weight")],
    ),
    (
        "indexer.weight.weight",
        "linear",
        [
            (
                "compressor.indexer.scorer.weights_proj.weight",
                "indexer.weights_proj.weight",
            )
        ],
    ),
]

# Under mlp and ffn.
_SHARED: list[Row] = [
    ("router.score.weight", "linear", [("gate.weight", "gate.weight")]),
    (
        "shared.gate_up.weight",
        "linear",
        [
            ("shared_experts.gate_proj.weight", "shared_experts.w1.weight"),
            ("shared_experts.up_proj.weight", "shared_experts.w3.weight"),
        ],
    ),
    (
        "shared.down.weight",
        "linear",
        [("shared_experts.down_proj.weight", "shared_experts.w2.weight")],
    ),
]
_HASHED: Row = ("router.table", "table", [("gate.tid2eid", "gate.tid2eid")])
_BIASED: Row = (
    "router.bias",
    "same",
    [("gate.e_score_correction_bias", "gate.bias")],
)

_TOP: list[tuple[str, str, Piece]] = [
    ("embedding", "same", ("model.embed_tokens.weight", "embed.weight")),
    ("hyper_head.mix.project.weight", "linear", ("model.hc_head.hc_fn", "hc_head_fn")),
    ("hyper_head.base", "same", ("model.hc_head.hc_base", "hc_head_base")),
    ("hyper_head.scale", "same", ("model.hc_head.hc_scale", "hc_head_scale")),
    ("final_norm.weight", "same", ("model.norm.weight", "norm.weight")),
]
_UNEMBED = ("unembed.weight", "linear", ("lm_head.weight", "head.weight"))


def entries(config: ModelConfig) -> Iterator[Entry]:
    """Every parameter of the model, in the order of the layers."""
    tops = _TOP if config.tie_embeddings else [*_TOP, _UNEMBED]
    for path, layout, names in tops:
        yield Entry(path, layout, (names,))
    for index, layer in enumerate(config.layers):
        yield from _rows(index, "", "", "", _BLOCK)
        attention = [*_ATTENTION]
        if layer.kind in ("csa", "hca"):
            attention += _COMPRESSED
        if layer.kind == "csa":
            attention += _INDEXED
        yield from _rows(index, "mixer.", "self_attn.", "attn.", attention)
        assert config.moe is not None
        routing = _HASHED if index in config.moe.hash_layers else _BIASED
        shared = [*_SHARED, routing]
        yield from _rows(index, "feed_forward.", "mlp.", "ffn.", shared)
        yield from _experts(index, config.moe.experts)


def _names(index: int, theirs: str, *official: str) -> Piece:
    return (
        f"model.layers.{index}.{theirs}",
        *(f"{top}layers.{index}.{name}" for name in official for top in ("", "model.")),
    )


def _rows(
    index: int, ours: str, theirs: str, official: str, rows: list[Row]
) -> Iterator[Entry]:
    for path, layout, names in rows:
        pieces = tuple(
            _names(index, theirs + hugging, *(official + name for name in released))
            for hugging, *released in names
        )
        yield Entry(f"blocks.{index}.{ours}{path}", layout, pieces)


def _experts(index: int, experts: int) -> Iterator[Entry]:
    for path, stacked, parts in (
        ("gate_up", "gate_up_proj", (("gate_proj", "w1"), ("up_proj", "w3"))),
        ("down", "down_proj", (("down_proj", "w2"),)),
    ):
        yield Entry(
            f"blocks.{index}.feed_forward.experts.{path}",
            "experts",
            ((f"model.layers.{index}.mlp.experts.{stacked}",),),
            experts=tuple(
                tuple(
                    _names(
                        index,
                        f"mlp.experts.{expert}.{hugging}.weight",
                        f"ffn.experts.{expert}.{released}.weight",
                    )
                    for hugging, released in parts
                )
                for expert in range(experts)
            ),
        )
