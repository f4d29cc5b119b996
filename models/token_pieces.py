"""The bytes behind the strings of a vocabulary."""

from __future__ import annotations

import re
from functools import cache

SPACE_MARK = "\u2581"


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's writing of bytes as printable characters: printable ones as themselves, others from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def byte_level_piece(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; one with other characters is plain text."""
    table = byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def sentencepiece_piece(token: str) -> bytes:
    """The bytes of a SentencePiece token: U+2581 is a space, `<0x0A>` is a byte."""
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE_MARK, " ").encode("utf-8")
