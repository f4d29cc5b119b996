"""The one thread that talks to the card: it enqueues items, sees them end, and posts what they brought.

It never waits for the card while it serves. An item is enqueued as soon as all it comes after is enqueued:
the order on the card is kept by events that its stream waits for. Decode goes first where both phases wait,
and a prefill item is enqueued a few layers at a time, so that a step that comes meanwhile does not wait for
the rest.

A page changes hands only through the host: an item counts as ended when the event behind its last kernel is
done, also where it failed half way, so that nothing enqueued still reads what is given to somebody else.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from muxk.kernel.cuda_runner import CudaRunner
from muxk.kernel.device import DeviceFailed, DevicePort, ItemDone, ItemFailed
from muxk.kernel.devices.cuda_items import CudaLane, Launch, completion
from muxk.kernel.devices.cuda_streams import CudaEvent, CudaStreams, first_line
from muxk.kernel.work import DecodeWork, Item, PrefillWork

LAUNCHES_MAX = 256
"""Items that wait to be enqueued; the arbiter's backlog ends long before."""
LAYERS_A_TURN = 8
"""Layers of a prefill that are enqueued before the thread looks again: one or two ms of the host's time.
With fewer, attention would be planned more often."""
POLL_S = 50e-6
"""How long the thread rests between two looks at the card."""
SWITCH_S = 500e-6
"""How long the event loop may keep the interpreter while the thread wants it: with Python's 5 ms a step would
begin late, and so would its tokens."""
DRAIN_S = 10.0
"""How long a reset or the end waits for what is in flight: an item that hangs must not keep the process."""

Result = TypeVar("Result")


class Launcher:
    """Owns the thread. `launch` and `call` may be used from any other thread."""

    def __init__(self, streams: CudaStreams, name: str) -> None:
        self._streams = streams
        self._changed = threading.Condition()
        self._incoming: deque[Launch] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._lost: str | None = None
        self._port: DevicePort | None = None
        self._runner: CudaRunner | None = None
        self._lanes: tuple[CudaLane, ...] = ()
        self._waiting: list[Launch] = []
        """Oldest first; the first of a lane may be half enqueued."""
        self._flights: dict[int, Launch] = {}
        """Enqueued and not seen to end."""
        self._events: list[CudaEvent] = []
        self._thread = threading.Thread(target=self._work, name=f"launcher {name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why the device is gone; None while it serves."""
        return self._lost

    def listen(self, port: DevicePort) -> None:
        """Where completions go from now on."""
        self._port = port

    def use(self, streams: CudaStreams, runner: CudaRunner, lanes: Sequence[CudaLane]) -> None:
        """Serve with these from now on; only through `call`."""
        self._streams, self._runner, self._lanes = streams, runner, tuple(lanes)
        self._lost = None

    def release(self) -> None:
        """Refer to no runner and no lane any more; nothing is in flight. Only on the thread."""
        self._runner, self._lanes = None, ()

    def launch(self, lane: CudaLane, item: Item, after: Sequence[int]) -> str | None:
        """Take an item, or tell why not."""
        with self._changed:
            if self._lost is not None:
                return self._lost
            if self._stopping:
                return "the device is closed"
            if len(self._incoming) + len(self._waiting) >= LAUNCHES_MAX:
                return f"more than {LAUNCHES_MAX} items wait to be launched"
            self._incoming.append(Launch(lane, item, tuple(after), item.first_layer))
            self._changed.notify()
        return None

    def call(self, function: Callable[[], Result], timeout_s: float | None = None) -> Result:
        """Run a function on the thread, between two items, and wait for what it returns or raises."""
        future: Future[Result] = Future()
        self.post(lambda: _settle(future, function))
        return future.result(timeout_s)

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the thread, between two items."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; what has not begun is dropped. False when the thread still hangs."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- on the thread ---

    def _work(self) -> None:
        sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        try:
            self._streams.bind()
        except Exception as error:  # told by whatever is launched or called
            self._lose(first_line(error))
        while not self._stopping or self._calls:
            try:
                self._turn()
            except Exception as error:  # a thread that died in silence would leave every request waiting
                self._lose(f"the launcher failed: {first_line(error)}")

    def _turn(self) -> None:
        while self._calls:
            self._calls.popleft()()
        self._take_incoming()
        moved = self._enqueue_next()
        if not self._collect() and not moved:
            self._rest()

    def _rest(self) -> None:
        with self._changed:
            if self._incoming or self._calls or self._stopping:
                return
            self._changed.wait(POLL_S if self._flights else None)

    def _take_incoming(self) -> None:
        while self._incoming:
            self._waiting.append(self._incoming.popleft())
        if self._lost is not None:
            self._fail_all(self._lost)

    def _enqueue_next(self) -> bool:
        """One step, or a few layers of one prefill item; False when nothing waits."""
        if not self._waiting:
            return False
        launch = self._chosen()
        try:
            self._enqueue(launch)
        except Exception as error:  # its reason goes to the client
            self._fail(launch, error)
        if launch.enqueued and self._lost is None:
            self._waiting.remove(launch)
            self._fly(launch)
        return True

    def _fly(self, launch: Launch) -> None:
        if launch.enqueued and self._lost is None:
            self._flights[launch.item.item_id] = launch
            launch.lane.in_flight.append(launch)

    def _chosen(self) -> Launch:
        """The oldest step, or else the oldest item; or what has to be enqueued before it."""
        chosen = next((launch for launch in self._waiting if launch.decodes), self._waiting[0])
        while (first := self._first_needed(chosen)) is not None:
            chosen = first
        return chosen

    def _first_needed(self, launch: Launch) -> Launch | None:
        """An older item that waits too and comes before it: of its lane, or one of `after`."""
        for older in self._waiting:
            if older is launch:
                return None
            if older.lane is launch.lane or older.item.item_id in launch.after:
                return older
        return None

    def _enqueue(self, launch: Launch) -> None:
        assert self._runner is not None
        with launch.lane.stream.current():
            if launch.started is None:
                self._begin(launch)
            self._run(self._runner, launch)
            if launch.next_layer == launch.item.last_layer:
                self._mark_end(launch)

    def _begin(self, launch: Launch) -> None:
        """Have the stream wait for what comes before the item, then mark its start."""
        lane = launch.lane
        for item_id in launch.after:
            before = self._flights.get(item_id)
            if before is not None and before.lane is not lane:
                assert before.ended is not None
                lane.stream.wait(before.ended)
                launch.waits.append(before)
        launch.begun_ns = self._now_ns()
        lane.clock.renew(lane.stream, launch.begun_ns)
        launch.started = self._event()
        launch.started.record(lane.stream)

    def _run(self, runner: CudaRunner, launch: Launch) -> None:
        item, state = launch.item, launch.lane.state
        work, layers = item.work, range(launch.next_layer, item.last_layer)
        launch.next_layer = item.last_layer
        if isinstance(work, DecodeWork):
            launch.pending = runner.decode(state, work, item.item_id)
        elif not isinstance(work, PrefillWork):
            runner.probe(state, work, layers)
        elif item.decode is not None:
            tokens = range(item.first_token, item.last_token)
            launch.decode, launch.pending = runner.fused(state, item.decode, work, tokens, item.item_id)
        else:
            layers = layers[:LAYERS_A_TURN]
            launch.next_layer = layers.stop
            tokens = range(item.first_token, item.last_token)
            launch.pending = runner.prefill(state, work, tokens, layers, item.item_id)

    def _mark_end(self, launch: Launch) -> None:
        launch.queued_ns = self._now_ns()
        event = self._event()
        event.record(launch.lane.stream)
        launch.ended = event

    def _fail(self, launch: Launch, error: Exception) -> None:
        """An item that raised ends when what it had enqueued has ended; a lost card ends all of them."""
        launch.failure = first_line(error)
        fault = self._streams.fault()
        if fault is not None:
            self._lose(fault)
            return
        try:
            if launch.started is None:
                launch.begun_ns = self._now_ns()
                launch.lane.clock.renew(launch.lane.stream, launch.begun_ns)
                launch.started = self._event()
                launch.started.record(launch.lane.stream)
            self._mark_end(launch)
        except Exception as failure:
            self._lose(first_line(failure))

    # --- what has ended ---

    def _collect(self) -> bool:
        """Post all that ended, in the order of each lane; False when nothing did."""
        moved = False
        try:
            for lane in self._lanes:
                while lane.in_flight and lane.in_flight[0].has_ended:
                    self._complete(lane)
                    moved = True
        except Exception as error:  # a query that raises tells of an error of the card
            self._lose(self._streams.fault() or first_line(error))
            moved = True
        return moved

    def _complete(self, lane: CudaLane) -> None:
        """Take out the oldest item of a lane, and before it what it waited for, which has ended too."""
        launch = lane.in_flight[0]
        for before in launch.waits:
            while before.over_ns is None:
                self._complete(before.lane)
        lane.in_flight.popleft()
        del self._flights[launch.item.item_id]
        started_ns, launch.over_ns = self._times(launch)
        launch.waits.clear()
        self._post(completion(launch, started_ns, launch.over_ns))

    def _times(self, launch: Launch) -> tuple[int, int]:
        """When it started and ended; the clocks of two lanes differ a little, what waited started later."""
        assert launch.started is not None
        assert launch.ended is not None
        lane, seen_ns = launch.lane, self._now_ns()
        started_ns = lane.clock.place(launch.started, launch.begun_ns, seen_ns)
        ended_ns = lane.clock.place(launch.ended, launch.queued_ns, seen_ns)
        started_ns = max(started_ns, lane.last_ns, *(before.over_ns or 0 for before in launch.waits))
        lane.last_ns = max(started_ns, ended_ns)
        self._events += [launch.started, launch.ended]
        return started_ns, lane.last_ns

    def _post(self, message: ItemDone | ItemFailed | DeviceFailed) -> None:
        if self._port is not None:
            self._port.post(message)

    def _lose(self, reason: str) -> None:
        """Fail what is in flight, then tell that nothing in memory is what it was."""
        self._lost = reason
        self._fail_all(reason)
        self._post(DeviceFailed(reason))

    def _fail_all(self, reason: str) -> None:
        """Every item that is enqueued or waits."""
        failed = [*self._flights.values(), *self._waiting]
        self._forget()
        for launch in failed:
            self._post(ItemFailed(launch.item.item_id, f"the device is lost: {reason}"))

    def _forget(self) -> None:
        self._flights.clear()
        self._waiting.clear()
        self._events.clear()
        for lane in self._lanes:
            lane.in_flight.clear()

    # --- what `call` is used for ---

    def drain(self) -> int:
        """On the thread: drop what has not begun, wait for the rest; how many items did not end in time."""
        self._take_incoming()
        for launch in tuple(self._waiting):
            if launch.started is not None and self._lost is None:
                self._fail(launch, RuntimeError("dropped half way"))
                self._fly(launch)
        self._waiting.clear()
        deadline = time.monotonic() + DRAIN_S
        while self._flights and time.monotonic() < deadline:
            if not self._collect():
                time.sleep(POLL_S)
        left = len(self._flights)
        self._forget()
        return left

    def anchor(self) -> None:
        """On the thread, with nothing in flight: place the lanes' clocks."""
        for lane in self._lanes:
            lane.clock.anchor(lane.stream, self._now_ns)

    def _event(self) -> CudaEvent:
        return self._events.pop() if self._events else self._streams.event()

    def _now_ns(self) -> int:
        return time.monotonic_ns() if self._port is None else self._port.now_ns()


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # whoever waits for it gets it
        future.set_exception(error)
