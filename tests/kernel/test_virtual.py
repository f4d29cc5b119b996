"""What only the virtual runtime does: jumping time, modelled costs, replay, schedule fuzzing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
from muxk.kernel.actor import Actor, ActorSpec, Message, Ref, Timer
from muxk.kernel.messages import FrameReceived, SendFrame
from muxk.kernel.names import INGRESS
from muxk.kernel.trace import Trace
from muxk.kernel.virtual import StillBusy, VirtualRuntime

HOUR_NS = 3_600_000_000_000


class Tick(Message, frozen=True):
    sender: str
    value: int


class Sink(Actor):
    """Keeps what arrives and when."""

    Accepts: ClassVar = Tick

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, int]] = []

    def on_tick(self, message: Tick) -> None:
        self.seen.append((self.now_ns(), message.sender, message.value))


SINK: Ref[Tick] = Ref("sink")


def sink_runtime(**options: Any) -> tuple[Sink, VirtualRuntime]:
    sink = Sink()
    trace = options.pop("trace", None) or Trace(hashed=True)
    return sink, VirtualRuntime([ActorSpec("sink", lambda: sink, Sink)], trace=trace, **options)


def test_time_jumps_to_each_delivery_and_stays_between_runs() -> None:
    sink, runtime = sink_runtime()
    runtime.inject(SINK, Tick("x", 1), at_ns=HOUR_NS)
    runtime.inject(SINK, Tick("x", 0), at_ns=7)
    assert runtime.run_until(HOUR_NS - 1) == 1
    assert runtime.now_ns() == HOUR_NS - 1
    assert runtime.run_until(HOUR_NS) == 1
    assert sink.seen == [(7, "x", 0), (HOUR_NS, "x", 1)]


def test_what_is_past_can_not_be_injected() -> None:
    _, runtime = sink_runtime()
    runtime.run_until(10)
    with pytest.raises(ValueError, match="past"):
        runtime.inject(SINK, Tick("x", 0), at_ns=9)


def test_a_run_with_pending_timers_leaves_nothing_behind() -> None:
    sink, runtime = sink_runtime()
    runtime.inject(SINK, Tick("x", 1), at_ns=1)
    runtime.run_until(1)
    runtime.post_after("sink", HOUR_NS, Tick("x", 2))
    gone = weakref.ref(runtime)
    del sink, runtime
    gc.collect()
    assert gone() is None


class Forever(Actor):
    Accepts: ClassVar = Tick

    def started(self) -> None:
        self.send(Ref("a"), Tick("a", 0))

    def on_tick(self, message: Tick) -> None:
        self.send(Ref("a"), message)


def test_a_run_that_does_not_end_is_an_error_with_the_time() -> None:
    runtime = VirtualRuntime([ActorSpec("a", Forever, Forever)], trace=Trace())
    with pytest.raises(StillBusy, match="after 100 events, at 0 ns"):
        runtime.run_until_idle(100)


class Canceller(Actor):
    """Sets a far timer and cancels it on the first tick."""

    Accepts: ClassVar = Tick

    def started(self) -> None:
        self.timers: list[Timer] = [self.send_after(HOUR_NS, Ref("a"), Tick("far", n)) for n in range(500)]
        self.send_after(5, Ref("a"), Tick("near", 0))

    def on_tick(self, message: Tick) -> None:
        assert message.sender == "near"
        for timer in self.timers:
            self.cancel(timer)


def test_a_cancelled_timer_does_not_move_time() -> None:
    runtime = VirtualRuntime([ActorSpec("a", Canceller, Canceller)], trace=Trace())
    runtime.run_until_idle()
    assert runtime.now_ns() == 5
    assert runtime.stop_reason is None
    assert len(runtime._agenda) < 200


class Offloader(Actor):
    """Offloads two functions at once."""

    Accepts: ClassVar = Tick

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def started(self) -> None:
        for value in (1, 2):
            self.offload(lambda value=value: Tick("o", value), size=10)

    def on_tick(self, message: Tick) -> None:
        self.seen.append((self.now_ns(), message.value))


@pytest.mark.parametrize(("threads", "times"), [(1, [50, 100]), (2, [50, 50])])
def test_offloaded_functions_take_modelled_time_on_a_modelled_number_of_threads(
    threads: int, times: list[int]
) -> None:
    actor = Offloader()
    runtime = VirtualRuntime(
        [ActorSpec("a", lambda: actor, Offloader)],
        trace=Trace(),
        offload_cost_ns=lambda size: 5 * size,
        offload_threads=threads,
    )
    runtime.run_until_idle()
    assert actor.seen == list(zip(times, (1, 2), strict=True))


class Gateway(Actor):
    Accepts: ClassVar = FrameReceived

    def on_frame_received(self, message: FrameReceived) -> None:
        self.send(INGRESS, SendFrame(peer=message.peer, payload=message.payload.upper()))


def test_a_simulated_client_sees_frames_and_may_answer_them() -> None:
    frames: list[tuple[int, bytes]] = []

    def egress(frame: SendFrame) -> None:
        frames.append((runtime.now_ns(), frame.payload))
        if len(frames) < 3:
            at_ns = runtime.now_ns() + 10
            runtime.inject(Ref("gateway"), FrameReceived(peer=frame.peer, payload=b"b"), at_ns)

    runtime = VirtualRuntime([ActorSpec("gateway", Gateway, Gateway)], trace=Trace(), egress=egress)
    runtime.inject(Ref("gateway"), FrameReceived(peer=b"p", payload=b"a"), at_ns=1)
    runtime.run_until_idle()
    assert frames == [(1, b"A"), (11, b"B"), (21, b"B")]


class Quiet(Actor):
    """Notes when it is asked to check itself."""

    Accepts: ClassVar = Tick

    def __init__(self, idles: list[int]) -> None:
        self.idles = idles

    def on_tick(self, message: Tick) -> None: ...

    def idle(self) -> None:
        self.idles.append(self.now_ns())


def test_idle_is_called_before_a_gap_at_most_every_250_ms_and_at_the_end() -> None:
    idles: list[int] = []
    runtime = VirtualRuntime([ActorSpec("q", lambda: Quiet(idles), Quiet)], trace=Trace())
    times_ms = (0, 0, 100, 240, 260, 900, 901)
    for at_ms in times_ms:
        runtime.inject(Ref("q"), Tick("x", 0), at_ns=at_ms * 1_000_000)
    runtime.run_until_idle()
    assert [at_ns // 1_000_000 for at_ns in idles] == [0, 260, 900, 901]


def test_a_run_whose_checks_are_dear_may_ask_for_fewer() -> None:
    idles: list[int] = []
    specs = [ActorSpec("q", lambda: Quiet(idles), Quiet)]
    runtime = VirtualRuntime(specs, trace=Trace(), idle_every_ns=600_000_000)
    for at_ms in (0, 100, 590, 610, 900):
        runtime.inject(Ref("q"), Tick("x", 0), at_ns=at_ms * 1_000_000)
    runtime.run_until_idle()
    assert [at_ns // 1_000_000 for at_ns in idles] == [0, 610, 900]


class Pinger(Actor):
    """Sends runs of ticks to the sink and wakes again at the same times as the others."""

    Accepts: ClassVar = Tick

    def __init__(self, name: str) -> None:
        self.name = name
        self.value = 0

    def started(self) -> None:
        self.send(Ref(self.name), Tick(self.name, 0))

    def on_tick(self, message: Tick) -> None:
        for _ in range(3):
            self.send(SINK, Tick(self.name, self.value))
            self.value += 1
        if message.value < 20:
            self.send_after(1000, Ref(self.name), Tick(self.name, message.value + 1))


def pingers(seed: int, jitter: bool) -> tuple[list[tuple[int, str, int]], str]:
    sink, trace = Sink(), Trace(hashed=True)
    specs = [ActorSpec("sink", lambda: sink, Sink)]
    specs += [ActorSpec(name, lambda name=name: Pinger(name), Pinger) for name in "abc"]
    VirtualRuntime(specs, trace=trace, seed=seed, jitter=jitter).run_until_idle()
    return sink.seen, trace.hash


def test_jitter_changes_what_happens_at_one_time_but_not_the_order_of_one_pair() -> None:
    orders = set()
    for seed in range(20):
        seen, _ = pingers(seed, jitter=True)
        assert [at_ns for at_ns, _, _ in seen] == sorted(at_ns for at_ns, _, _ in seen)
        for name in "abc":
            assert [value for _, sender, value in seen if sender == name] == list(range(63))
        orders.add(tuple(sender for _, sender, _ in seen))
    assert len(orders) == 20


def test_the_same_seed_gives_the_same_run_and_without_jitter_every_seed_does() -> None:
    assert pingers(3, jitter=True) == pingers(3, jitter=True)
    assert pingers(3, jitter=True)[1] != pingers(4, jitter=True)[1]
    assert pingers(3, jitter=False) == pingers(4, jitter=False)


def test_a_hash_is_the_same_in_every_process_and_under_every_hash_seed() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_virtual import pingers\n"
        "print(pingers(5, jitter=True)[1], pingers(5, jitter=False)[1], 'asyncio' in sys.modules)\n"
    )
    folder = str(Path(__file__).parent)
    outputs = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script, folder],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    hashes = outputs.pop().split()
    assert hashes[:2] == [pingers(5, jitter=True)[1], pingers(5, jitter=False)[1]]


def test_sampling_the_encoding_gives_the_same_run() -> None:
    seen = []
    for encode_every in (1, 7):
        sink, runtime = sink_runtime(encode_every=encode_every)
        for value in range(50):
            runtime.inject(SINK, Tick("x", value), at_ns=value)
        runtime.run_until_idle()
        seen.append(sink.seen)
    assert seen[0] == seen[1]


def test_nothing_is_handled_after_a_stop() -> None:
    sink, runtime = sink_runtime()
    runtime.inject(SINK, Tick("x", 0), at_ns=1)
    runtime.request_stop("enough")
    assert runtime.run_until_idle() == 0
    assert runtime.run_until(5) == 0
    assert (runtime.stop_reason, sink.seen) == ("enough", [])
