"""The realtime runtime: anyio for waiting, ZeroMQ inproc for inboxes, one thread for all handlers.

Everything happens in `_turn`, a plain function on the loop thread: it takes the next inbox from the ready
queue, receives one message, calls its handler, until nothing is ready. The tasks around it only wait (for
the doorbell that other threads ring, the earliest timer, the ingress socket) and then call it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import zmq
from anyio.abc import TaskStatus
from muxk.kernel import codec
from muxk.kernel.actor import (
    Actor,
    ActorSpec,
    Context,
    ContractError,
    Message,
    Ref,
    Timer,
    accepted_types,
)
from muxk.kernel.device import DevicePort
from muxk.kernel.doorbell import Doorbell
from muxk.kernel.inbox import Inbox, PostLanes
from muxk.kernel.ingress import Ingress
from muxk.kernel.messages import FrameReceived, PeerGone, PeerSlow, SendFrame
from muxk.kernel.names import GATEWAY_NAME, INGRESS_NAME, UnknownRef
from muxk.kernel.offload import OffloadPool
from muxk.kernel.supervisor import Child, CrashReport, RestartLimit, Supervisor
from muxk.kernel.timers import TimerHeap
from muxk.kernel.trace import DETAIL_BYTES, Trace

TURN_MESSAGES = 128
"""Messages handled before the event loop breathes."""

IDLE_NS = 250_000_000
"""`idle()` of the actors is called at most this often."""


class RealtimeRuntime:
    """Runs actors in real time. One object is one run."""

    def __init__(
        self,
        specs: Sequence[ActorSpec],
        *,
        trace: Trace,
        ingress: Ingress | None = None,
        offload_threads: int = 1,
        limit: RestartLimit | None = None,
        report: Callable[[CrashReport], None] | None = None,
        report_directory: Path | None = None,
    ) -> None:
        """Raises ContractError when handlers and `Accepts` of an actor differ."""
        if ingress is not None:
            _check_gateway(specs)
        self._trace = trace
        self._ingress = ingress
        self._offload_threads = offload_threads
        self._supervisor = Supervisor(
            specs, self, trace, limit=limit, report=report, report_directory=report_directory
        )
        self._inboxes: dict[str, Inbox] = {}
        self._ready: deque[Inbox] = deque()
        self._failures: deque[tuple[Child, BaseException, Message | None]] = deque()
        self._timers: TimerHeap[tuple[Inbox, Inbox, Message]] = TimerHeap()
        self._armed_ns: int | None = None
        self._stop_reason: str | None = None
        self._drain_wanted = False
        self._idle_wanted = False
        self._idle_due_ns = 0
        self._started = False

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> str:
        """Start the children, serve until somebody stops, and return the reason."""
        assert not self._started, "one runtime object is one run"
        self._started = True
        self._stopped, self._rearm = anyio.Event(), anyio.Event()
        self._doorbell = Doorbell()
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lanes = PostLanes(self._zmq)
        self._pool = OffloadPool(self._offload_threads)
        try:
            await self._serve(task_status)
        finally:
            self._close()
        assert self._stop_reason is not None
        return self._stop_reason

    async def _serve(self, task_status: TaskStatus[None]) -> None:
        if self._ingress is not None:
            self._ingress.open(self._zmq, self._tell_gateway)
        self._supervisor.start()
        task_status.started()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._wait_for_doorbell)
            tasks.start_soon(self._wait_for_timers)
            if self._ingress is not None:
                tasks.start_soon(self._wait_for_frames, self._ingress)
            self._doorbell.ring()
            await self._stopped.wait()
            tasks.cancel_scope.cancel()

    def _close(self) -> None:
        self.halt("cancelled")
        self._supervisor.stop()
        self._pool.close()
        self._lanes.close()
        if self._ingress is not None:
            self._ingress.close()
        for inbox in self._inboxes.values():
            inbox.close()
        self._doorbell.close()
        self._zmq.term()

    # What the application calls.

    def request_stop(self, reason: str) -> None:
        """Stop in an orderly way; from the loop thread or a signal handler. The first reason stays."""
        self.halt(reason)
        self._ring()

    def request_drain(self) -> None:
        """Call `draining()` of every actor once; from the loop thread or a signal handler."""
        self._drain_wanted = True
        self._ring()

    def _ring(self) -> None:
        if self._started:
            self._doorbell.ring()

    def port(self, actor_name: str) -> DevicePort:
        """How a device reaches an actor, whatever its generation."""
        return _Port(self, actor_name)

    def actor(self, name: str) -> Actor:
        """The live actor of this name."""
        return self._supervisor.actor(name)

    def now_ns(self) -> int:
        """Integer nanoseconds of the monotonic clock."""
        return time.monotonic_ns()

    # What the supervisor calls.

    def open_inbox(self, child: Child) -> Context:
        inbox = Inbox(self._zmq, child)
        self._inboxes[child.name] = inbox
        return _ActorContext(self, inbox, self._inboxes)

    def close_inbox(self, child: Child) -> None:
        inbox = self._inboxes[child.name]
        assert inbox.child is child
        inbox.close()

    def halt(self, reason: str) -> None:
        if self._stop_reason is None:
            self._stop_reason = reason

    # The pump.

    def _turn(self) -> None:
        """Handle messages until nothing is ready; after TURN_MESSAGES ask for another turn."""
        self._before_turn()
        ready = self._ready
        for _ in range(TURN_MESSAGES):
            if not ready:
                self._pump_ingress()
            if not ready or self._stop_reason is not None:
                break
            self._handle_next(ready.popleft())
            if self._failures:
                self._handle_failures()
        self._after_turn()

    def _before_turn(self) -> None:
        if self._failures:
            self._handle_failures()
        if self._stop_reason is None:
            self._fire_timers()
            self._pump_ingress()
            if self._drain_wanted:
                self._drain_wanted = False
                self._supervisor.drain()

    def _after_turn(self) -> None:
        if self._stop_reason is not None:
            self._stopped.set()
            return
        if self._ready or self._failures or (self._ingress is not None and self._ingress.pending):
            self._doorbell.ring()
        elif self._idle_wanted:
            self._idle()
        deadline_ns = self._next_wake_ns()
        if deadline_ns is not None and (self._armed_ns is None or deadline_ns < self._armed_ns):
            self._rearm.set()

    def _handle_next(self, inbox: Inbox) -> None:
        if not inbox.is_open:
            return
        message: Message | None = None
        try:
            frame = inbox.receive(zmq.NOBLOCK)
            inbox.received += 1
            message = inbox.decode(frame)
            detail = message if len(frame) <= DETAIL_BYTES else len(frame)
            message_type = type(message)
            self._trace.record(time.monotonic_ns(), "handled", inbox.name, message_type.__name__, detail)
            self._idle_wanted = True
            inbox.handlers[message_type](message)
        except Exception as error:
            self._supervisor.crash(inbox.child, error, message)

    def _handle_failures(self) -> None:
        while self._failures and self._stop_reason is None:
            self._supervisor.crash(*self._failures.popleft())

    def _idle(self) -> None:
        """The first quiet moment after work, and not sooner than IDLE_NS after the last one."""
        now_ns = time.monotonic_ns()
        if now_ns >= self._idle_due_ns:
            self._idle_wanted = False
            self._idle_due_ns = now_ns + IDLE_NS
            self._supervisor.idle()

    def _fire_timers(self) -> None:
        now_ns = time.monotonic_ns()
        while (entry := self._timers.pop_due(now_ns)) is not None:
            owner, target, message = entry
            if owner.is_open and target.is_open:
                self.push(owner.name, target, message)

    def _pump_ingress(self) -> None:
        ingress = self._ingress
        if ingress is None or not ingress.pending:
            return
        gateway = self._inboxes[GATEWAY_NAME]
        # Half of the gateway's inbox is for actors; frames beyond it wait in the peers' connections.
        room = gateway.bound // 2 - gateway.depth
        if room > 0:
            ingress.pump(room)

    # Sending.

    def push(self, sender: str, inbox: Inbox, message: Message) -> None:
        """Queue a message from the loop thread."""
        message_type = type(message)
        if message_type not in inbox.handlers:
            inbox.check_accepts(message_type)
        if not inbox.is_open:
            self._trace.record(time.monotonic_ns(), "dropped", sender, message_type.__name__, inbox.name)
            return
        if inbox.sent + inbox.posted - inbox.received >= inbox.bound:
            self._failures.append((inbox.child, inbox.overflow(), message))
            return
        inbox.send(codec.encode(message), zmq.NOBLOCK)
        inbox.sent += 1
        self._ready.append(inbox)
        self._trace.record(time.monotonic_ns(), "sent", sender, message_type.__name__, inbox.name)

    def send_elsewhere(self, ref: Ref[Any], message: Any) -> None:
        """Send to what is not an actor: the ingress."""
        if ref.name != INGRESS_NAME or self._ingress is None:
            raise UnknownRef(ref.name)
        if not isinstance(message, SendFrame):
            raise ContractError(f"{INGRESS_NAME} does not accept {type(message).__name__}")
        self._ingress.send(message)

    def _tell_gateway(self, message: Message) -> None:
        self.push(INGRESS_NAME, self._inboxes[GATEWAY_NAME], message)

    def inbox(self, name: str) -> Inbox:
        """The inbox of the live generation; raises UnknownRef."""
        try:
            return self._inboxes[name]
        except KeyError:
            raise UnknownRef(name) from None

    def post(self, inbox: Inbox, message: Message) -> None:
        """Queue a message from any thread; void when the runtime has stopped or the inbox is closed."""
        inbox.check_accepts(type(message))
        frame = codec.encode(message)
        lane = self._lanes.current()
        if lane is None:
            return
        with lane.lock:
            if lane.closed or not inbox.is_open:
                return
            with inbox.lock:
                fits = inbox.depth < inbox.bound
                inbox.posted += fits
            if not fits:
                self._failures.append((inbox.child, inbox.overflow(), message))
            else:
                try:
                    lane.push(inbox, frame)
                except zmq.Again:  # closed a moment ago; a crash of a dead child is ignored
                    self._failures.append((inbox.child, inbox.overflow(), message))
                else:
                    self._ready.append(inbox)
            self._doorbell.ring()

    def add_timer(self, delay_ns: int, owner: Inbox, target: Inbox, message: Message) -> int:
        """Queue a timer from the loop thread; it is void once its owner or its target is closed."""
        target.check_accepts(type(message))
        deadline_ns = time.monotonic_ns() + max(0, delay_ns)
        return self._timers.add(deadline_ns, (owner, target, message))

    def cancel_timer(self, timer_id: int) -> None:
        """Forget a timer."""
        self._timers.cancel(timer_id)

    def start_offload(self, inbox: Inbox, function: Callable[[], Message]) -> None:
        """Run a function on an offload thread for an actor."""
        self._pool.start(lambda: self._offloaded(inbox, function))

    def _offloaded(self, inbox: Inbox, function: Callable[[], Message]) -> None:
        try:
            self.post(inbox, function())
        except BaseException as error:  # SystemExit on a pool thread would vanish: it is a crash as well
            self._failures.append((inbox.child, error, None))
            self._doorbell.ring()

    # The tasks that wait.

    async def _wait_for_doorbell(self) -> None:
        while True:
            await anyio.wait_readable(self._doorbell.fileno())
            self._doorbell.clear()
            self._turn()

    async def _wait_for_frames(self, ingress: Ingress) -> None:
        while True:
            await anyio.wait_readable(ingress.fileno())
            ingress.pending = True
            self._turn()

    def _next_wake_ns(self) -> int | None:
        timer_ns = self._timers.next_ns()
        if not self._idle_wanted:
            return timer_ns
        return self._idle_due_ns if timer_ns is None else min(timer_ns, self._idle_due_ns)

    async def _wait_for_timers(self) -> None:
        while True:
            self._rearm = anyio.Event()
            self._armed_ns = self._next_wake_ns()
            seconds = None if self._armed_ns is None else (self._armed_ns - time.monotonic_ns()) / 1e9
            with anyio.move_on_after(seconds):
                await self._rearm.wait()
            self._turn()


class _ActorContext:
    """The six verbs, for one generation of one actor."""

    __slots__ = ("_inbox", "_inboxes", "_name", "_push", "_runtime")

    def __init__(self, runtime: RealtimeRuntime, inbox: Inbox, inboxes: dict[str, Inbox]) -> None:
        self._runtime = runtime
        self._inbox = inbox
        self._inboxes = inboxes
        self._name = inbox.name
        self._push = runtime.push

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def send(self, ref: Ref[Any], message: Any) -> None:
        inbox = self._inboxes.get(ref.name)
        if inbox is None:
            self._runtime.send_elsewhere(ref, message)
        else:
            self._push(self._name, inbox, message)

    def send_after(self, delay_ns: int, ref: Ref[Any], message: Any) -> Timer:
        target = self._runtime.inbox(ref.name)
        return Timer(self._runtime.add_timer(delay_ns, self._inbox, target, message))

    def cancel(self, timer: Timer) -> None:
        self._runtime.cancel_timer(timer.timer_id)

    def offload(self, function: Callable[[], Message], size: int) -> None:
        self._runtime.start_offload(self._inbox, function)

    def stop(self, reason: str) -> None:
        self._runtime.halt(reason)


class _Port:
    """How a device reaches an actor. A post belongs to the generation that lives when it is made."""

    def __init__(self, runtime: RealtimeRuntime, name: str) -> None:
        self._runtime = runtime
        self._name = name

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def post(self, message: Message) -> None:
        self._runtime.post(self._runtime.inbox(self._name), message)

    def post_after(self, delay_ns: int, message: Message) -> None:
        inbox = self._runtime.inbox(self._name)
        self._runtime.add_timer(delay_ns, inbox, inbox, message)


def _check_gateway(specs: Sequence[ActorSpec]) -> None:
    for spec in specs:
        if spec.name == GATEWAY_NAME:
            missing = {FrameReceived, PeerGone, PeerSlow} - set(accepted_types(spec.actor_class))
            if missing:
                names = ", ".join(sorted(message.__name__ for message in missing))
                raise ContractError(f"the gateway of an ingress has to accept {names}")
            return
    raise ContractError(f"an ingress needs an actor named {GATEWAY_NAME}")
