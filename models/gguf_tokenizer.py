"""A tokenizer from GGUF metadata: tokens, merges, token types and the name of the pre-tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from muxk.models.chat_template import ChatTemplate
from muxk.models.errors import ModelError, damaged
from muxk.models.gguf_file import read_gguf
from muxk.models.resolve import GgufSource
from muxk.models.token_pieces import SPACE_MARK, byte_level_piece, sentencepiece_piece
from muxk.models.tokenizer import Tokenizer
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
"""Token types of ggml's `llama_token_type`."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UNTYPED = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
"""What llama.cpp does to vocabularies whose file does not say better."""


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text before it merges."""

    splits: tuple[str, ...]
    """Regular expressions that cut one after the other."""
    ignore_merges: bool = False
    """Whether a cut that is a token as a whole is taken at once."""
    adds_bos: bool = False
    """Whether prompts begin with the token of a beginning where the file does not say."""


LLAMA3_KIND = PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True)
QWEN2_KIND = PreTokenizer((QWEN2,))
UNTYPED_KIND = PreTokenizer(UNTYPED)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": UNTYPED_KIND,
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "gpt-2": PreTokenizer((GPT2,)),
    "llama-bpe": LLAMA3_KIND,
    "llama3": LLAMA3_KIND,
    "llama-v3": LLAMA3_KIND,
    "qwen2": QWEN2_KIND,
    "deepseek-r1-qwen": QWEN2_KIND,
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, adds_bos=True),
}
"""By `tokenizer.ggml.pre`, in llama.cpp's names; what each does is from its `llama-vocab.cpp`."""
END_NAMES = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>"}
)
"""Control tokens that end an answer even where the metadata names another one."""


def tokenizer_from_gguf(source: GgufSource) -> Tokenizer:
    """Build it. ModelError names what the metadata lacks or what is not supported."""
    file = read_gguf(source.path)
    metadata, place = file.metadata, str(file.path)
    kind = str(metadata.get("tokenizer.ggml.model"))
    if kind not in KINDS:
        raise ModelError(
            f"{place}: tokenizer model {kind!r} is not supported in a GGUF file; supported: 'gpt2' "
            "(byte-level BPE) and 'llama' (SentencePiece). Use a checkpoint folder with tokenizer.json"
        )
    make_encoder, piece_of = KINDS[kind]
    tokens = _strings(metadata, "tokenizer.ggml.tokens", place)
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise damaged(file.path, f"its {len(tokens)} tokens do not have {len(tokens)} token types")
    try:
        encoder = make_encoder(metadata, tokens, place)
        encoder.add_special_tokens(_added(tokens, types, CONTROL))
        encoder.add_tokens(_added(tokens, types, USER_DEFINED))
    except ModelError:
        raise
    except Exception as error:  # The library raises plain Exception, such as for a merge that is no token.
        raise ModelError(f"{place}: its tokenizer cannot be built ({error})") from None
    return Tokenizer(
        encoder=encoder,
        pieces=[_piece(token, type_, piece_of) for token, type_ in zip(tokens, types, strict=True)],
        special_ids=frozenset(index for index, type_ in enumerate(types) if type_ in (UNKNOWN, CONTROL)),
        end_ids=_end_ids(metadata, tokens, types),
        template=_template(metadata, tokens, source.name),
        name=source.name,
    )


def _byte_level(metadata: dict[str, Any], tokens: list[str], place: str) -> tokenizers.Tokenizer:
    name = str(metadata.get("tokenizer.ggml.pre") or "default")
    kind = PRE_TOKENIZERS.get(name)
    if kind is None:
        supported = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"{place}: pre-tokenizer {name!r} is not supported; supported: {supported}")
    merges = [_merge(text, place) for text in _strings(metadata, "tokenizer.ggml.merges", place)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    encoder = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind.ignore_merges)
    )
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in kind.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    if kind is QWEN2_KIND:
        encoder.normalizer = normalizers.NFC()
    return _with_bos(encoder, metadata, tokens, kind.adds_bos, place)


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], place: str) -> tokenizers.Tokenizer:
    """Text is not cut; a space is put before it, and before what follows each special token."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{place}: metadata field 'tokenizer.ggml.scores' does not fit the tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = _token(metadata, "unknown", tokens) or None
    merges = _merges_of_scores(tokens, scores, vocabulary)
    encoder = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
    encoder.normalizer = normalizers.Sequence(steps)
    return _with_bos(encoder, metadata, tokens, True, place)


def _merges_of_scores(
    tokens: list[str], scores: list[float], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """The pairs that make each token, the best token first, in the order that transformers has them."""
    pairs: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in vocabulary and second in vocabulary:
                pairs.append((-score, -len(first), -len(second), first, second))
    pairs.sort(key=lambda pair: pair[:3])
    return [(first, second) for *_, first, second in pairs]


def _with_bos(
    encoder: tokenizers.Tokenizer, metadata: dict[str, Any], tokens: list[str], by_default: bool, place: str
) -> tokenizers.Tokenizer:
    if metadata.get("tokenizer.ggml.add_bos_token", by_default):
        index = _token_id(metadata, "bos", tokens, place)
        encoder.post_processor = processors.TemplateProcessing(
            single=["BOS", "$A"], special_tokens=[("BOS", index)]
        )
    return encoder


def _added(tokens: list[str], types: list[int], wanted: int) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=wanted == CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind == wanted
    ]


def _merge(text: str, place: str) -> tuple[str, str]:
    first, space, second = text.partition(" ")
    if not space:
        raise ModelError(f"{place}: merge {text!r} is not two tokens")
    return first, second


def _piece(token: str, kind: int, piece_of: Callable[[str], bytes]) -> bytes:
    plain = kind in (UNKNOWN, CONTROL, USER_DEFINED)
    return token.encode("utf-8") if plain else piece_of(token)


MakeEncoder = Callable[[dict[str, Any], list[str], str], tokenizers.Tokenizer]
KINDS: Mapping[str, tuple[MakeEncoder, Callable[[str], bytes]]] = {
    "gpt2": (_byte_level, byte_level_piece),
    "llama": (_sentencepiece, sentencepiece_piece),
}
"""By `tokenizer.ggml.model`: what makes the encoder, and the bytes behind a token."""


def _end_ids(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> frozenset[int]:
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == CONTROL and token in END_NAMES
    ]
    return frozenset([index for index in named if isinstance(index, int)] + known)


def _template(metadata: dict[str, Any], tokens: list[str], name: str) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _token(metadata, "bos", tokens), _token(metadata, "eos", tokens), name)


def _token(metadata: dict[str, Any], name: str, tokens: list[str]) -> str:
    """The text of a special token, or nothing where the metadata names none."""
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else ""


def _token_id(metadata: dict[str, Any], name: str, tokens: list[str], place: str) -> int:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise ModelError(f"{place}: tokenizer.ggml.{name}_token_id is {index!r}, wanted a token id")
    return index


def _strings(metadata: dict[str, Any], key: str, place: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise ModelError(f"{place}: metadata field {key!r} is missing; the file holds no tokenizer")
    return values
