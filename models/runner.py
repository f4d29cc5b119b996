"""A decoder over a paged KV pool, as the CPU device runs it.

Two lanes may call at once, each from its own thread. What a call makes, it makes for itself; shared are
the weights, which nobody writes, the KV pool, where live requests never share a page that is written, and the
parked prefills, which only the prefill lane and `discard` touch under a lock.
"""

from __future__ import annotations

import threading
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
from muxk.models.cpu_prefill import row_positions
from muxk.models.llama import LlamaDecoder
from muxk.models.ops import Attention, KvLayer, kv_bytes_per_page
from muxk.models.sampling import sample, sampling_of
from numpy.typing import NDArray
from torch import Tensor


@dataclass
class _Parked:
    """A prefill between two of its layers."""

    hidden: Tensor
    """float32[rows, hidden]: the input of layer `next_layer`, padding rows at its end."""
    attention: Attention
    next_layer: int


class ModelRunner:
    """Implements `muxk.kernel.device.Runner`: layers over the pool, sampling after the last."""

    def __init__(self, decoder: LlamaDecoder, pages: int) -> None:
        """Page 0 holds nothing of any request: padding and probes use it."""
        assert pages >= 2, pages
        self.decoder = decoder
        config = decoder.config
        self._layers = config.layers
        self._pages = pages
        self.kv: tuple[KvLayer, ...] = tuple(
            decoder.operators.kv_layer(pages, config.kv_heads, config.head_dim) for _ in range(config.layers)
        )
        self._parked: dict[int, _Parked] = {}
        self._lock = threading.Lock()

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
        return 8192

    @torch.inference_mode()
    def prefill(self, work: PrefillWork, tokens: range, layers: range) -> StepOutput:
        """Run `layers` of a chunk of the batch's tokens.

        The hidden states stay parked under the batch id from one call to the next.
        """
        assert len(tokens) == sum(work.new_tokens), "chunks come next"
        first_layer, last_layer = layers.start, layers.stop
        state = self._begin(work) if first_layer == 0 else self._unpark(work.batch_id)
        assert state.next_layer == first_layer, (state.next_layer, first_layer)
        self._run_layers(state, last_layer)
        if last_layer < self._layers:
            self._park(work.batch_id, state)
            return StepOutput()
        return StepOutput(self._sample_prefill(work, state.hidden).tobytes())

    @torch.inference_mode()
    def fused(self, decode: DecodeWork, work: PrefillWork, tokens: range) -> tuple[StepOutput, StepOutput]:
        """A decode step and a prefill chunk in one pass: (decode's output, prefill's)."""
        raise NotImplementedError("comes next")

    @torch.inference_mode()
    def decode(self, work: DecodeWork) -> StepOutput:
        """Run one whole step; one token a row."""
        positions = int32_array(work.positions)
        logits, order = self.decode_logits(
            int32_array(work.tokens), positions, _page_table(work.page_table, work.pages_per_row)
        )
        tokens = np.empty(len(order), dtype=np.int32)
        sampling = sampling_of(work.sampling).of(order)
        tokens[order] = sample(logits, sampling, positions[order].astype(np.int64) + 1)
        return StepOutput(tokens.tobytes())

    @torch.inference_mode()
    def probe(self, work: ProbeWork, first_layer: int, last_layer: int) -> None:
        """Run made-up tokens whose context is page 0, over and over; results are dropped."""
        tokens = work.context_tokens + work.new_tokens
        table = np.zeros((work.rows, tokens // PAGE_SIZE + 1), dtype=np.int32)
        made_up = np.ones(work.rows * work.new_tokens, dtype=np.int32)
        if work.phase is Phase.DECODE:
            positions = np.full(work.rows, max(work.context_tokens - 1, 0), dtype=np.int32)
            self.decode_logits(made_up, positions, table)
            return
        counts = (work.new_tokens,) * work.rows
        state = self._state(made_up, table, counts, (work.context_tokens,) * work.rows)
        state.next_layer = first_layer
        self._run_layers(state, last_layer)
        if last_layer == self._layers:
            self.decoder.head(_last_tokens(state.hidden, counts))

    def discard(self, batch_id: int) -> None:
        """Free the parked state of a prefill batch; an unknown id is ignored."""
        with self._lock:
            self._parked.pop(batch_id, None)

    def reset(self) -> None:
        """Free the parked state of all batches."""
        with self._lock:
            self._parked.clear()

    def decode_logits(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int32], table: NDArray[np.int32]
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Logits float32[rows, vocabulary] of one step, rows in the returned order (shortest first)."""
        decoder = self.decoder
        order = np.argsort(positions, kind="stable")
        positions = positions[order]
        attention = decoder.operators.decode_attention(
            table[order], positions, decoder.heads, decoder.rotation(_indices(positions))
        )
        hidden = decoder.embed(_indices(tokens[order]))
        for index, kv in enumerate(self.kv):
            hidden = decoder.layer(index, hidden, attention, kv)
        return decoder.head(hidden)[: len(order)], order

    @torch.inference_mode()
    def prefill_hidden(
        self,
        tokens: NDArray[np.int32],
        table: NDArray[np.int32],
        new_tokens: tuple[int, ...],
        reused_tokens: tuple[int, ...],
    ) -> Tensor:
        """Run all layers over a batch of prompts: float32[tokens, hidden] before the head."""
        state = self._state(tokens, table, new_tokens, reused_tokens)
        self._run_layers(state, self._layers)
        return state.hidden[: len(tokens)]

    def _begin(self, work: PrefillWork) -> _Parked:
        table = _page_table(work.page_table, work.pages_per_row)
        return self._state(int32_array(work.tokens), table, work.new_tokens, work.reused_tokens)

    def _state(
        self,
        tokens: NDArray[np.int32],
        table: NDArray[np.int32],
        new_tokens: tuple[int, ...],
        reused_tokens: tuple[int, ...],
    ) -> _Parked:
        decoder = self.decoder
        rotation = decoder.rotation(_indices(row_positions(new_tokens, reused_tokens)))
        attention = decoder.operators.prefill_attention(
            table, new_tokens, reused_tokens, decoder.heads, rotation
        )
        return _Parked(hidden=decoder.embed(_indices(tokens)), attention=attention, next_layer=0)

    def _run_layers(self, state: _Parked, last_layer: int) -> None:
        for index in range(state.next_layer, last_layer):
            kv = self.kv[index]
            state.hidden = self.decoder.layer(index, state.hidden, state.attention, kv)
        state.next_layer = last_layer

    def _sample_prefill(self, work: PrefillWork, hidden: Tensor) -> NDArray[np.int32]:
        logits = self.decoder.head(_last_tokens(hidden, work.new_tokens))
        positions = np.asarray(work.reused_tokens, dtype=np.int64) + np.asarray(work.new_tokens)
        return sample(logits, sampling_of(work.sampling), positions)

    def _park(self, batch_id: int, state: _Parked) -> None:
        with self._lock:
            self._parked[batch_id] = state

    def _unpark(self, batch_id: int) -> _Parked:
        with self._lock:
            return self._parked.pop(batch_id)


def _page_table(column: bytes, pages_per_row: int) -> NDArray[np.int32]:
    return int32_array(column).reshape(-1, pages_per_row)


def _indices(values: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _last_tokens(hidden: Tensor, new_tokens: tuple[int, ...]) -> Tensor:
    """The hidden state of the last token of each row."""
    return hidden.index_select(0, _indices(np.cumsum(new_tokens) - 1))


@torch.inference_mode()
def logits_for(runner: ModelRunner, token_ids: list[int]) -> Tensor:
    """Logits float32[tokens, vocabulary] after each token of one prompt, through pages 1 and up."""
    pages = -(-len(token_ids) // PAGE_SIZE)
    assert pages < runner.pages, (pages, runner.pages)
    table = np.arange(1, pages + 1, dtype=np.int32)[None, :]
    hidden = runner.prefill_hidden(np.asarray(token_ids, dtype=np.int32), table, (len(token_ids),), (0,))
    return runner.decoder.head(hidden)
