"""The full pages of a request's tokens, as the prefix index knows them (see `page_pool.py`)."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
from muxk.kernel.work import PAGE_SIZE

PAGE_BYTES = PAGE_SIZE * 4
"""Bytes of the tokens of a page, as int32."""
KEY_BYTES = 16
ROOT_KEY = b""
"""Parent of the first page of a prompt."""


class Entry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What the index knows of a page."""

    key: bytes
    parent: bytes
    tokens: bytes


class Chain:
    """The full pages of a request's tokens, as the index would know them; each is hashed once."""

    def __init__(self, tokens: bytes) -> None:
        self._tokens = tokens
        self._entries: list[Entry] = []
        """Of the pages at the front that were asked for."""
        self._hash = blake2b(digest_size=KEY_BYTES)
        """Of their tokens."""

    def first(self, pages: int) -> list[Entry]:
        """Of so many pages, or all if there are fewer."""
        entries, tokens, update, digest = self._entries, self._tokens, self._hash.update, self._hash.digest
        parent = entries[-1].key if entries else ROOT_KEY
        end = min(pages, self.pages) * PAGE_BYTES
        for start in range(len(entries) * PAGE_BYTES, end, PAGE_BYTES):
            chunk = tokens[start : start + PAGE_BYTES]
            update(chunk)
            key = digest()
            entries.append(Entry(key, parent, chunk))
            parent = key
        return entries if len(entries) <= pages else entries[:pages]

    @property
    def pages(self) -> int:
        return len(self._tokens) // PAGE_BYTES

    def front(self, pages: int) -> bytes:
        """Tokens of so many pages."""
        return self._tokens[: pages * PAGE_BYTES]

    def grown(self, tokens: bytes) -> Chain:
        """Of these tokens, which usually begin with those that it has."""
        if not tokens.startswith(self._tokens[: len(self._entries) * PAGE_BYTES]):
            return Chain(tokens)
        self._tokens = tokens
        return self
