"""What only the realtime runtime does: foreign threads, clean shutdown, restarts under fire."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any, ClassVar

import anyio
import pytest
from muxk.kernel.actor import Actor, ActorSpec, Message, Ref
from muxk.kernel.doorbell import Doorbell
from muxk.kernel.realtime import RealtimeRuntime
from muxk.kernel.timers import TimerHeap
from muxk.kernel.trace import Trace
from muxk.profiles.hop_bench import measure_hop


class Posted(Message, frozen=True):
    thread: int
    value: int


class Counter(Actor):
    """Keeps what is posted; stops when it has seen `enough`."""

    Accepts: ClassVar = Posted

    def __init__(self, enough: int) -> None:
        self.enough = enough
        self.seen: list[tuple[int, int]] = []

    def on_posted(self, message: Posted) -> None:
        self.seen.append((message.thread, message.value))
        if len(self.seen) == self.enough:
            self.stop("enough")


def counter_spec(counter: Counter, **options: Any) -> list[ActorSpec]:
    return [ActorSpec("counter", lambda: counter, Counter, **options)]


def post_many(port: Any, thread: int, messages: int) -> None:
    for value in range(messages):
        port.post(Posted(thread, value))


def test_posts_of_many_threads_all_arrive_in_the_order_of_each_thread(realtime: Any) -> None:
    counter = Counter(enough=4 * 2000)
    threads: list[threading.Thread] = []

    def then(runtime: RealtimeRuntime) -> None:
        port = runtime.port("counter")
        threads.extend(threading.Thread(target=post_many, args=(port, index, 2000)) for index in range(4))
        for thread in threads:
            thread.start()

    outcome = realtime(counter_spec(counter), then=then)
    for thread in threads:
        thread.join()
    assert outcome.reason == "enough"
    for index in range(4):
        assert [value for thread, value in counter.seen if thread == index] == list(range(2000))


def test_threads_may_still_post_while_the_runtime_stops_and_after_it(realtime: Any) -> None:
    counter = Counter(enough=500)
    done = threading.Event()
    threads: list[threading.Thread] = []

    def then(runtime: RealtimeRuntime) -> None:
        port = runtime.port("counter")

        def post_until_done(index: int) -> None:
            value = 0
            while not done.is_set():
                port.post(Posted(index, value))
                value += 1

        threads.extend(threading.Thread(target=post_until_done, args=(index,)) for index in range(2))
        for thread in threads:
            thread.start()

    outcome = realtime(counter_spec(counter), then=then)
    outcome.runtime.port("counter").post(Posted(9, 9))
    done.set()
    for thread in threads:
        thread.join()
    assert outcome.reason == "enough"
    assert len(counter.seen) == 500


@pytest.mark.parametrize(("messages", "reason"), [(8, "enough"), (9, "counter crashed: InboxOverflow")])
def test_one_post_over_the_bound_of_an_inbox_is_a_crash_of_the_receiver(
    realtime: Any, messages: int, reason: str
) -> None:
    def then(runtime: RealtimeRuntime) -> None:
        thread = threading.Thread(target=post_many, args=(runtime.port("counter"), 0, messages))
        thread.start()
        thread.join()  # nothing is handled meanwhile: this runs on the loop's thread

    outcome = realtime(counter_spec(Counter(8), inbox_bound=8, permanent=True), then=then)
    assert outcome.reason.startswith(reason)


def test_a_post_that_the_actor_does_not_accept_is_an_error_of_the_device(realtime: Any) -> None:
    class Other(Message, frozen=True):
        pass

    def then(runtime: RealtimeRuntime) -> None:
        with pytest.raises(TypeError, match="counter does not accept Other"):
            runtime.port("counter").post(Other())
        with pytest.raises(LookupError, match="nobody"):
            runtime.port("nobody").post(Other())
        runtime.request_stop("checked")

    assert realtime(counter_spec(Counter(1)), then=then).reason == "checked"


class Fragile(Actor):
    """Crashes on every tenth value; notes its life with what it handles."""

    Accepts: ClassVar = Posted

    def __init__(self, lives: list[list[int]]) -> None:
        lives.append([])
        self._handled = lives[-1]
        self._lives = lives

    def on_posted(self, message: Posted) -> None:
        self._handled.append(message.value)
        if len(self._lives) == 4 and len(self._handled) == 5:
            self.stop("fourth life")
        elif len(self._handled) == 10:
            raise RuntimeError("broke")


def test_posts_go_on_through_restarts_and_values_never_go_back(realtime: Any) -> None:
    lives: list[list[int]] = []
    done = threading.Event()
    threads: list[threading.Thread] = []

    def then(runtime: RealtimeRuntime) -> None:
        port = runtime.port("fragile")

        def post_until_done() -> None:
            value = 0
            while not done.is_set():
                port.post(Posted(0, value))
                value += 1

        threads.append(threading.Thread(target=post_until_done))
        threads[0].start()

    outcome = realtime([ActorSpec("fragile", lambda: Fragile(lives), Fragile)], then=then)
    done.set()
    threads[0].join()
    assert outcome.reason == "fourth life"
    values = [value for life in lives for value in life]
    assert values == sorted(set(values))
    assert [len(life) for life in lives] == [10, 10, 10, 5]


class Busy(Actor):
    """Always has a message for itself."""

    Accepts: ClassVar = Posted

    def started(self) -> None:
        self.send(Ref("busy"), Posted(0, 0))

    def on_posted(self, message: Posted) -> None:
        self.send(Ref("busy"), message)


def test_an_actor_that_is_always_busy_leaves_time_for_other_tasks_and_timers(realtime: Any) -> None:
    counter = Counter(enough=1)

    def then(runtime: RealtimeRuntime) -> None:
        runtime.port("counter").post_after(5_000_000, Posted(0, 0))

    specs = [ActorSpec("busy", Busy, Busy), *counter_spec(counter)]
    assert realtime(specs, then=then).reason == "enough"


def test_a_cancelled_run_closes_everything() -> None:
    async def main() -> None:
        runtime = RealtimeRuntime([ActorSpec("busy", Busy, Busy)], trace=Trace())
        async with anyio.create_task_group() as tasks:
            await tasks.start(runtime.run)
            tasks.cancel_scope.cancel()

    anyio.run(main)
    gc.collect()  # a socket or context left open would be a ResourceWarning, which is an error


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_twenty_runs_leave_no_descriptor_and_no_thread(realtime: Any) -> None:
    def one_run() -> None:
        def then(runtime: RealtimeRuntime) -> None:
            thread = threading.Thread(target=post_many, args=(runtime.port("counter"), 0, 10))
            thread.start()
            thread.join()

        realtime(counter_spec(Counter(10)), then=then)

    one_run()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        one_run()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_sockets_of_threads_that_ended_are_closed_while_the_run_goes_on(realtime: Any) -> None:
    counter = Counter(enough=200)

    def then(runtime: RealtimeRuntime) -> None:
        for index in range(200):
            thread = threading.Thread(target=post_many, args=(runtime.port("counter"), index, 1))
            thread.start()
            thread.join()
        assert len(runtime._lanes._lanes) <= 2

    assert realtime(counter_spec(counter), then=then).reason == "enough"


def test_equal_deadlines_come_up_in_the_order_they_were_added() -> None:
    timers: TimerHeap[str] = TimerHeap()
    for name in "abcdefgh":
        timers.add(5, name)
    timers.add(4, "first")
    assert timers.pop_due(3) is None
    assert [timers.pop_due(5) for _ in range(10)] == ["first", *"abcdefgh", None]


def test_cancelled_timers_do_not_pile_up() -> None:
    timers: TimerHeap[int] = TimerHeap()
    for value in range(10_000):
        timers.cancel(timers.add(1_000_000 + value, value))
    assert len(timers) == 0
    assert len(timers._heap) < 200
    assert timers.next_ns() is None


@pytest.mark.parametrize("with_eventfd", [True, False])
def test_a_doorbell_merges_rings_and_can_be_rung_after_it_was_closed(
    monkeypatch: pytest.MonkeyPatch, with_eventfd: bool
) -> None:
    if not with_eventfd:
        monkeypatch.delattr(os, "eventfd", raising=False)
    doorbell = Doorbell()

    async def wait() -> None:
        for _ in range(3):
            doorbell.ring()
            doorbell.ring()
            with anyio.fail_after(5):
                await anyio.wait_readable(doorbell.fileno())
            doorbell.clear()

    anyio.run(wait)
    doorbell.close()
    doorbell.ring()


def test_the_hop_benchmark_measures_a_time() -> None:
    assert 0 < measure_hop(1000) < 1_000_000
