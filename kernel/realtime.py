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
)
from muxk.kernel.device import DevicePort
from muxk.kernel.doorbell import Doorbell
from muxk.kernel.inbox import Inbox, PostLanes
from muxk.kernel.ingress import Ingress, Source, check_gateway
from muxk.kernel.messages import LossHeard, SendFrame
from muxk.kernel.names import GATEWAY_NAME, INGRESS_NAME, UnknownRef
from muxk.kernel.offload import OffloadPool
from muxk.kernel.supervisor import Child, CrashReport, RestartLimit, Supervisor
from muxk.kernel.timers import TimerHeap
from muxk.kernel.trace import DETAIL_BYTES, Trace
from muxk.kernel.verbs import ActorContext, Port

TURN_MESSAGES = 128
"""Messages handled before the event loop breathes."""

BUSY_PUMP_EVERY = 32
"""Messages handled between two looks at the ingress while actors are busy."""

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
            check_gateway(specs)
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
        self._hurried = False
        """Somebody outside wants the end, who waits for nobody."""
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
                for source in self._ingress.sources:
                    tasks.start_soon(self._wait_for_frames, source)
            self._doorbell.ring()
            await self._stopped.wait()
            tasks.cancel_scope.cancel()
        if self._ingress is not None:
            await self._ingress.see_off(lambda: self._hurried)

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
        """Stop at once; from the loop thread or a signal handler. The first reason stays.

        Frames that clients do not take in that moment are dropped. An actor's `stop` waits for them a while.
        """
        self._hurried = True
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
        return Port(self, actor_name)

    def actor(self, name: str) -> Actor:
        """The live actor of this name."""
        return self._supervisor.actor(name)

    # What the supervisor calls.

    def open_inbox(self, child: Child) -> Context:
        inbox = Inbox(self._zmq, child)
        self._inboxes[child.name] = inbox
        return ActorContext(self, inbox)

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
        for handled in range(TURN_MESSAGES):
            # Frames come in when actors have nothing to do, and now and then when they always have: a client
            # that floods the socket must not put its frames in front of the tokens of others.
            if not ready or handled % BUSY_PUMP_EVERY == BUSY_PUMP_EVERY - 1:
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
            self._retry_frames()
            if self._drain_wanted:
                self._drain_wanted = False
                self._supervisor.drain()

    def _after_turn(self) -> None:
        frames_wait = self._ingress is not None and self._ingress.pending
        if self._ready or self._failures or frames_wait:
            self._doorbell.ring()
        elif self._idle_wanted and self._stop_reason is None:
            self._idle()
        if self._stop_reason is not None:
            self._stopped.set()
            return
        wake_ns = self._next_wake_ns()
        if wake_ns is not None and (self._armed_ns is None or wake_ns < self._armed_ns):
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
                self._push(owner.name, target, message)

    def _retry_frames(self) -> None:
        retry_ns = self._retry_ns()
        if self._ingress is not None and retry_ns is not None and time.monotonic_ns() >= retry_ns:
            self._ingress.retry()

    def _retry_ns(self) -> int | None:
        return None if self._ingress is None else self._ingress.retry_ns

    def _pump_ingress(self) -> None:
        ingress = self._ingress
        if ingress is None or not ingress.pending:
            return
        gateway = self._inboxes[GATEWAY_NAME]
        # Half of the gateway's inbox is for actors; frames beyond it wait in the peers' connections.
        room = gateway.bound // 2 - gateway.depth
        if room > 0:
            ingress.pump(room)

    # What actors and devices call, through kernel/verbs.py.

    def now_ns(self) -> int:
        """Integer nanoseconds of the monotonic clock."""
        return time.monotonic_ns()

    def sender(self, owner: Inbox) -> Callable[[Ref[Any], Message], None]:
        inboxes, sender = self._inboxes, owner.name

        def send(ref: Ref[Any], message: Message) -> None:
            inbox = inboxes.get(ref.name)
            if inbox is None:
                self._send_out(ref, message)
            else:
                self._push(sender, inbox, message)

        return send

    def _send_out(self, ref: Ref[Any], message: Message) -> None:
        if ref.name != INGRESS_NAME or self._ingress is None:
            raise UnknownRef(ref.name)
        if not isinstance(message, SendFrame | LossHeard):
            raise ContractError(f"{INGRESS_NAME} does not accept {type(message).__name__}")
        self._ingress.send(message)

    def send_after(self, owner: Inbox, delay_ns: int, ref: Ref[Any], message: Message) -> Timer:
        target = self._inbox(ref.name)
        target.check_accepts(type(message))
        deadline_ns = time.monotonic_ns() + max(0, delay_ns)
        return Timer(self._timers.add(deadline_ns, (owner, target, message)))

    def cancel(self, timer: Timer) -> None:
        self._timers.cancel(timer.timer_id)

    def offload(self, owner: Inbox, function: Callable[[], Message], size: int) -> None:
        self._pool.start(lambda: self._offloaded(owner, function))

    def _offloaded(self, inbox: Inbox, function: Callable[[], Message]) -> None:
        try:
            self._post(inbox, function())
        except BaseException as error:  # SystemExit on a pool thread would vanish: it is a crash as well
            self._failures.append((inbox.child, error, None))
            self._doorbell.ring()

    def post(self, name: str, message: Message) -> None:
        self._post(self._inbox(name), message)

    def post_after(self, name: str, delay_ns: int, message: Message) -> Timer:
        return self.send_after(self._inbox(name), delay_ns, Ref(name), message)

    def quiet_until_ns(self, beside: Timer) -> int:
        """Nobody knows what comes next."""
        return self.now_ns()

    def _inbox(self, name: str) -> Inbox:
        inbox = self._inboxes.get(name)
        if inbox is None:
            raise UnknownRef(name)
        return inbox

    # Queueing.

    def _push(self, sender: str, inbox: Inbox, message: Message) -> None:
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

    def _tell_gateway(self, message: Message) -> None:
        self._push(INGRESS_NAME, self._inboxes[GATEWAY_NAME], message)

    def _post(self, inbox: Inbox, message: Message) -> None:
        """Queue a message from any thread; void when the runtime has stopped or the inbox is closed."""
        inbox.check_accepts(type(message))
        frame = codec.encode(message)
        lane = self._lanes.current()
        if lane is None:
            return
        with lane.lock:
            if lane.closed or not inbox.is_open:
                return
            if inbox.reserve() and lane.push(inbox, frame):
                self._ready.append(inbox)
            else:  # over its bound; or closed a moment ago, and a crash of a dead child is ignored
                self._failures.append((inbox.child, inbox.overflow(), message))
            self._doorbell.ring()

    # The tasks that wait.

    async def _wait_for_doorbell(self) -> None:
        while True:
            await anyio.wait_readable(self._doorbell.fileno())
            self._doorbell.clear()
            self._turn()

    async def _wait_for_frames(self, source: Source) -> None:
        while True:
            await anyio.wait_readable(source.fileno())
            source.pending = True
            self._turn()

    def _next_wake_ns(self) -> int | None:
        idle_ns = self._idle_due_ns if self._idle_wanted else None
        wakes_ns = (self._timers.next_ns(), idle_ns, self._retry_ns())
        return min((wake_ns for wake_ns in wakes_ns if wake_ns is not None), default=None)

    async def _wait_for_timers(self) -> None:
        while True:
            self._rearm = anyio.Event()
            self._armed_ns = self._next_wake_ns()
            seconds = None if self._armed_ns is None else (self._armed_ns - time.monotonic_ns()) / 1e9
            with anyio.move_on_after(seconds):
                await self._rearm.wait()
            self._turn()
