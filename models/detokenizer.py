"""From token ids to text that can be sent: whole characters, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Iterable, Sequence


class Detokenizer:
    """The text of one request's output, as its tokens arrive. Linear in the output."""

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: Container[int] = frozenset()) -> None:
        """`token_bytes` tells what a token adds to the output; `skipped` tokens add nothing."""
        self._token_bytes = token_bytes
        self._skipped = skipped
        # The incremental decoder keeps the 1 to 3 bytes of a character that may still become whole, and
        # replaces what cannot any more.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole = True
        """It keeps nothing."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        kept = [self._token_bytes(token_id) for token_id in token_ids if token_id not in self._skipped]
        piece = kept[0] if len(kept) == 1 else b"".join(kept)
        if self._whole and piece.isascii():  # as most are
            return piece.decode("ascii")
        text = self._decoder.decode(piece)
        self._whole = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """What was held back, with a replacement character for an incomplete one."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds the first stop string in pieces of text, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Empty strings are ignored."""
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._over = 0
        """Characters at the front of `_held` that a stop string has to end behind."""
        self._matched = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to send, and the stop string that ended the output, if one did.

        The stop string that is complete first counts, and of those that end together the longest, so that
        the answer is the same however the text is cut. Nothing is sent after a match.
        """
        if self._matched:
            return "", None
        held, self._held = self._held + text, ""
        starts = [(held.find(stop, max(0, self._over - len(stop) + 1)), stop) for stop in self._stops]
        found = [(start + len(stop), -len(stop), stop) for start, stop in starts if start >= 0]
        if found:
            end, _, stop = min(found)
            self._matched = True
            return held[: end - len(stop)], stop
        safe = self._safe_length(held)
        self._held = held[safe:]
        self._over = max(0, self._over - safe)
        return held[:safe], None

    def pass_over(self, text: str) -> str:
        """Text that must not end the output: what of it is safe to send.

        A stop string that begins in the rest of it may still end the output later.
        """
        held = self._held + text
        safe = self._safe_length(held)
        self._held = held[safe:]
        self._over = len(self._held)
        return held[:safe]

    def finish(self) -> str:
        """What was held back, when the output ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _safe_length(self, text: str) -> int:
        """Where the longest suffix begins that a stop string may begin with."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
