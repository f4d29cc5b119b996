"""A decoder over a paged KV pool, as the CPU device runs it.

Two lanes may call at once, each from its own thread. What a call makes, it makes for itself; shared are
the weights, which nobody writes, the KV pool, where live requests never share a page that is written, and the
parked prefills and carried tokens, each under a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from muxk.kernel.work import (
    PAGE_SIZE,
    DecodeWork,
    Phase,
    PrefillWork,
    ProbeWork,
    StepOutput,
    int32_array,
)
from muxk.models.carried import CarriedTokens
from muxk.models.chunks import Chunk, chunk_of, largest_chunk, whole_chunk
from muxk.models.cpu_prefill import row_positions
from muxk.models.fused_attention import FusedAttention
from muxk.models.llama import LlamaDecoder
from muxk.models.ops import Attention, KvLayer, kv_bytes_per_page
from muxk.models.sampling import sample_reported, sampling_of
from muxk.models.sampling_extras import extras_with_carried
from muxk.models.sampling_logprobs import prompt_logprobs
from numpy.typing import NDArray
from torch import Tensor

MakeAttention = Callable[[int | None], Attention]
"""The attention of a call for layers with a window, or without."""


@dataclass
class _Parked:
    """A prefill chunk between two of its layers."""

    chunk: Chunk
    hidden: Tensor
    """float32[rows, hidden]: the input of layer `next_layer`, padding rows at its end."""
    attentions: tuple[Attention, ...]
    """One for each layer."""
    next_layer: int


@dataclass(frozen=True)
class _Step:
    """A decode step whose rows are ordered by position, shortest first, as decode attention wants them."""

    order: NDArray[np.int64]
    """The row of the work that each row is."""
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    table: NDArray[np.int32]


class ModelRunner:
    """Implements `muxk.kernel.device.Runner`: layers over the pool, sampling after the last."""

    def __init__(self, decoder: LlamaDecoder, pages: int) -> None:
        """Page 0 holds nothing of any request: padding and probes use it."""
        assert pages >= 2, pages
        self.decoder = decoder
        config = decoder.config
        self._layers = config.layers
        self._windows = tuple(decoder.window(index) for index in range(config.layers))
        self._pages = pages
        self.kv: tuple[KvLayer, ...] = tuple(
            decoder.operators.kv_layer(pages, config.kv_heads, config.head_dim) for _ in range(config.layers)
        )
        self._parked: dict[int, _Parked] = {}
        self._lock = threading.Lock()
        self._carried = CarriedTokens()

    @property
    def layers(self) -> int:
        return self._layers

    @property
    def pages(self) -> int:
        return self._pages

    @property
    def operators_name(self) -> str:
        """What computes all that is not a product: `native` or `torch`."""
        return self.decoder.operators.name

    @property
    def max_context_tokens(self) -> int:
        """Positions at and past it cannot be run."""
        return self.decoder.config.max_context_tokens

    @property
    def bytes_per_page(self) -> int:
        config = self.decoder.config
        return kv_bytes_per_page(config.layers, config.kv_heads, config.head_dim)

    @property
    def chunk_tokens_max(self) -> int:
        """Most prompt tokens whose activations one item may hold."""
        return largest_chunk(self.decoder.config)

    @property
    def parked_bytes_per_token(self) -> int:
        """Hidden state of one token, as it is parked: float32."""
        return 4 * self.decoder.config.hidden

    @torch.inference_mode()
    def copy_pages(self, source: ModelRunner, pages: Sequence[int], to: Sequence[int]) -> None:
        """Copy keys and values of pages of another runner of the same model into pages of this one's pool."""
        origin, place = torch.tensor(pages), torch.tensor(to)
        for own, other in zip(self.kv, source.kv, strict=True):
            own.keys[place] = other.keys[origin]
            own.values[place] = other.values[origin]

    @torch.inference_mode()
    def prefill(self, work: PrefillWork, tokens: range, layers: range) -> StepOutput:
        """Run `layers` of a chunk of the batch's tokens.

        The hidden states stay parked under the batch id from one call to the next. KeyError when they are
        gone.
        """
        first = layers.start == 0
        state = self._state(self._chunk(work, tokens)) if first else self._unpark(work.batch_id)
        assert state.chunk.span == tokens, (state.chunk.span, tokens)
        assert state.next_layer == layers.start, (state.next_layer, layers)
        self._run_layers(state, layers.stop)
        if layers.stop < self._layers:
            self._park(work.batch_id, state)
            return StepOutput()
        logits = self._logits_at(state.hidden, state.chunk.last_tokens)
        return self._prefill_output(work, state.chunk, state.hidden, logits)

    @torch.inference_mode()
    def decode(self, work: DecodeWork) -> StepOutput:
        """Run one whole step; one token a row. CarriedTokensMissingError when it wants tokens not kept."""
        step = self._step_of(work)
        return self._decode_output(work, step, self._step_logits(step))

    @torch.inference_mode()
    def fused(self, decode: DecodeWork, work: PrefillWork, tokens: range) -> tuple[StepOutput, StepOutput]:
        """A decode step and a prefill chunk in one pass through all layers: (decode's output, prefill's).

        Tokens are those of `decode` and `prefill` by themselves: the products take all rows at once, and a
        row's result does not depend on the others.
        """
        step = self._step_of(decode)
        rows = decode.rows
        chunk = self._chunk(work, tokens)
        decoded, prefilled = self._step_attention(step), self._chunk_attention(chunk)
        state = _Parked(
            chunk=chunk,
            hidden=self.decoder.embed(_indices(np.concatenate([step.tokens, chunk.tokens]))),
            attentions=self._attentions(lambda w: FusedAttention(rows, decoded(w), prefilled(w))),
            next_layer=0,
        )
        self._run_layers(state, self._layers)
        wanted = np.concatenate([np.arange(rows), rows + chunk.last_tokens])
        logits = self._logits_at(state.hidden, wanted)
        return (
            self._decode_output(decode, step, logits[:rows]),
            self._prefill_output(work, chunk, state.hidden[rows:], logits[rows:]),
        )

    @torch.inference_mode()
    def probe(self, work: ProbeWork, first_layer: int, last_layer: int) -> None:
        """Run made-up tokens whose context is page 0, over and over; results are dropped."""
        tokens = work.context_tokens + work.new_tokens
        table = np.zeros((work.rows, tokens // PAGE_SIZE + 1), dtype=np.int32)
        made_up = np.ones(work.rows * work.new_tokens, dtype=np.int32)
        if work.phase is Phase.DECODE:
            positions = np.full(work.rows, max(work.context_tokens - 1, 0), dtype=np.int32)
            self._step_logits(self._step(made_up, positions, table))
            return
        counts, context = (work.new_tokens,) * work.rows, (work.context_tokens,) * work.rows
        state = self._state(whole_chunk(made_up, table, counts, context))
        state.next_layer = first_layer
        self._run_layers(state, last_layer)
        if last_layer == self._layers:
            self._logits_at(state.hidden, state.chunk.last_tokens)

    def discard(self, batch_id: int) -> None:
        """Free the parked state of a prefill batch; an unknown id is ignored."""
        with self._lock:
            self._parked.pop(batch_id, None)

    def reset(self) -> None:
        """Free the parked state of all batches, and forget carried tokens."""
        with self._lock:
            self._parked.clear()
        self._carried.forget()

    @torch.inference_mode()
    def decode_logits(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int32], table: NDArray[np.int32]
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Logits float32[rows, vocabulary] of one step, rows in the returned order (shortest first)."""
        step = self._step(tokens, positions, table)
        return self._step_logits(step), step.order

    @torch.inference_mode()
    def prefill_hidden(self, chunk: Chunk) -> Tensor:
        """Run all layers over a chunk: float32[tokens, hidden] before the head."""
        state = self._state(chunk)
        self._run_layers(state, self._layers)
        return state.hidden[: len(chunk.tokens)]

    def _step_of(self, work: DecodeWork) -> _Step:
        table = int32_array(work.page_table).reshape(work.rows, work.pages_per_row)
        return self._step(self._carried.fed(work), int32_array(work.positions), table)

    def _step(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int32], table: NDArray[np.int32]
    ) -> _Step:
        order = np.argsort(positions, kind="stable")
        return _Step(order, tokens[order], positions[order], table[order])

    def _step_logits(self, step: _Step) -> Tensor:
        decoder = self.decoder
        hidden = decoder.embed(_indices(step.tokens))
        attentions = self._attentions(self._step_attention(step))
        hidden = decoder.layers(range(self._layers), hidden, attentions, self.kv)
        return decoder.head(hidden)[: len(step.order)]

    def _step_attention(self, step: _Step) -> MakeAttention:
        decoder = self.decoder
        rotation = decoder.rotation(_indices(step.positions))
        return lambda window: decoder.operators.decode_attention(
            step.table, step.positions, decoder.heads, rotation, window
        )

    def _chunk_attention(self, chunk: Chunk) -> MakeAttention:
        decoder = self.decoder
        rotation = decoder.rotation(_indices(row_positions(chunk.new_tokens, chunk.reused_tokens)))
        return lambda window: decoder.operators.prefill_attention(
            chunk.table, chunk.new_tokens, chunk.reused_tokens, decoder.heads, rotation, window
        )

    def _attentions(self, make: MakeAttention) -> tuple[Attention, ...]:
        """The attention of each layer: one object for all layers of a window."""
        made = {window: make(window) for window in set(self._windows)}
        return tuple(made[window] for window in self._windows)

    def _decode_output(self, work: DecodeWork, step: _Step, logits: Tensor) -> StepOutput:
        """Sample one token a row, and keep them for a step that was launched before the host knows them."""
        order = step.order
        tokens, fed = np.empty((2, len(order)), dtype=np.int32)
        fed[order] = step.tokens
        sampling = sampling_of(work.sampling, extras_with_carried(work, fed)).of(order)
        tokens[order], logprobs = sample_reported(logits, sampling, step.positions.astype(np.int64) + 1)
        self._carried.keep(work.step_id, tokens)
        return StepOutput(tokens.tobytes(), logprobs)

    def _chunk(self, work: PrefillWork, tokens: range) -> Chunk:
        assert len(tokens) <= self.chunk_tokens_max, (tokens, self.chunk_tokens_max)
        return chunk_of(work, tokens)

    def _state(self, chunk: Chunk) -> _Parked:
        hidden = self.decoder.embed(_indices(chunk.tokens))
        return _Parked(chunk, hidden, self._attentions(self._chunk_attention(chunk)), next_layer=0)

    def _run_layers(self, state: _Parked, last_layer: int) -> None:
        layers = slice(state.next_layer, last_layer)
        state.hidden = self.decoder.layers(
            range(state.next_layer, last_layer), state.hidden, state.attentions[layers], self.kv[layers]
        )
        state.next_layer = last_layer

    def _logits_at(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Logits float32[len(rows), vocabulary] of some rows of float32[rows, hidden]."""
        if not len(rows):
            return torch.empty(0, self.decoder.config.vocabulary)
        return self.decoder.head(hidden.index_select(0, torch.from_numpy(rows)))

    def _prefill_output(self, work: PrefillWork, chunk: Chunk, hidden: Tensor, logits: Tensor) -> StepOutput:
        """Sample one token for each row that the chunk ends, and report on its prompt tokens."""
        asked = prompt_logprobs(work, chunk, hidden, self.decoder.head) if work.prompt_logprobs else ()
        rows = np.array([chunk.rows[part] for part in chunk.ended], dtype=np.int64)
        if not len(rows):
            return StepOutput(prompt_logprobs=asked)
        positions = (np.asarray(work.reused_tokens, dtype=np.int64) + np.asarray(work.new_tokens))[rows]
        tokens, logprobs = sample_reported(logits, sampling_of(work.sampling).of(rows), positions)
        return StepOutput(tokens.tobytes(), logprobs, asked)

    def _park(self, batch_id: int, state: _Parked) -> None:
        with self._lock:
            self._parked[batch_id] = state

    def _unpark(self, batch_id: int) -> _Parked:
        with self._lock:
            return self._parked.pop(batch_id)


def _indices(values: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


@torch.inference_mode()
def logits_for(runner: ModelRunner, token_ids: list[int]) -> Tensor:
    """Logits float32[tokens, vocabulary] after each token of one prompt, through pages 1 and up."""
    pages = -(-len(token_ids) // PAGE_SIZE)
    assert pages < runner.pages, (pages, runner.pages)
    table = np.arange(1, pages + 1, dtype=np.int32)[None, :]
    chunk = whole_chunk(np.asarray(token_ids, dtype=np.int32), table, (len(token_ids),), (0,))
    return runner.decoder.head(runner.prefill_hidden(chunk))
