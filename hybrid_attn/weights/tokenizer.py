"""Tokenizers of checkpoints, as objects of the package `tokenizers`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_attn.weights.fields import Fields, expect
from hybrid_attn.weights.files import WeightsError, listed
from hybrid_attn.weights.gguf_files import read_metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How text is cut before merging, by the name that GGUF gives it. Each rule isolates
# its matches in what the rules before it left.
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CUTS = {
    "gpt-2": _GPT2,
    "smollm": (r"\p{N}", *_GPT2),
    "llama-bpe": _LLAMA3,
}
_CONTROL, _USER_DEFINED = 3, 4


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """The tokenizer of a .gguf file, or of a directory with tokenizer.json.

    Of GGUF, byte-level BPE is supported (``tokenizer.ggml.model`` "gpt2") with the
    cuts "gpt-2", "smollm" and "llama-bpe"; token ids are those of the file.

    Returns:
      `tokenizers.Tokenizer`: ``encode(text).ids``, ``decode(ids)``.

    Raises:
      ValueError: a damaged file or one without a tokenizer, by name; a kind of
        tokenizer that is not supported, by field.
      ModuleNotFoundError: the package `tokenizers` is not installed.
    """
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tokenizers of checkpoints need the package tokenizers: "
            "pip install 'hybrid_attn[pretrained]'"
        ) from error
    path = Path(path)
    if path.suffix == ".gguf":
        return _from_metadata(read_metadata(path), str(path))
    file = path / "tokenizer.json"
    if not file.is_file():
        raise WeightsError(
            f"{path}: expected a .gguf file or a directory with tokenizer.json"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    # The package raises nothing narrower.
    except Exception as error:
        raise WeightsError(f"{file}: not a tokenizer ({error})") from error


def _from_metadata(values: Mapping[str, Any], where: str) -> "Tokenizer":
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing

    fields = Fields(dict(values), where)
    expect("tokenizer.ggml.model", fields["tokenizer.ggml.model"], "gpt2", where=where)
    pre = fields.get("tokenizer.ggml.pre", "gpt-2")
    expect("tokenizer.ggml.pre", pre, *_CUTS, where=where)
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise WeightsError(
            f"{where}: tokenizer.ggml.token_type has {len(types)} values for "
            f"{len(tokens)} tokens"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    unknown = [
        merge
        for merge, pair in zip(merges, pairs, strict=True)
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys()
    ]
    if unknown or len(vocabulary) != len(tokens):
        raise WeightsError(
            f"{where}: tokenizer.ggml.tokens holds a token twice, or lacks one that "
            f"tokenizer.ggml.merges makes: {listed(unknown, 5)}"
        )
    # A token of the vocabulary that no merge reaches is found whole.
    model = BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in _CUTS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, its in zip(tokens, types, strict=True)
                if its == kind
            ]
        )
    if fields.get("tokenizer.ggml.add_bos_token", False):
        first = fields["tokenizer.ggml.bos_token_id"]
        if not 0 <= first < len(tokens):
            raise WeightsError(
                f"{where}: tokenizer.ggml.bos_token_id={first}: expected "
                f"0..{len(tokens) - 1}"
            )
        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[first]} $A", special_tokens=[(tokens[first], first)]
        )
    return tokenizer
