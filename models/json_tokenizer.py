"""A tokenizer from a checkpoint folder: `tokenizer.json` and the small files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from muxk.models.chat_template import ChatTemplate
from muxk.models.errors import ModelError
from muxk.models.resolve import FolderSource
from muxk.models.token_pieces import byte_level_piece, sentencepiece_piece
from muxk.models.tokenizer import Tokenizer

ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


def tokenizer_from_folder(source: FolderSource) -> Tokenizer:
    """Build it. ModelError when `tokenizer.json` is missing or cannot be read."""
    folder = source.path
    path = folder / "tokenizer.json"
    description = _json(path)
    if not description:
        raise ModelError(f"{path}: not found; a checkpoint folder needs it beside the weights")
    try:
        encoder = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain Exception.
        raise ModelError(f"{path}: cannot be read as a tokenizer ({error})") from None
    settings = _json(folder / "tokenizer_config.json")
    return Tokenizer(
        encoder=encoder,
        pieces=_pieces(encoder, description),
        special_ids=_special_ids(encoder, settings),
        end_ids=_end_ids(encoder, folder, settings),
        template=_template(folder, settings, source.name),
        name=source.name,
    )


def _pieces(encoder: tokenizers.Tokenizer, description: dict[str, Any]) -> list[bytes]:
    """The bytes of every token id; ids without a token have none."""
    piece_of = byte_level_piece if _is_byte_level(description) else sentencepiece_piece
    vocabulary = encoder.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        pieces[index] = piece_of(token)
    for index, added in encoder.get_added_tokens_decoder().items():
        pieces[index] = added.content.encode("utf-8")
    return pieces


def _is_byte_level(description: dict[str, Any]) -> bool:
    decoder = description.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    return any(step.get("type") == "ByteLevel" for step in steps)


def _special_ids(encoder: tokenizers.Tokenizer, settings: dict[str, Any]) -> frozenset[int]:
    """Added tokens that are marked special, and those that the settings give a role."""
    marked = [index for index, added in encoder.get_added_tokens_decoder().items() if added.special]
    named = [encoder.token_to_id(_token(settings, f"{role}_token")) for role in ROLES]
    return frozenset([*marked, *(index for index in named if index is not None)])


def _end_ids(encoder: tokenizers.Tokenizer, folder: Path, settings: dict[str, Any]) -> frozenset[int]:
    """End tokens of the generation config, else of the model's config, and the tokenizer's own."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        ids = _json(folder / file).get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or [])
        if found:
            break
    named = encoder.token_to_id(_token(settings, "eos_token"))
    return frozenset(found if named is None else found | {named})


def _template(folder: Path, settings: dict[str, Any], name: str) -> ChatTemplate | None:
    """From `chat_template.jinja`, where newer checkpoints keep it, or the tokenizer's settings."""
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else settings.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _token(settings, "bos_token"), _token(settings, "eos_token"), name)


def _token(settings: dict[str, Any], field: str) -> str:
    """A special token, which is a string or an object with `content`."""
    value = settings.get(field) or ""
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _json(path: Path) -> dict[str, Any]:
    """The object in a file, empty when there is no such file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: wanted a JSON object")
    return values
