"""Stage 2: copies, products and decode attention by SM count, alone and beside another lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from muxk.kernel.work import PAGE_SIZE, Phase, Split
from muxk.models.cuda_batch import decode_tables, upload
from muxk.models.cuda_choice import attention_of
from muxk.models.cuda_kernels import AttentionKind, AttentionShape, empty_kv_layer
from muxk.models.ops import Heads
from muxk.profiles.gpu_check_rig import BoxIsOver, Rig, TimeBox

SPLITS = 5
"""Of the menu: the curve needs few points, and each costs the same time."""

Work = Callable[[], object]


def check_operators(rig: Rig, box: TimeBox) -> dict[str, Any]:
    """Every figure is a median of repeats, by events. Bandwidths count bytes read and written."""
    bench = OperatorBench(rig)
    found = box.found
    found |= {"model_shape": _shape(rig), "attention": bench.attention.name, "rows": []}
    try:
        found["rows"].append(bench.on_whole())
        for split in rig.splits(SPLITS):
            for measure in (
                partial(bench.alone, Phase.DECODE, split.decode_units),
                partial(bench.alone, Phase.PREFILL, split.prefill_units),
                partial(bench.beside, split),
            ):
                box.check()
                found["rows"].append(measure())
    except BoxIsOver:
        found["left_out"] = "the time of the stage was over"
    return found


def _shape(rig: Rig) -> dict[str, int]:
    model = rig.sizes.model
    return {
        "hidden": model.hidden,
        "intermediate": model.intermediate,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "decode_rows": rig.sizes.rows,
        "context": rig.sizes.context,
    }


class OperatorBench:
    """The work that is timed, made once."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        model, sizes = rig.sizes.model, rig.sizes

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=rig.device, dtype=rig.dtype)

        half = sizes.copy_bytes // 2 // rig.dtype.itemsize
        self._source, self._target = zeros(half), zeros(half)
        self._weight = zeros(model.hidden, 2 * model.intermediate)
        tokens = max(sizes.tokens)
        self._inputs = zeros(tokens, model.hidden)
        # Lanes that run at once may not share what they write.
        self._outputs = {
            phase: zeros(tokens, 2 * model.intermediate) for phase in (Phase.DECODE, Phase.PREFILL)
        }
        heads = Heads(model.heads, model.kv_heads, model.head_dim, model.rms_epsilon)
        shape = AttentionShape(heads, (None,), rig.dtype, rig.device, rig.partitions.units)
        self.attention: AttentionKind = attention_of(shape)
        pages = sizes.rows * -(-sizes.context // PAGE_SIZE) + 1
        self._kv = empty_kv_layer(pages, model.kv_heads, model.head_dim, rig.dtype, rig.device)
        self._queries = zeros(sizes.rows, model.heads, model.head_dim)
        self._attended = torch.zeros_like(self._queries)
        rig.settle()

    def on_whole(self) -> dict[str, Any]:
        return self.alone(Phase.DECODE, self._rig.partitions.units) | {"lane": "whole"}

    def alone(self, phase: Phase, units: int) -> dict[str, Any]:
        """Each operator on one lane while the rest of the card is idle."""
        stream, works = self._rig.lane(phase, units), self._works(phase, units)
        times = {name: self._rig.time_ns(stream, work) for name, work in works.items()}
        return {"lane": str(phase), "units": units, "beside": None, **self._figures(times)}

    def beside(self, split: Split) -> dict[str, Any]:
        """Decode attention and a small product on decode's lane while prefill's runs products."""
        rig = self._rig
        decode = rig.lane(Phase.DECODE, split.decode_units)
        prefill = rig.lane(Phase.PREFILL, split.prefill_units)
        works = self._works(Phase.DECODE, split.decode_units)
        load = self._product(Phase.PREFILL, max(rig.sizes.tokens))
        one_ns = rig.time_ns(prefill, load, 3)
        times, outlived = {}, True
        for name in (f"gemm_{min(rig.sizes.tokens)}", "decode_attention"):
            own_ns = rig.time_ns(decode, works[name], 3)
            wanted_ns = (rig.sizes.repeats + 2) * own_ns * 3.0 + rig.sizes.background_ms * 1e6
            with prefill.current():
                for _ in range(min(2000, 1 + round(wanted_ns / max(1.0, one_ns)))):
                    load()
            last = rig.streams.event()
            last.record(prefill)
            times[name] = rig.time_ns(decode, works[name])
            outlived = outlived and not last.done()
            rig.settle()
        return {
            "lane": "decode",
            "units": split.decode_units,
            "beside": f"products of {max(rig.sizes.tokens)} rows on {split.prefill_units} SMs",
            "beside_all_the_time": outlived,
            **self._figures(times),
        }

    def _works(self, phase: Phase, units: int) -> Mapping[str, Work]:
        # A kernel, and not a copy of memory to memory: engines beside the SMs might do that.
        works: dict[str, Work] = {"copy": lambda: torch.neg(self._source, out=self._target)}
        for tokens in self._rig.sizes.tokens:
            works[f"gemm_{tokens}"] = self._product(phase, tokens)
        works["decode_attention"] = self._decode_attention(units)
        return works

    def _product(self, phase: Phase, tokens: int) -> Work:
        rows, out = self._inputs[:tokens], self._outputs[phase][:tokens]
        return lambda: torch.mm(rows, self._weight, out=out)

    def _decode_attention(self, units: int) -> Work:
        """Every row with pages of its own, planned once: the plan is the host's time."""
        sizes = self._rig.sizes
        each = -(-sizes.context // PAGE_SIZE)
        table = np.arange(1, sizes.rows * each + 1, dtype=np.int32).reshape(sizes.rows, each)
        positions = np.full(sizes.rows, sizes.context - 1, dtype=np.int32)
        tables = decode_tables(np.zeros(sizes.rows, dtype=np.int32), positions, table, sizes.rows)
        attend = self.attention.planner(units).plan(upload(tables, self._rig.device))
        self._rig.settle()
        return lambda: attend(self._queries, self._kv, None, self._attended)

    def _figures(self, times: Mapping[str, float]) -> dict[str, Any]:
        """Times in ns, and what they come to: bytes a ns, FLOPs a ns."""
        sizes, model, item = self._rig.sizes, self._rig.sizes.model, self._rig.dtype.itemsize
        found: dict[str, Any] = {"ns": dict(times)}
        if "copy" in times:
            moved = 2 * self._source.numel() * item
            found["copy_bytes_per_ns"] = moved / max(1.0, times["copy"])
        for tokens in sizes.tokens:
            if f"gemm_{tokens}" in times:
                flops = 2 * tokens * model.hidden * 2 * model.intermediate
                found[f"gemm_{tokens}_flops_per_ns"] = flops / max(1.0, times[f"gemm_{tokens}"])
        moved = 2 * sizes.rows * sizes.context * model.kv_width * item
        found["attention_bytes_per_ns"] = moved / max(1.0, times["decode_attention"])
        return found
