"""The virtual runtime: a heap of deliveries in integer nanoseconds, no event loop, no thread, no clock.

Time jumps to the next delivery. The same actors, seed and inputs give the same trace hash in any process.
Every message is encoded and decoded on its way, as in the realtime runtime. With `jitter`, deliveries at
the same time are shuffled by the seed, but never two of one sender-receiver pair: a schedule fuzzer.

`idle()` is called where time is about to pass (the next delivery is later, or there is none), if something
was handled since the last call and `idle_every_ns` have passed; when there is no next delivery, always.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from muxk.kernel import codec
from muxk.kernel.actor import Actor, ActorSpec, Context, ContractError, Message, Ref, Timer
from muxk.kernel.agenda import Agenda, Delivery, VirtualInbox
from muxk.kernel.device import DevicePort
from muxk.kernel.messages import LossHeard, SendFrame
from muxk.kernel.names import INGRESS_NAME, UnknownRef
from muxk.kernel.supervisor import Child, CrashReport, InboxOverflow, RestartLimit, Supervisor
from muxk.kernel.trace import DETAIL_BYTES, Trace
from muxk.kernel.verbs import ActorContext, Port

IDLE_NS = 250_000_000
"""`idle()` of the actors is called at most this often in virtual time."""

OFFLOAD_BASE_NS = 20_000
OFFLOAD_NS_PER_SIZE = 100
"""Default cost of an offloaded function; with bytes of text as size it is a 10 MB/s tokenizer."""

DEVICE: Ref[Any] = Ref("device")
"""Sends what devices post."""

FOREVER_NS = 1 << 62

EVENTS_MAX = 10_000_000
"""Default bound of events in one `run_until_idle`."""


def default_offload_cost_ns(size: int) -> int:
    """Modelled time of an offloaded function, in ns."""
    return OFFLOAD_BASE_NS + OFFLOAD_NS_PER_SIZE * size


class StillBusy(RuntimeError):
    """A run that was to end by itself did not."""


class VirtualRuntime:
    """Runs actors in virtual time. One object is one run."""

    def __init__(
        self,
        specs: Sequence[ActorSpec],
        *,
        trace: Trace,
        seed: int = 0,
        jitter: bool = False,
        egress: Callable[[SendFrame], None] | None = None,
        encode_every: int = 1,
        offload_cost_ns: Callable[[int], int] = default_offload_cost_ns,
        offload_threads: int = 1,
        limit: RestartLimit | None = None,
        report: Callable[[CrashReport], None] | None = None,
        report_directory: Path | None = None,
        idle_every_ns: int = IDLE_NS,
    ) -> None:
        """`egress` is called at once with each frame sent to the ingress and may call `inject`.

        Raises ContractError when handlers and `Accepts` of an actor differ.
        """
        assert encode_every >= 1
        self._trace = trace
        self._hashed, self._keep = trace.hashed, trace.keep
        self._agenda = Agenda(random.Random(seed) if jitter else None)
        self._egress = egress
        self._encode_every = encode_every
        self._offload_cost_ns = offload_cost_ns
        self._offload_free_ns = [0] * offload_threads
        self._supervisor = Supervisor(
            specs, self, trace, limit=limit, report=report, report_directory=report_directory
        )
        self._inboxes: dict[str, VirtualInbox] = {}
        self._failures: list[tuple[Child, Exception, Message | None]] = []
        self._idle_every_ns = idle_every_ns
        self._idle_due_ns = 0
        self._idle_wanted = False
        self._until_ns: int | None = None
        """Where the run that goes on ends; None: nowhere."""
        self._started = False
        self._send_of_device = self.sender(DEVICE)
        self.stop_reason: str | None = None
        """Why the run ended, or None while it goes on."""

    # What the application calls.

    def start(self) -> None:
        """Start the children at time 0; the first run or inject does it when nobody else did."""
        if not self._started:
            self._started = True
            self._supervisor.start()
            self._settle()

    def now_ns(self) -> int:
        """Virtual time."""
        return self._agenda.now_ns

    def inject(self, ref: Ref[Any], message: Message, at_ns: int) -> None:
        """Deliver a message from outside at a time that is not past."""
        self.start()
        if at_ns < self._agenda.now_ns:
            raise ValueError(f"{at_ns} ns is past, it is {self._agenda.now_ns} ns")
        _check_accepts(self._inbox(ref.name), message)
        frame = self._frame(message)
        self._agenda.add(at_ns, "outside", Delivery(ref.name, None, None, message, frame, queued=False))

    def run_until(self, time_ns: int, max_events: int | None = None) -> int:
        """Handle everything up to and including `time_ns`, which is then the time; the number handled.

        Raises StillBusy after `max_events`.
        """
        if time_ns < self._agenda.now_ns:
            return 0
        handled = self._run(time_ns, max_events)
        if self.stop_reason is None:
            self._agenda.now_ns = max(self._agenda.now_ns, time_ns)
        return handled

    def run_until_idle(self, max_events: int = EVENTS_MAX) -> int:
        """Handle everything; the number handled. Raises StillBusy after `max_events`."""
        return self._run(None, max_events)

    def request_stop(self, reason: str) -> None:
        """Stop now; the first reason stays."""
        self.halt(reason)
        self._settle()

    def request_drain(self) -> None:
        """Call `draining()` of every actor, once."""
        self.start()
        self._supervisor.drain()
        self._settle()

    def port(self, actor_name: str) -> DevicePort:
        """How a device reaches an actor, whatever its generation."""
        return Port(self, actor_name)

    def actor(self, name: str) -> Actor:
        """The live actor of this name."""
        return self._supervisor.actor(name)

    # What the supervisor calls.

    def open_inbox(self, child: Child) -> Context:
        decode = codec.decoder(child.spec.actor_class)
        inbox = VirtualInbox(child.name, child, child.handlers, decode, child.spec.inbox_bound)
        self._inboxes[child.name] = inbox
        return ActorContext(self, inbox)

    def close_inbox(self, child: Child) -> None:
        self._inboxes[child.name].is_open = False

    def halt(self, reason: str) -> None:
        if self.stop_reason is None:
            self.stop_reason = reason

    # The loop.

    def _run(self, until_ns: int | None, max_events: int | None) -> int:
        self.start()
        self._until_ns = until_ns
        agenda = self._agenda
        handled = 0
        while self.stop_reason is None:
            if handled == max_events and agenda.is_busy(until_ns):
                raise StillBusy(f"still busy after {max_events} events, at {agenda.now_ns} ns")
            sent = agenda.take_sent()
            if sent is not None:
                _, inbox, message, frame = sent
                if not inbox.is_open:
                    continue
                inbox.depth -= 1
                self._deliver(inbox, message, frame)
            else:
                delivery = agenda.take_timer()
                if delivery is not None:
                    self._handle(delivery)
                elif self._let_time_pass(until_ns):
                    continue
                else:
                    break
            handled += 1
        return handled

    def _let_time_pass(self, until_ns: int | None) -> bool:
        """To the next delivery, after a look at the actors; False when there is none until then."""
        agenda = self._agenda
        next_ns = agenda.next_ns()
        # Nothing can change until next_ns: a good time to check, but not too often.
        if self._idle_wanted and (next_ns is None or agenda.now_ns >= self._idle_due_ns):
            self._idle()
            return True
        if next_ns is None or (until_ns is not None and next_ns > until_ns):
            return False
        agenda.now_ns = next_ns
        return True

    def _idle(self) -> None:
        self._idle_wanted = False
        self._idle_due_ns = self._agenda.now_ns + self._idle_every_ns
        self._supervisor.idle()
        self._settle()

    def _handle(self, delivery: Delivery) -> None:
        """One of the heap."""
        inbox = delivery.inbox or self._inboxes[delivery.target]
        inbox.depth -= delivery.queued
        if delivery.failure is not None:
            self._idle_wanted = True
            self._supervisor.crash(inbox.child, delivery.failure, None)
            self._settle()
        elif inbox.is_open:
            self._deliver(inbox, delivery.message, delivery.frame)

    def _deliver(self, inbox: VirtualInbox, message: Message, frame: bytes | None) -> None:
        self._idle_wanted = True
        message_type = type(message)
        now_ns, name = self._agenda.now_ns, message_type.__name__
        if self._hashed:
            self._trace.mix(now_ns, inbox.name, frame or name.encode())
        # Of a large message the name alone: the ring keeps what it is given.
        large = frame is not None and len(frame) > DETAIL_BYTES
        self._keep((now_ns, "handled", inbox.name, name, None if large else message))
        try:
            inbox.handlers[message_type](message if frame is None else inbox.decode(frame))
        except Exception as error:
            self._supervisor.crash(inbox.child, error, message)
        if self._failures or self.stop_reason is not None:
            self._settle()

    def _settle(self) -> None:
        """After a handler: crash who overflowed, and stop the children when the run is over."""
        while self._failures and self.stop_reason is None:
            self._supervisor.crash(*self._failures.pop(0))
        if self.stop_reason is not None:
            self._supervisor.stop()

    # What actors and devices call, through kernel/verbs.py.

    def sender(self, owner: VirtualInbox | Ref[Any]) -> Callable[[Ref[Any], Message], None]:
        """What it returns is kept short in calls: each message goes through it."""
        agenda, inboxes, keep, sender = self._agenda, self._inboxes, self._keep, owner.name
        encode_every = self._encode_every

        def send(ref: Ref[Any], message: Message) -> None:
            inbox = inboxes.get(ref.name)
            if inbox is None:
                self._send_out(sender, ref, message)
                return
            message_type = type(message)
            if message_type not in inbox.handlers:
                raise _not_accepted(inbox, message)
            if not inbox.is_open or inbox.depth >= inbox.bound:
                self._drop(sender, inbox, message)
                return
            inbox.depth += 1
            frame = None if agenda.sequence % encode_every else codec.encode(message)
            agenda.send(sender, inbox, message, frame)
            keep((agenda.now_ns, "sent", sender, message_type.__name__, inbox.name))

        return send

    def _drop(self, sender: str, inbox: VirtualInbox, message: Message) -> None:
        """Sent to one that has ended, or whose inbox is full, which is a crash of its own."""
        if inbox.is_open:
            self._failures.append((inbox.child, InboxOverflow(inbox.name, inbox.bound), message))
        else:
            self._trace.record(self._agenda.now_ns, "dropped", sender, type(message).__name__, inbox.name)

    def post(self, name: str, message: Message) -> None:
        self._send_of_device(Ref(name), message)

    def post_after(self, name: str, delay_ns: int, message: Message) -> Timer:
        inbox = self._inbox(name)
        return self._deliver_after(inbox, delay_ns, inbox, message)

    def _inbox(self, name: str) -> VirtualInbox:
        inbox = self._inboxes.get(name)
        if inbox is None:
            raise UnknownRef(name)
        return inbox

    def _send_out(self, sender: str, ref: Ref[Any], message: Message) -> None:
        if ref.name != INGRESS_NAME:
            raise UnknownRef(ref.name)
        if isinstance(message, LossHeard):
            return  # `egress` takes every frame
        if not isinstance(message, SendFrame):
            raise ContractError(f"{INGRESS_NAME} does not accept {type(message).__name__}")
        if self._hashed:
            self._trace.mix(self._agenda.now_ns, INGRESS_NAME, message.payload)
        self._keep((self._agenda.now_ns, "sent", sender, "SendFrame", INGRESS_NAME))
        if self._egress is not None:
            self._egress(message)

    def send_after(self, owner: VirtualInbox, delay_ns: int, ref: Ref[Any], message: Message) -> Timer:
        return self._deliver_after(owner, delay_ns, self._inbox(ref.name), message)

    def _deliver_after(
        self, owner: VirtualInbox, delay_ns: int, target: VirtualInbox, message: Message
    ) -> Timer:
        _check_accepts(target, message)
        delivery = Delivery(target.name, target, owner, message, self._frame(message), queued=False)
        at_ns = self._agenda.now_ns + (delay_ns if delay_ns > 0 else 0)
        return Timer(self._agenda.add(at_ns, owner.name, delivery))

    def cancel(self, timer: Timer) -> None:
        self._agenda.cancel(timer.timer_id)

    def quiet_until_ns(self, beside: Timer) -> int:
        """Whoever calls `run_until` may do anything after that, and a crash that is to come is no silence."""
        if self._failures or self.stop_reason is not None:
            return self._agenda.now_ns
        next_ns = self._agenda.next_beside(beside.timer_id)
        bounds_ns = [at_ns for at_ns in (next_ns, self._until_ns) if at_ns is not None]
        return min(bounds_ns, default=FOREVER_NS)

    def offload(self, owner: VirtualInbox, function: Callable[[], Message], size: int) -> None:
        """Run a function now; its message arrives when one of the modelled threads would have ended it."""
        free_ns = self._offload_free_ns
        thread = free_ns.index(min(free_ns))
        free_ns[thread] = max(self._agenda.now_ns, free_ns[thread]) + self._offload_cost_ns(size)
        self._agenda.add(free_ns[thread], f"{owner.name}/offload", self._offloaded(owner, function))

    def _offloaded(self, owner: VirtualInbox, function: Callable[[], Message]) -> Delivery:
        try:
            message = function()
            _check_accepts(owner, message)
            return Delivery(owner.name, owner, None, message, self._frame(message), queued=False)
        except Exception as error:
            return Delivery(owner.name, owner, None, Message(), None, queued=False, failure=error)

    def _frame(self, message: Message) -> bytes | None:
        return codec.encode(message) if self._agenda.sequence % self._encode_every == 0 else None


def _check_accepts(inbox: VirtualInbox, message: Message) -> None:
    if type(message) not in inbox.handlers:
        raise _not_accepted(inbox, message)


def _not_accepted(inbox: VirtualInbox, message: Message) -> ContractError:
    return ContractError(f"{inbox.name} does not accept {type(message).__name__}")
