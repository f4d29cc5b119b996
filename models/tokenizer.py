"""Tokenizers: text to token ids, and the bytes that each token adds to the output. Needs no torch.

One encoder thread at a time may use an instance; `token_bytes` is a lookup that any thread may use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from muxk.models.errors import ModelError
from muxk.models.resolve import GgufSource, Source, resolve_model

if TYPE_CHECKING:
    import tokenizers
    from muxk.models.chat_template import ChatTemplate

BYTE_TOKENS = 256


class Tokenizer:
    """A model's tokenizer, on the `tokenizers` library."""

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        pieces: Sequence[bytes],
        special_ids: frozenset[int],
        end_ids: frozenset[int],
        template: ChatTemplate | None,
        name: str,
    ) -> None:
        """`pieces` are the bytes of every token; `name` is for errors."""
        self._encoder = encoder
        self._pieces = tuple(pieces)
        self.special_ids = special_ids
        """Tokens that mean something to the model and are no text, such as `<|im_end|>`."""
        self.end_ids = end_ids
        """Tokens that end an answer."""
        self._template = template
        self._name = name

    @property
    def vocabulary_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Special tokens written out in the text count as such."""
        return self._ids(text, add_special_tokens=True)

    def chat(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of (role, content) turns through the model's template, ready for its answer.

        ModelError when the model has no template, or the template refuses the turns.
        """
        if self._template is None:
            raise ModelError(f"{self._name} has no chat template; send a plain prompt instead")
        text = self._template.render(turns)
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: unlike `encode`, it lets other threads run meanwhile. A long prompt takes a second.
        [encoding] = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token says, special ones their name; empty for ids without a token."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of whole outputs without special tokens; `detokenizer.Detokenizer` gives pieces of it."""
        return _decode(token_ids, self.token_bytes, self.special_ids)


_PIECES = (*(bytes([byte]) for byte in range(BYTE_TOKENS)), b"<end>")
"""What the tokens of a ByteTokenizer say."""


class ByteTokenizer:
    """A token for each byte and one that ends, for devices without a model."""

    end_ids = special_ids = frozenset({BYTE_TOKENS})
    vocabulary_size = BYTE_TOKENS + 1

    def encode(self, text: str) -> list[int]:
        """The bytes of the text in UTF-8."""
        return list(text.encode("utf-8"))

    def chat(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Each turn on a line as `role: content`, then the assistant's turn, open."""
        lines = [f"{role}: {content}\n" for role, content in turns]
        return self.encode("".join(lines) + "assistant: ")

    def token_bytes(self, token_id: int) -> bytes:
        """The byte of a token; `<end>` for the end token."""
        return _PIECES[token_id] if 0 <= token_id < len(_PIECES) else b""

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of whole outputs without end tokens."""
        return _decode(token_ids, self.token_bytes, self.special_ids)


def _decode(token_ids: Iterable[int], token_bytes: Callable[[int], bytes], skipped: frozenset[int]) -> str:
    data = b"".join(token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
    return data.decode("utf-8", "replace")


def load_tokenizer(source: Source | str) -> Tokenizer:
    """The tokenizer of a source, or of a model's name. ModelError when it is missing or not supported."""
    if isinstance(source, str):
        source = resolve_model(source)
    if isinstance(source, GgufSource):
        from muxk.models.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(source)
    from muxk.models.json_tokenizer import tokenizer_from_folder

    return tokenizer_from_folder(source)
