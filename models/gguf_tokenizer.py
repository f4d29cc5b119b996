"""A tokenizer from GGUF metadata: tokens, merges, token types and the name of the pre-tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from muxk.models.chat_template import ChatTemplate
from muxk.models.errors import ModelError, damaged
from muxk.models.gguf_file import read_gguf
from muxk.models.resolve import GgufSource
from muxk.models.token_pieces import byte_level_piece
from muxk.models.tokenizer import Tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

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
SPLITS: Mapping[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", GPT2),
    "gpt-2": (GPT2,),
    "llama-bpe": (LLAMA3,),
    "llama3": (LLAMA3,),
    "qwen2": (QWEN2,),
}
"""Regular expressions that cut text one after the other, by `tokenizer.ggml.pre` (llama.cpp's names)."""
END_NAMES = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "</s>"})
"""Control tokens that end an answer even where the metadata names another one."""


def tokenizer_from_gguf(source: GgufSource) -> Tokenizer:
    """Build it. ModelError names what the metadata lacks or what is not supported."""
    file = read_gguf(source.path)
    metadata, place = file.metadata, str(file.path)
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{place}: tokenizer model {kind!r} is not supported in a GGUF file (supported: 'gpt2', which is "
            "byte-level BPE); use a checkpoint folder with tokenizer.json"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens", place)
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise damaged(file.path, f"{len(tokens)} tokens, but {len(types)} token types")
    return Tokenizer(
        encoder=_encoder(metadata, tokens, types, place),
        pieces=[_piece(token, kind) for token, kind in zip(tokens, types, strict=True)],
        special_ids=frozenset(index for index, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)),
        end_ids=_end_ids(metadata, tokens, types),
        template=_template(metadata, tokens, source.name),
        name=source.name,
    )


def _encoder(
    metadata: dict[str, Any], tokens: list[str], types: list[int], place: str
) -> tokenizers.Tokenizer:
    merges = [_merge(text, place) for text in _strings(metadata, "tokenizer.ggml.merges", place)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    encoder = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=False))
    encoder.pre_tokenizer = _pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "gpt-2")), place)
    if metadata.get("tokenizer.ggml.pre") == "qwen2":
        encoder.normalizer = normalizers.NFC()
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(_added(tokens, types, CONTROL))
    encoder.add_tokens(_added(tokens, types, USER_DEFINED))
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = tokens[_token_id(metadata, "bos", tokens, place)]
        encoder.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return encoder


def _pre_tokenizer(name: str, place: str) -> pre_tokenizers.PreTokenizer:
    if name not in SPLITS:
        supported = ", ".join(SPLITS)
        raise ModelError(f"{place}: pre-tokenizer {name!r} is not supported; supported: {supported}")
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[name]]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


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


def _piece(token: str, kind: int) -> bytes:
    plain = kind in (UNKNOWN, CONTROL, USER_DEFINED)
    return token.encode("utf-8") if plain else byte_level_piece(token)


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
    if not isinstance(values, list) or not values:
        raise ModelError(f"{place}: metadata field {key!r} is missing; the file holds no tokenizer")
    return values
