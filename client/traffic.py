"""The common form of a workload: requests in order of arrival, made one at a time, whose prompts are
descriptions.

A prompt is a tuple of spans of *streams*. A stream is an endless text that nobody stores: the token at a
position is a hash of the stream's number and the position. Two prompts that begin with the same spans begin
with the same token ids, so that prefixes match in the KV pool as those of real text would, and a request of
100,000 tokens costs a few dozen integers until somebody asks for its ids.

A turn's answer has a stream too, which the prompts of later turns contain. Whoever runs a workload can let
the model say exactly these tokens, or hand over what the model said instead (`token_ids(..., spoken=...)`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from muxk.client.errors import ClientError

FIRST_ORDINARY_ID = 32
"""Vocabularies keep their control tokens in front of this."""

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: the increment of the splitmix64 generator."""

Spoken = Mapping[int, Sequence[int] | npt.NDArray[np.int32]]
"""By answer stream: the tokens that a model said."""
NO_SPOKEN: Mapping[int, Sequence[int]] = {}


class WorkloadError(ClientError):
    """A workload that can not be made as asked: the text says what was wrong and what would be right."""


class Span(NamedTuple):
    """Tokens [start, start + tokens) of a stream."""

    stream: int
    start: int
    tokens: int


class TrafficRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a workload. Times in ns from the start of the workload."""

    arrival_ns: int
    prompt: tuple[Span, ...]
    output_tokens: int
    session: int
    """Requests of one session share text; numbers are arbitrary, but the same in every run with this seed."""
    turn: int = 0
    """0 for the first of its session."""
    answer_stream: int = 0
    """Where later turns of the session take this answer from: tokens [0, output_tokens) of this stream."""
    request_class: str = ""
    """What the request names as its class; empty for none."""

    @property
    def prompt_tokens(self) -> int:
        return sum(span.tokens for span in self.prompt)


class Workload(Protocol):
    """A named sequence of requests that can be read again from its start, with the same result."""

    @property
    def name(self) -> str: ...

    def requests(self) -> Iterator[TrafficRequest]:
        """In order of arrival. Memory does not grow with the number of requests."""
        ...


def mix(*values: int) -> int:
    """A 64-bit number that depends on all values and their order (splitmix64's finaliser, chained)."""
    state = 0
    for value in values:
        state = (state ^ (value & MASK)) + GOLDEN & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state


def chance(*values: int) -> float:
    """A number in [0, 1) that depends on all values: a coin that falls the same way each time."""
    return (mix(*values) >> 11) / (1 << 53)


def stream_ids(span: Span, vocabulary_size: int) -> npt.NDArray[np.int32]:
    """int32[span.tokens]: token ids of ordinary tokens."""
    return _planned((span,), vocabulary_size)


def _planned(spans: Sequence[Span], vocabulary_size: int) -> npt.NDArray[np.int32]:
    """Token ids of spans, at least one, behind each other: in one pass, for a trace's blocks are short."""
    if vocabulary_size <= FIRST_ORDINARY_ID:
        raise WorkloadError(
            f"a vocabulary of {vocabulary_size} tokens has no ordinary ones; it must have more than "
            f"{FIRST_ORDINARY_ID}"
        )
    counts = [span.tokens for span in spans]
    state = np.concatenate([np.arange(span.start + 1, span.start + span.tokens + 1) for span in spans])
    state = state.astype(np.uint64)
    state *= np.uint64(GOLDEN)
    state += np.repeat(np.array([mix(span.stream) for span in spans], np.uint64), counts)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    state %= np.uint64(vocabulary_size - FIRST_ORDINARY_ID)
    ids = state.astype(np.int32)
    ids += FIRST_ORDINARY_ID
    return ids


def token_ids(
    prompt: Sequence[Span], vocabulary_size: int, spoken: Spoken = NO_SPOKEN
) -> npt.NDArray[np.int32]:
    """int32[prompt tokens]. `spoken`: by answer stream, the tokens that a model really said in place of it.

    Where a model said less than the workload planned, the planned tokens stand for the rest, so that the
    prompt keeps its length.
    """
    if not prompt:
        return np.empty(0, np.int32)
    ids = _planned(prompt, vocabulary_size)
    first = 0
    for span in prompt:
        said = spoken.get(span.stream, ())[span.start : span.start + span.tokens]
        if len(said):
            ids[first : first + len(said)] = said
        first += span.tokens
    return ids


def answer_ids(request: TrafficRequest, vocabulary_size: int) -> npt.NDArray[np.int32]:
    """int32[output_tokens]: the answer as later turns of the session contain it."""
    return stream_ids(Span(request.answer_stream, 0, request.output_tokens), vocabulary_size)
