"""Llama: tensor names of Hugging Face's form and of GGUF files."""

from collections.abc import Iterator

from hybrid_attn.config import ModelConfig
from hybrid_attn.weights.mapping import Entry, Piece

# (attribute path in a block, layout of Hugging Face's form, [(Hugging Face, GGUF)]).
Row = tuple[str, str, list[tuple[str, str]]]

_BLOCK: list[Row] = [
    ("mixer_norm.weight", "same", [("input_layernorm", "attn_norm")]),
    ("mixer.query_up.weight", "half_split", [("self_attn.q_proj", "attn_q")]),
    (
        "mixer.key_value.project.weight",
        "half_split",
        [("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v")],
    ),
    ("mixer.output_up.weight", "linear", [("self_attn.o_proj", "attn_output")]),
    ("feed_forward_norm.weight", "same", [("post_attention_layernorm", "ffn_norm")]),
    (
        "feed_forward.gate_up.weight",
        "linear",
        [("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up")],
    ),
    ("feed_forward.down.weight", "linear", [("mlp.down_proj", "ffn_down")]),
]
_TOP: list[Row] = [
    ("embedding", "same", [("embed_tokens", "token_embd")]),
    ("final_norm.weight", "same", [("norm", "output_norm")]),
]
_UNEMBED: Row = ("unembed.weight", "linear", [("lm_head", "output")])


def entries(config: ModelConfig) -> Iterator[Entry]:
    """Every parameter with its names in Hugging Face's form."""
    for path, layout, names, index in _rows(config):
        pieces = tuple(_hugging_face(name, index) for name, _ in names)
        head = config.head_dim if layout == "half_split" else 0
        yield Entry(path, layout, pieces, head_dim=head)


def gguf_entries(config: ModelConfig) -> Iterator[Entry]:
    """Every parameter with its names in a GGUF file.

    Row 2j + s of a head there is row s · h/2 + j of Hugging Face's: heads are stored
    interleaved, as they are here.
    """
    for path, layout, names, index in _rows(config):
        prefix = "" if index is None else f"blk.{index}."
        pieces = tuple((f"{prefix}{name}.weight",) for _, name in names)
        yield Entry(path, "linear" if layout == "half_split" else layout, pieces)


def ignored(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of names that a directory may hold beside the model's."""
    # Old releases store the rotary frequencies; tied ones may repeat the embedding.
    tied = (r"^lm_head\.weight$",) if config.tie_embeddings else ()
    return (r"\.rotary_emb\.inv_freq$", *tied)


def _rows(
    config: ModelConfig,
) -> Iterator[tuple[str, str, list[tuple[str, str]], int | None]]:
    for row in _TOP if config.tie_embeddings else [*_TOP, _UNEMBED]:
        yield *row, None
    for index in range(len(config.layers)):
        for path, layout, names in _BLOCK:
            yield f"blocks.{index}.{path}", layout, names, index


def _hugging_face(name: str, index: int | None) -> Piece:
    if name == "lm_head":
        return (f"{name}.weight",)
    inner = f"{name}.weight" if index is None else f"layers.{index}.{name}.weight"
    # A model without its head is stored without the prefix.
    return f"model.{inner}", inner
