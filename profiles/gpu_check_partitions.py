"""Stage 1: partitions. What the driver gives, whether lanes are disjoint, what switches and contexts cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from muxk.kernel.devices.cuda_facts import gather_facts
from muxk.kernel.devices.cuda_streams import CudaStream, first_line
from muxk.kernel.work import Phase
from muxk.profiles.gpu_check_rig import BoxIsOver, Rig, TimeBox, memory_free

SWITCHES = 500


def check_partitions(rig: Rig, box: TimeBox) -> dict[str, Any]:
    """Fields and read-back; SM ids by lane; events between lanes; graphs; times and bytes."""
    import msgspec

    found = box.found
    found["facts"] = msgspec.to_builtins(gather_facts())
    found["partitions"] = dict(rig.partitions.describe())
    found["splits"] = [[split.decode_units, split.prefill_units] for split in rig.partitions.splits()]
    checks: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("opening", lambda: _opening(rig)),
        ("events_across_lanes", lambda: _events(rig)),
        ("switch", lambda: _switch(rig)),
        ("sm_ids", lambda: _needs_card(rig, lambda: _sm_ids(rig, box))),
        ("graph_from_another_stream", lambda: _needs_card(rig, lambda: _graph(rig))),
    )
    try:
        for name, check in checks:
            box.check()
            found[name] = _tried(check)
    except BoxIsOver:
        found["left_out"] = "the time of the stage was over"
    return found


def _needs_card(rig: Rig, check: Callable[[], Any]) -> Any:
    return "needs a card" if rig.dry else check()


def _tried(check: Callable[[], Any]) -> Any:
    """One check that fails says so, and the others go on."""
    try:
        return check()
    except BoxIsOver:
        raise
    except Exception as error:
        return {"failed": first_line(error)}


def _opening(rig: Rig) -> dict[str, Any]:
    """Time and memory of all pairs, and that closing gives the memory back."""
    before = memory_free(rig.index)
    began = time.perf_counter_ns()
    partitions = rig.open_partitions()
    opened = time.perf_counter_ns()
    during = memory_free(rig.index)
    contexts = 2 * len(partitions.splits()) if partitions.why_not is None else 0
    closing = time.perf_counter_ns()
    partitions.close()
    closed = time.perf_counter_ns()
    after = memory_free(rig.index)
    taken = None if before is None or during is None else before - during
    return {
        "contexts": contexts,
        "open_ms": (opened - began) / 1e6,
        "close_ms": (closed - closing) / 1e6,
        "bytes": taken,
        "bytes_a_context": None if taken is None or not contexts else taken // contexts,
        "bytes_left_behind": None if before is None or after is None else before - after,
    }


def _switch(rig: Rig) -> dict[str, Any]:
    """From the last item on one pair's stream to the first on another's: an event and a wait."""
    first, last = rig.splits(2)[0], rig.splits(2)[-1]
    lanes = [rig.lane(Phase.DECODE, split.decode_units) for split in (first, last)]
    small = torch.zeros(32, device=rig.device)
    rig.settle()
    host_ns = []
    begin, end = rig.streams.event(), rig.streams.event()
    begin.record(lanes[0])
    for number in range(SWITCHES):
        old, new = lanes[number % 2], lanes[(number + 1) % 2]
        began = time.perf_counter_ns()
        event = rig.streams.event()
        event.record(old)
        new.wait(event)
        host_ns.append(time.perf_counter_ns() - began)
        with new.current():
            small.add_(1.0)
    end.record(lanes[SWITCHES % 2])
    rig.wait(end)
    host_ns.sort()
    return {
        "host_us_median": host_ns[SWITCHES // 2] / 1e3,
        "host_us_p99": host_ns[SWITCHES * 99 // 100] / 1e3,
        "switch_and_kernel_us": _tried(lambda: begin.elapsed_ns(end) / SWITCHES / 1e3),
    }


def _events(rig: Rig) -> dict[str, Any]:
    """What one lane writes last, another reads first, ordered by an event alone."""
    split = rig.splits(2)[0]
    writer, reader = (
        rig.lane(Phase.PREFILL, split.prefill_units),
        rig.lane(Phase.DECODE, split.decode_units),
    )
    words = rig.sizes.copy_bytes // 64
    source, seen = torch.zeros(words, device=rig.device), torch.zeros(words, device=rig.device)
    wrong = 0
    for turn in range(1, rig.sizes.repeats + 1):
        rig.settle()
        event = rig.streams.event()
        with writer.current():
            for _ in range(8):
                source.add_(1.0)
        event.record(writer)
        reader.wait(event)
        with reader.current():
            seen.copy_(source)
        done = rig.streams.event()
        done.record(reader)
        rig.wait(done)
        wrong += int((seen != 8.0 * turn).any().item())
    return {"turns": rig.sizes.repeats, "turns_that_read_too_early": wrong}


# --- on a card only ---


def _sm_ids(rig: Rig, box: TimeBox) -> dict[str, Any]:
    """Of every split: the SMs that each lane's programs ran on while both ran at once."""
    whole = _ids(rig, (rig.lane(Phase.DECODE, rig.partitions.units), rig.partitions.units))
    found: dict[str, Any] = {"whole_device_sms": len(whole[0][0]), "splits": {}}
    decoding: list[frozenset[int]] = []
    for split in rig.partitions.splits():
        box.check()
        decode = (rig.lane(Phase.DECODE, split.decode_units), split.decode_units)
        prefill = (rig.lane(Phase.PREFILL, split.prefill_units), split.prefill_units)
        (own, others), both_ms = _ids(rig, decode, prefill)
        alone_ms = [_ids(rig, lane)[1] for lane in (decode, prefill)]
        found["splits"][f"{split.decode_units}+{split.prefill_units}"] = {
            "decode_sms": len(own),
            "prefill_sms": len(others),
            "shared": sorted(own & others),
            "as_asked": len(own) == split.decode_units and len(others) == split.prefill_units,
            "both_ms": both_ms,
            "alone_ms": alone_ms,
            "at_once": both_ms < 0.75 * sum(alone_ms),
            "decode_ids": sorted(own),
        }
        decoding.append(own)
    # What the arbiter takes to be so: it lets lanes of two splits run at once where their ranges do not meet.
    found["decode_partitions_nest"] = all(one <= larger for one, larger in pairwise(decoding))
    return found


def _ids(rig: Rig, *lanes: tuple[CudaStream, int]) -> tuple[list[frozenset[int]], float]:
    """By lane the SMs that its programs ran on, all lanes at work before any is waited for; ms of it all."""
    from muxk.profiles.gpu_check_kernels import PROGRAMS_A_UNIT, write_sm_ids

    outs = [
        torch.full((units * PROGRAMS_A_UNIT,), -1, dtype=torch.int32, device=rig.device) for _, units in lanes
    ]
    for _ in range(2):  # compiled and loaded by the first, timed by the second
        rig.settle()
        began = time.perf_counter_ns()
        for (stream, _), out in zip(lanes, outs, strict=True):
            with stream.current():
                write_sm_ids(out)
        rig.settle()
    took_ms = (time.perf_counter_ns() - began) / 1e6
    return [frozenset(out.tolist()) for out in outs], took_ms


def _graph(rig: Rig) -> dict[str, Any]:
    """A graph keeps the SMs of the stream that it was captured on, whoever replays it."""
    from muxk.kernel.devices.cuda_streams import TorchStream
    from muxk.profiles.gpu_check_kernels import PROGRAMS_A_UNIT, write_sm_ids

    small, large = rig.splits(2)[0], rig.splits(2)[-1]
    own = rig.lane(Phase.DECODE, small.decode_units)
    other = rig.lane(Phase.DECODE, large.decode_units)
    assert isinstance(own, TorchStream)
    out = torch.full((small.decode_units * PROGRAMS_A_UNIT,), -1, dtype=torch.int32, device=rig.device)
    with own.current():
        write_sm_ids(out)  # compiled before the capture
    rig.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=own.stream, capture_error_mode="thread_local"):
        write_sm_ids(out)
    out.fill_(-1)
    rig.settle()
    with other.current():
        graph.replay()
    rig.settle()
    replayed = frozenset(out.tolist())
    return {
        "captured_on_sms": small.decode_units,
        "replayed_from_a_stream_of_sms": large.decode_units,
        "ran_on_sms": len(replayed),
        "ran_where_it_was_captured": replayed == _ids(rig, (own, small.decode_units))[0][0],
    }
