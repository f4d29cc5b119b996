"""Short behind long, streams beside long prompts, units that follow the work when a phase has none left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from muxk.kernel.device import Lane
from muxk.kernel.devices.sim import SimCosts
from muxk.kernel.work import DecodeWork, Item
from virtual_server import MS, S, VirtualServer, expected_tokens

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
UNITS = 8
SLO_MS = 100
LONG_PROMPT = [97 + i % 26 for i in range(8000)]
SHORT_PROMPT = [66] * 16
STREAM: dict[str, Any] = {"prompt_token_ids": [65] * 30, **GREEDY}
# A layer of the long prompt takes about 0.2 s on all units, all 16 of them 3.4 s.
SLOW_PREFILL = SimCosts(prefill_token_ns=25_000)


@pytest.mark.parametrize("streams", [0, 2])
@pytest.mark.parametrize("policy", ["muxwise", "temporal"])
def test_a_short_prompt_behind_a_long_one_waits_for_some_layers_and_not_for_all(
    policy: str, streams: int
) -> None:
    server = VirtualServer(policy, units=UNITS, layers=16, costs=SLOW_PREFILL, kv_tokens=16_384)
    for index in range(streams):
        server.submit(20 * S, f"stream{index}", max_tokens=100, **STREAM)
    server.submit(20 * S + 300 * MS, "long", prompt_token_ids=LONG_PROMPT, max_tokens=2, **GREEDY)
    server.submit(20 * S + 500 * MS, "short", prompt_token_ids=SHORT_PROMPT, max_tokens=2, **GREEDY)
    server.run_until(40 * S)
    assert server.outcome("short").tokens == expected_tokens(SHORT_PROMPT, 2)
    assert server.outcome("long").tokens == expected_tokens(LONG_PROMPT, 2)
    short_ms = (server.outcome("short").times_ns[0] - 20 * S) / MS - 500
    long_ms = (server.outcome("long").times_ns[0] - 20 * S) / MS - 300
    # The two layers that were on the lane when it came, and its own.
    assert short_ms < 2 * 205 + 20
    assert long_ms > 3300
    assert server.describe("arbiter")["counts"]["preemptions"] >= 1


@pytest.mark.parametrize("policy", ["muxwise", "temporal", "chunked", "static_split"])
def test_no_gap_of_a_stream_is_over_the_slo_while_a_prompt_of_thousands_is_read(policy: str) -> None:
    costs = SimCosts(prefill_token_ns=5_000)
    server = VirtualServer(policy, units=UNITS, layers=8, costs=costs, kv_tokens=16_384)
    server.submit(20 * S, "stream", max_tokens=120, **STREAM)
    prompt = LONG_PROMPT + LONG_PROMPT[:2000]
    server.submit(20 * S + 200 * MS, "long", prompt_token_ids=prompt, max_tokens=2, **GREEDY)
    server.run_until(40 * S)
    assert server.outcome("stream").tokens == expected_tokens([65] * 30, 120)
    assert server.outcome("long").tokens == expected_tokens(prompt, 2)
    stalls = [gap for gap in server.outcome("stream").gaps_ms if gap > SLO_MS]
    assert stalls == []


@dataclass(frozen=True)
class Launch:
    """An item as it was given to the device."""

    at_ns: int
    decode: bool
    units: int


def noted(server: VirtualServer) -> list[Launch]:
    """Every launch from now on."""
    launches: list[Launch] = []
    launch = server.device.launch

    def note(lane: Lane, item: Item, after: Sequence[int]) -> None:
        decode = isinstance(item.work, DecodeWork)
        launches.append(Launch(server.runtime.now_ns(), decode, len(lane.units)))
        launch(lane, item, after)

    server.device.launch = note  # type: ignore[method-assign]
    return launches


def units(launches: list[Launch], decode: bool, after_ns: int, before_ns: int) -> list[int]:
    return [
        one.units
        for one in launches
        if one.decode is decode and after_ns < one.at_ns and one.at_ns < before_ns
    ]


@pytest.mark.parametrize("how", ["ends", "aborted", "gone"])
def test_when_the_last_stream_is_over_the_prefill_goes_on_with_all_units(how: str) -> None:
    server = VirtualServer(units=UNITS, layers=40, costs=SimCosts(prefill_token_ns=12_000), kv_tokens=16_384)
    launches = noted(server)
    count = 60 if how == "ends" else 3000
    server.submit(20 * S, "stream", b"streamer", max_tokens=count, **STREAM)
    server.submit(20 * S + 200 * MS, "long", prompt_token_ids=LONG_PROMPT[:4000], max_tokens=2, **GREEDY)
    over_ns = 20 * S + 500 * MS
    if how == "aborted":
        server.abort(over_ns, "stream", b"streamer")
    elif how == "gone":
        server.leave(over_ns, b"streamer")
    server.run_until(60 * S)
    if how == "ends":
        over_ns = server.outcome("stream", b"streamer").times_ns[-1]
    first_ns = server.outcome("long").times_ns[0]
    assert over_ns < first_ns - 300 * MS, "the prefill was over first"
    beside = units(launches, False, 20 * S + 250 * MS, over_ns)
    assert beside
    assert max(beside) < UNITS
    # What waits on the lanes at that moment, two items and a wasted step, is let through.
    settled_ns = over_ns + 60 * MS
    assert set(units(launches, False, settled_ns, first_ns)) == {UNITS}
    assert server.outcome("long").tokens == expected_tokens(LONG_PROMPT[:4000], 2)


@pytest.mark.parametrize("how", ["ends", "aborted"])
def test_when_the_last_prompt_is_read_decode_takes_the_units_back(how: str) -> None:
    compute_bound = SimCosts(prefill_token_ns=12_000, decode_saturation=1.0)
    server = VirtualServer(units=UNITS, layers=40, costs=compute_bound, kv_tokens=16_384)
    launches = noted(server)
    server.submit(20 * S, "stream", max_tokens=400, **STREAM)
    server.submit(21 * S, "long", prompt_token_ids=LONG_PROMPT[:2000], max_tokens=1, **GREEDY)
    if how == "aborted":
        server.abort(21 * S + 300 * MS, "long")
    server.run_until(60 * S)
    stream = server.outcome("stream")
    assert stream.tokens == expected_tokens([65] * 30, 400)
    over_ns = server.outcome("long").times_ns[0] if how == "ends" else 21 * S + 300 * MS
    settled_ns = over_ns + 2 * SLO_MS * MS
    assert settled_ns < stream.times_ns[-50], "the stream was over first"
    assert max(units(launches, True, 21 * S + 150 * MS, over_ns)) < UNITS
    assert set(units(launches, True, settled_ns, stream.times_ns[-1])) == {UNITS}
    gaps = list(zip(stream.times_ns[1:], stream.gaps_ms, strict=True))
    alone_ms = max(gap for at_ns, gap in gaps if at_ns < 21 * S)
    assert max(gap for at_ns, gap in gaps if at_ns > settled_ns) < 1.1 * alone_ms


def test_units_that_went_to_one_phase_are_given_back_again_and_again() -> None:
    server = VirtualServer(units=UNITS, layers=16, costs=SimCosts(prefill_token_ns=12_000), kv_tokens=16_384)
    launches = noted(server)
    for turn in range(5):
        at_ns = (20 + 2 * turn) * S
        prompt = [*LONG_PROMPT[turn:1000], 65]
        server.submit(at_ns, f"stream{turn}", max_tokens=20, **STREAM)
        server.submit(at_ns + 50 * MS, f"long{turn}", prompt_token_ids=prompt, max_tokens=20, **GREEDY)
        server.run_until(at_ns + 2 * S)
        assert server.outcome(f"long{turn}").tokens == expected_tokens(prompt, 20)
        seen = [set(units(launches, decode, at_ns, at_ns + 2 * S)) for decode in (False, True)]
        assert all(UNITS in phase and len(phase) > 1 for phase in seen), "each phase had all, and a part"
    server.check_whole()
