"""A decoder over a paged KV pool, as the CUDA device runs it: every call enqueues and none waits.

Implements `kernel.cuda_runner.CudaRunner`. All calls come from the device's launcher thread, with the stream
of the lane current. Weights and KV pool are shared by all lanes; buffers, workspaces, plans and graphs belong
to one lane each. Items of one phase follow each other on the device even where their lanes differ, which is
what the device's waits between lanes are for; carried tokens and parked states rely on it.

It runs on torch's `cpu` device as well, without graphs: that is how its tests prove it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from muxk.kernel.cuda_runner import CudaLaneState
from muxk.kernel.work import PAGE_SIZE, DecodeWork, Phase, PrefillWork, ProbeWork, int32_array
from muxk.models.chunks import Chunk, chunk_of
from muxk.models.cuda_batch import (
    Batch,
    Ints,
    decode_tables,
    joined_table,
    tables_of,
    upload,
    upload_arrays,
    used_on_this_stream,
)
from muxk.models.cuda_carried import CarriedOnDevice
from muxk.models.cuda_kernels import Attend, AttentionKind
from muxk.models.cuda_lane import CudaLane, StepBucket, capture_step, open_bucket, release_memory
from muxk.models.cuda_layers import CudaOperators, LaneAttention, Scratch
from muxk.models.cuda_logprobs import PendingLogprobs, prompt_logprobs_on_device
from muxk.models.cuda_sampling import PendingOutput, Sampled, sample_on_device
from muxk.models.errors import ModelError
from muxk.models.llama import LlamaDecoder
from muxk.models.ops import KvLayer
from muxk.models.sampling import sampling_of
from torch import Tensor


@dataclass
class _Parked:
    """A prefill chunk between two of its layers."""

    chunk: Chunk
    batch: Batch
    hidden: Tensor
    """[tokens, hidden]: the input of layer `next_layer`."""
    next_layer: int


class CudaModelRunner:
    """Layers over the pool, sampling after the last, on one device."""

    def __init__(
        self,
        decoder: LlamaDecoder,
        attention: AttentionKind,
        pages: int,
        chunk_tokens_max: int,
        rows_max: int,
    ) -> None:
        """Page 0 holds nothing of any request: padding and probes use it.

        Args:
            decoder: loaded with `CudaOperators`.
            chunk_tokens_max: most tokens of a prefill item; prefill lanes hold activations for so many.
            rows_max: rows of a decode step that decode lanes hold activations for; larger steps add to them.
        """
        assert pages >= 2, pages
        operators = decoder.operators
        assert isinstance(operators, CudaOperators), operators
        config = decoder.config
        self._decoder: LlamaDecoder | None = decoder
        self._operators = operators
        self._attention = attention
        self._device = operators.device
        self._pages = pages
        self._chunk_tokens_max = chunk_tokens_max
        self._rows_max = rows_max
        self._windows = tuple(decoder.window(index) for index in range(config.layers))
        every = decoder.rotation(torch.arange(config.max_context_tokens))
        self._rotation = torch.view_as_real(every).squeeze(1).contiguous().to(self._device)
        self.kv: tuple[KvLayer, ...] = tuple(
            operators.kv_layer(pages, config.kv_heads, config.head_dim) for _ in range(config.layers)
        )
        self._parked: dict[int, _Parked] = {}
        self._carried = CarriedOnDevice(rows_max, self._device)

    @property
    def decoder(self) -> LlamaDecoder:
        assert self._decoder is not None, "the runner is closed"
        return self._decoder

    @property
    def layers(self) -> int:
        return len(self._windows)

    @property
    def pages(self) -> int:
        return self._pages

    @property
    def chunk_tokens_max(self) -> int:
        return self._chunk_tokens_max

    @property
    def parked_bytes_per_token(self) -> int:
        """The hidden state; what its tables take is a few bytes a token beside it."""
        return self.decoder.config.hidden * self._operators.type.itemsize

    @property
    def max_context_tokens(self) -> int:
        """Positions at and past it cannot be run."""
        return self.decoder.config.max_context_tokens

    @property
    def operators_name(self) -> str:
        """What computes beside products, and attention."""
        return f"{self._operators.name}, attention {self._attention.name}"

    @torch.inference_mode()
    def open_lane(self, phase: Phase, units: int) -> CudaLane:
        """A prefill lane and the lane of the whole device hold what every kind of item needs.

        A decode lane holds what steps need.
        """
        rows = self._rows_max
        if units >= self._attention.shape.device_units:
            phase = Phase.PREFILL
        tokens = rows if phase is Phase.DECODE else self._chunk_tokens_max + rows
        scratch = Scratch(self.decoder.config, tokens, self._operators.type, self._device)
        lane = CudaLane(units, scratch, self._attention.planner(units))
        self._warm(lane, phase)
        return lane

    @torch.inference_mode()
    def capture(self, lane: CudaLaneState, rows: int) -> None:
        """Capture the graph of a decode step of at most `rows` rows, with its own static buffers."""
        lane = _own(lane)
        pages = rows * min(-(-self.max_context_tokens // PAGE_SIZE), self._pages)
        planner = lane.planner.step_planner(rows, pages)
        bucket = open_bucket(rows, pages, planner, self._device)
        made_up = decode_tables(_ints([0]), _ints([0]), np.zeros((1, 1), dtype=np.int32), rows)
        batch = upload(made_up, self._device, into=bucket.packed)
        attend = planner.plan(batch)
        capture_step(lane, bucket, lambda: self._step_logits(lane, batch, attend))

    @torch.inference_mode()
    def prefill(
        self, lane: CudaLaneState, work: PrefillWork, tokens: range, layers: range, item_id: int
    ) -> PendingOutput:
        """Enqueue layers of a chunk. KeyError when its parked state is gone."""
        lane = _own(lane)
        if layers.start == 0:
            state = self._begin(work, tokens)
        else:
            state = self._parked.pop(work.batch_id)
        assert state.chunk.span == tokens, (state.chunk.span, tokens)
        assert state.next_layer == layers.start, (state.next_layer, layers)
        used_on_this_stream(state.hidden, state.batch.packed)  # a chunk may go on in another lane
        attend = lane.planner.plan(state.batch)
        self._run_layers(lane, layers, state.hidden, state.batch, attend)
        state.next_layer = layers.stop
        if layers.stop < self.layers:
            self._parked[work.batch_id] = state
            return PendingOutput()
        return self._prefill_output(work, state.chunk, state.hidden)

    @torch.inference_mode()
    def decode(self, lane: CudaLaneState, work: DecodeWork, item_id: int) -> PendingOutput:
        """Enqueue one whole step. CarriedTokensMissingError when it wants tokens that are not kept."""
        lane = _own(lane)
        self._carried.check(work)
        bucket, batch = self._step_batch(
            lane, int32_array(work.tokens), int32_array(work.positions), _table(work)
        )
        self._carried.fill(work, batch.tokens)
        logits = self._logits_of_step(lane, bucket, batch)[: work.rows]
        return PendingOutput(self._decoded(work, batch.tokens[: work.rows], logits))

    @torch.inference_mode()
    def fused(
        self, lane: CudaLaneState, decode: DecodeWork, work: PrefillWork, tokens: range, item_id: int
    ) -> tuple[PendingOutput, PendingOutput]:
        """Enqueue a step and a chunk in one pass: rows of the step first, as rows of one new token."""
        lane = _own(lane)
        self._carried.check(decode)
        rows, chunk = decode.rows, self._chunk(work, tokens)
        tables = tables_of(
            np.concatenate([int32_array(decode.tokens), chunk.tokens]),
            (1,) * rows + chunk.new_tokens,
            (*int32_array(decode.positions).tolist(), *chunk.reused_tokens),
            joined_table(_table(decode), chunk.table),
        )
        batch = upload(tables, self._device)
        self._carried.fill(decode, batch.tokens)
        hidden = self.decoder.embed(batch.tokens)
        self._run_layers(lane, range(self.layers), hidden, batch, lane.planner.plan(batch))
        decoded = self._decoded(decode, batch.tokens[:rows], self._head(hidden[:rows]))
        return PendingOutput(decoded), self._prefill_output(work, chunk, hidden[rows:])

    @torch.inference_mode()
    def probe(self, lane: CudaLaneState, work: ProbeWork, layers: range) -> None:
        """Enqueue made-up tokens whose context is page 0, over and over; results are dropped."""
        lane = _own(lane)
        tokens = work.context_tokens + work.new_tokens
        table = np.zeros((work.rows, tokens // PAGE_SIZE + 1), dtype=np.int32)
        made_up = np.ones(work.rows * work.new_tokens, dtype=np.int32)
        if work.phase is Phase.DECODE:
            positions = np.full(work.rows, max(work.context_tokens - 1, 0), dtype=np.int32)
            self._probe_step(lane, made_up, positions, table)
            return
        counts = (work.new_tokens,) * work.rows
        batch = upload(tables_of(made_up, counts, (work.context_tokens,) * work.rows, table), self._device)
        hidden = self.decoder.embed(batch.tokens)
        self._run_layers(lane, layers, hidden, batch, lane.planner.plan(batch))
        if layers.stop == self.layers:
            self._head(hidden[-work.rows :])

    def discard(self, batch_id: int) -> None:
        self._parked.pop(batch_id, None)

    def reset(self) -> None:
        """Free the parked state of all batches, and forget carried tokens."""
        self._parked.clear()
        self._carried.forget()

    def close(self) -> None:
        """Free weights, pool and what is parked. Lanes go with their last reference, before this."""
        self.reset()
        self.kv = ()
        self._decoder = None
        release_memory()

    def _begin(self, work: PrefillWork, tokens: range) -> _Parked:
        chunk = self._chunk(work, tokens)
        tables = tables_of(chunk.tokens, chunk.new_tokens, chunk.reused_tokens, chunk.table)
        batch = upload(tables, self._device)
        return _Parked(chunk, batch, self.decoder.embed(batch.tokens), next_layer=0)

    def _chunk(self, work: PrefillWork, tokens: range) -> Chunk:
        assert len(tokens) <= self._chunk_tokens_max, (tokens, self._chunk_tokens_max)
        chunk = chunk_of(work, tokens)
        self._check_tokens(chunk.tokens)
        return chunk

    def _check_tokens(self, tokens: Ints) -> None:
        """On the card a token id without an embedding would take the whole context with it. A tokenizer may
        know more of them than the model."""
        least, most, known = int(tokens.min()), int(tokens.max()), self.decoder.config.vocabulary
        if least < 0 or most >= known:
            wrong = least if least < 0 else most
            raise ModelError(f"token {wrong} is none of the model, which has 0 to {known - 1}")

    def _run_layers(
        self, lane: CudaLane, layers: range, hidden: Tensor, batch: Batch, attend: Attend
    ) -> None:
        """Run layers over [tokens, hidden], in place."""
        scratch = lane.room(hidden.shape[0], self.decoder.config)
        made = {
            window: LaneAttention(
                self._operators.kernels, scratch, self.decoder.heads, self._rotation, batch, attend, window
            )
            for window in dict.fromkeys(self._windows)
        }
        span = slice(layers.start, layers.stop)
        attentions = [made[window] for window in self._windows[span]]
        self.decoder.layers(layers, hidden, attentions, self.kv[span])

    def _step_batch(
        self, lane: CudaLane, tokens: Ints, positions: Ints, table: Ints
    ) -> tuple[StepBucket | None, Batch]:
        """The tables of a step, in the buffers of a captured bucket where one holds them."""
        bucket = lane.bucket(len(tokens))
        if bucket is not None:
            tables = decode_tables(tokens, positions, table, bucket.rows)
            if bucket.holds(tables):
                return bucket, upload(tables, self._device, into=bucket.packed)
        return None, upload(decode_tables(tokens, positions, table, len(tokens)), self._device)

    def _logits_of_step(self, lane: CudaLane, bucket: StepBucket | None, batch: Batch) -> Tensor:
        """Logits float32[rows, vocabulary], by the graph of a bucket where there is one."""
        if bucket is None:
            return self._step_logits(lane, batch, lane.planner.plan(batch))
        attend = bucket.planner.plan(batch)
        replayed = bucket.replay()
        return self._step_logits(lane, batch, attend) if replayed is None else replayed

    def _step_logits(self, lane: CudaLane, batch: Batch, attend: Attend) -> Tensor:
        hidden = self.decoder.embed(batch.tokens)
        self._run_layers(lane, range(self.layers), hidden, batch, attend)
        return self._head(hidden)

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits float32[rows, vocabulary] of [rows, hidden]."""
        return self.decoder.head(hidden).float()

    def _decoded(self, work: DecodeWork, fed: Tensor, logits: Tensor) -> Sampled:
        """Sample one token a row, and keep them for a step that is launched before the host knows them."""
        positions = int32_array(work.positions).astype(np.int64) + 1
        carried = frozenset(int32_array(work.carried_rows).tolist())
        sampled = sample_on_device(logits, sampling_of(work.sampling), positions, fed, carried)
        self._carried.keep(work.step_id, sampled.tokens)
        return sampled

    def _prefill_output(self, work: PrefillWork, chunk: Chunk, hidden: Tensor) -> PendingOutput:
        """Sample one token for each row that the chunk ends, and report on its prompt tokens."""
        asked: tuple[PendingLogprobs, ...] = ()
        if work.prompt_logprobs:
            asked = prompt_logprobs_on_device(work, chunk, hidden, self._head)
        rows = np.array([chunk.rows[part] for part in chunk.ended], dtype=np.int64)
        if not len(rows):
            return PendingOutput(prompt=asked)
        (places,) = upload_arrays([chunk.last_tokens], self._device)
        logits = self._head(hidden.index_select(0, places))
        positions = (np.asarray(work.reused_tokens, dtype=np.int64) + np.asarray(work.new_tokens))[rows]
        sampling = sampling_of(work.sampling).of(rows)
        fed = places.int()  # No row of a prompt is carried, so that none is looked at.
        return PendingOutput(sample_on_device(logits, sampling, positions, fed, frozenset()), asked)

    def _probe_step(self, lane: CudaLane, tokens: Ints, positions: Ints, table: Ints) -> None:
        self._logits_of_step(lane, *self._step_batch(lane, tokens, positions, table))

    def _warm(self, lane: CudaLane, phase: Phase) -> None:
        """Run shapes of each kind once, so that nothing is compiled or allocated while requests wait."""
        for rows in dict.fromkeys((1, self._rows_max)):
            zeros = np.zeros((rows, 1), dtype=np.int32)
            self._probe_step(lane, zeros[:, 0], zeros[:, 0], zeros)
        if phase is Phase.PREFILL:
            most = min(self._chunk_tokens_max, self.max_context_tokens)
            for tokens in dict.fromkeys((min(PAGE_SIZE, most), most)):
                work = ProbeWork(0, phase, lane.units, 1, tokens, 0)
                self.probe(lane, work, range(min(1, self.layers)))


def _own(lane: CudaLaneState) -> CudaLane:
    assert isinstance(lane, CudaLane), lane
    return lane


def _table(work: DecodeWork) -> Ints:
    return int32_array(work.page_table).reshape(work.rows, work.pages_per_row)


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, dtype=np.int32)
