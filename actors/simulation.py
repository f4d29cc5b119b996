"""A whole server over a simulated device in virtual time, as clients see it.

The actors are those of `muxk run`, and requests come through the wire protocol. The run starts when the
device has been measured, which is time 0 of everything here. The same arguments give the same record. Used
by `muxk test`, and by everything else that asks what would happen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from muxk.actors import protocol as wire
from muxk.actors.gateway import Gateway
from muxk.actors.simulation_devices import DeviceSetup as DeviceSetup
from muxk.actors.simulation_devices import open_devices
from muxk.actors.simulation_watch import Notes, WatchedPolicy
from muxk.actors.system import build_specs, installed_version, start_devices
from muxk.kernel.actor import Ref
from muxk.kernel.fronts import ADMIN_PREFIX
from muxk.kernel.messages import FrameReceived, SendFrame
from muxk.kernel.policy import Policy, PolicyBook, PolicyText
from muxk.kernel.recording import Recorder
from muxk.kernel.supervisor import CrashReport
from muxk.kernel.trace import Trace
from muxk.kernel.virtual import StillBusy, VirtualRuntime
from muxk.policies.run_records import End, MomentRecord, RequestRecord, RunRecord

EVENTS_MAX = 2_000_000
"""Messages of a run: about a minute of real time."""
TIME_MAX_NS = 600_000_000_000
"""Default bound on virtual time."""
STEP_NS = 20_000_000
"""How often the driver looks whether everything has ended."""
REQUESTS_A_PEER = 1_000
"""Below what the gateway takes from one client."""
NAMES_SHOWN = 5
TRACE_RECORDS = 64
GATEWAY: Ref[Any] = Ref("gateway")
ADMIN = ADMIN_PREFIX + b"driver"


@dataclass(frozen=True)
class PlannedRequest:
    """A request and when it comes. It gets exactly `output` tokens unless it is ended before."""

    name: str
    group: str
    at_ns: int
    prompt: Sequence[int]
    output: int
    request_class: str = ""
    priority: int = 0
    deadline_ns: int | None = None
    abort_after_ns: int | None = None


@dataclass(frozen=True)
class PlannedSwap:
    """A policy that replaces the one in force."""

    at_ns: int
    policy: Policy
    source: str = ""
    """Its YAML text, whose length says how long it takes to compile."""


class Simulation:
    """One run. `run` is called once."""

    def __init__(
        self,
        policy: Policy,
        device: DeviceSetup,
        *,
        seed: int = 1,
        time_max_ns: int = TIME_MAX_NS,
        events_max: int = EVENTS_MAX,
        text: PolicyText | None = None,
        record: Path | None = None,
    ) -> None:
        """Args:
        text: what the policy was compiled from; a recording keeps it.
        record: a file for `muxk explain --record`. Raises NotARecording.
        """
        self._book = PolicyBook()
        self._recorder = None if record is None else Recorder(record, self._book, installed_version())
        self._text = text
        self._notes = Notes(self._name_of)
        self._run = self._notes.run
        self._time_max_ns = time_max_ns
        self._events_left = events_max
        self._events_max = events_max
        self._requests: dict[str, RequestRecord] = {}
        self._live: dict[str, None] = {}
        self._swapped: dict[str, Policy] = {}
        """By the file name of their swap."""
        self._ready = False
        self._base: Counter[str] = Counter()
        self._decoder = msgspec.msgpack.Decoder(wire.Frame)
        self._encoder = msgspec.msgpack.Encoder()
        self._runtime = self._compose(policy, device, seed)

    def _compose(self, policy: Policy, setup: DeviceSetup, seed: int) -> VirtualRuntime:
        backend = open_devices(setup, self._notes)
        specs = build_specs(
            backend,
            WatchedPolicy(policy, self._notes),
            seed=seed,
            on_ready=self._device_is_measured,
            calibrate=setup.calibrate,
            compile_swapped=self._compile,
            book=self._book,
            text=self._text,
        )
        runtime = VirtualRuntime(
            specs,
            trace=Trace(TRACE_RECORDS),
            seed=seed,
            egress=self._receive,
            encode_every=1 << 30,
            report=self._crashed,
        )
        start_devices(backend, runtime.port)
        self._groups = [""] if backend.cluster is None else [f"@{n}" for n in range(setup.devices)]
        return runtime

    def run(
        self,
        requests: Sequence[PlannedRequest],
        swaps: Sequence[PlannedSwap] = (),
        moments: Sequence[int] = (),
    ) -> RunRecord:
        """Run until every request has ended and every moment was seen; what does not end is a fault."""
        try:
            self._measure()
            self._plan(requests, swaps)
            for at_ns in sorted(moments):
                self._run_to(at_ns)
                self._run.moments[at_ns] = self._state(at_ns)
            self._run_to(max([0, *(swap.at_ns for swap in swaps)]))
            while self._live and self._now_ns() < self._time_max_ns and self._stopped is None:
                self._run_to(self._now_ns() + STEP_NS)
        except StillBusy:
            self._run.faults.append(f"it still was not over after {self._events_max:,} events")
        self._close()
        return self._run

    @property
    def _stopped(self) -> str | None:
        return self._runtime.stop_reason

    def _now_ns(self) -> int:
        return self._runtime.now_ns() - (self._notes.start_ns or 0)

    def _run_to(self, at_ns: int) -> None:
        """To a time of the run."""
        end_ns = (self._notes.start_ns or 0) + at_ns
        while self._recorder is not None and self._runtime.now_ns() + STEP_NS < end_ns:
            self._run_until(self._runtime.now_ns() + STEP_NS)
            self._recorder.write(self._recorder.take())
        if end_ns >= self._runtime.now_ns():
            self._run_until(end_ns)

    def _run_until(self, at_ns: int) -> None:
        self._events_left -= self._runtime.run_until(at_ns, self._events_left)

    def _measure(self) -> None:
        """Let the server start and measure the device; time 0 is at its end."""
        while not self._ready and self._stopped is None and not self._run.faults:
            self._run_to(self._now_ns() + STEP_NS)
        self._notes.start_ns = self._runtime.now_ns()
        self._base = self._counts()
        self._book.journal.zero_ns = self._notes.start_ns
        self._book.journal.sink = self._recorder

    def _device_is_measured(self) -> None:
        self._ready = True

    # --- what clients do ---

    def _plan(self, requests: Sequence[PlannedRequest], swaps: Sequence[PlannedSwap]) -> None:
        """Send everything to the inbox of its time; of one moment swaps come first."""
        for ticket, swap in enumerate(swaps):
            name = f"swap {ticket}"
            self._swapped[name] = WatchedPolicy(swap.policy, self._notes)
            self._send(swap.at_ns, ADMIN, wire.SwapPolicy(swap.source, name, {}, ticket))
        for index, request in enumerate(sorted(requests, key=lambda request: request.at_ns)):
            assert request.name not in self._requests, "names of requests differ"
            peer = b"client-%d" % (index // REQUESTS_A_PEER)
            self._submit(peer, request)

    def _submit(self, peer: bytes, request: PlannedRequest) -> None:
        self._requests[request.name] = RequestRecord(
            request.name, request.group, request.at_ns, len(request.prompt), ttft_slo_ns=request.deadline_ns
        )
        self._run.requests.append(self._requests[request.name])
        self._live[request.name] = None
        submit = wire.Submit(
            request_id=request.name,
            prompt_token_ids=list(request.prompt),
            max_tokens=request.output,
            temperature=0.0,
            ignore_eos=True,
            priority=request.priority,
            deadline=None if request.deadline_ns is None else request.deadline_ns / 1e9,
            request_class=request.request_class,
            detokenize=False,
        )
        self._send(request.at_ns, peer, submit)
        if request.abort_after_ns is not None:
            self._send(request.at_ns + request.abort_after_ns, peer, wire.Abort(request.name))

    def _send(self, at_ns: int, peer: bytes, command: wire.Command) -> None:
        frame = FrameReceived(peer, self._encoder.encode(command))
        self._runtime.inject(GATEWAY, frame, (self._notes.start_ns or 0) + at_ns)

    # --- what clients get ---

    def _receive(self, frame: SendFrame) -> None:
        now_ns = self._now_ns()
        for event in self._decoder.decode(frame.payload).events:
            match event:
                case wire.TokenIds():
                    for name in event.request_ids:
                        request = self._requests[name]
                        request.token_ns.append(now_ns)
                        request.tokens += 1
                case wire.Accepted():
                    self._requests[event.request_id].notes = event.notes
                case wire.Finished():
                    ended = End.ABORTED if event.finish_reason == "abort" else End.FINISHED
                    self._requests[event.request_id].cached_tokens = event.cached_tokens
                    self._ended(event.request_id, ended, "")
                case wire.Failed():
                    self._ended(event.request_id, ENDS.get(event.code, End.FAILED), event.message)
                case wire.PolicySwapped() if not event.accepted:
                    self._run.faults.append(f"a policy was not taken at {now_ns / 1e9:g}s: {event.report}")

    def _ended(self, name: str, end: End, message: str) -> None:
        request = self._requests[name]
        request.end, request.end_ns, request.message = end, self._now_ns(), message
        self._live.pop(name, None)

    # --- what the driver sees ---

    def _compile(self, text: str, filename: str, settings: Mapping[str, str]) -> Policy:
        """What the server gets for the text of a swap: it was compiled before the run."""
        return self._swapped[filename]

    def _crashed(self, report: CrashReport) -> None:
        self._run.faults.append(f"{report.actor} crashed: {report.reason}")

    def _name_of(self, request_id: int) -> str:
        gateway = self._runtime.actor("gateway")
        assert isinstance(gateway, Gateway)
        choice = gateway.state.live.get(request_id)
        return f"request {request_id}" if choice is None else choice.request.name

    def _describe(self, actor: str) -> list[dict[str, Any]]:
        """Of each device."""
        return [self._runtime.actor(actor + group).describe() for group in self._groups]

    def _counts(self) -> Counter[str]:
        """What the arbiters of all devices counted."""
        counts: Counter[str] = Counter()
        for arbiter in self._describe("arbiter"):
            counts.update(arbiter["counts"])
        return counts

    def _state(self, at_ns: int) -> MomentRecord:
        arbiters, pools = self._describe("arbiter"), self._describe("kv_pool")
        queues = self._describe("admission")
        if len(self._groups) > 1:
            queues.append(self._runtime.actor("placement").describe())
        return MomentRecord(
            at_ns=at_ns,
            decode_units=sum(one["split"]["decode"] for one in arbiters),
            prefill_units=sum(one["split"]["prefill"] for one in arbiters),
            decode_batch=sum(one["decode_batch"] for one in arbiters),
            prefill_batches=sum(one["prefill_batches"] for one in arbiters),
            parked=any(one["parked"] for one in arbiters),
            queue_requests=sum(one["waiting"] for one in queues),
            queue_tokens=sum(one.get("waiting_tokens", 0) for one in queues),
            kv_total=sum(one["pages_total"] for one in pools),
            kv_free=sum(one["pages_free"] + one["pages_cached"] for one in pools),
            live=sum(1 for name in self._live if self._requests[name].arrival_ns <= at_ns),
            rules=self._run.decisions[-1].rules if self._run.decisions else (),
        )

    def _close(self) -> None:
        """The end of a run, and what only then is known."""
        run = self._run
        if self._stopped is not None:
            run.faults.append(f"the server stopped: {self._stopped}")
        elif self._live:
            run.faults.append(self._hanging())
        counts = self._counts() if self._stopped is None else Counter[str]()
        run.preemptions = max(0, counts["preemptions"] - self._base["preemptions"])
        run.split_changes = max(0, counts["split changes"] - self._base["split changes"])
        run.ended_ns = max([0, *(request.end_ns for request in run.requests)])
        self._add_answers()
        self._runtime.request_stop("the run is over")
        if self._recorder is not None:
            self._recorder.close()

    def _add_answers(self) -> None:
        """What the policy said of each request."""
        numbers = self._notes.named()
        victims = self._notes.victims
        for request in self._run.requests:
            number = numbers.get(request.name)
            found = None if number is None else self._notes.classes.get(number)
            request.recomputes = 0 if number is None else victims.count(number)
            if found is not None:
                request.class_name = found.name
                request.tbt_slo_ns = found.tbt_slo_ns
                request.ttft_slo_ns = request.ttft_slo_ns or found.ttft_slo_ns

    def _hanging(self) -> str:
        """Who did not end, and where things stand."""
        names = list(self._live)
        shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
        now_ns = self._now_ns()
        state = self._state(now_ns)
        rules = ", ".join(state.rules) or "none"
        return (
            f"{len(names)} of {len(self._requests)} requests did not end within {now_ns / 1e9:g}s: {shown} "
            f"(queue {state.queue_requests}, decode batch {state.decode_batch}, prefill batches "
            f"{state.prefill_batches}, split {state.decode_units}+{state.prefill_units}, free pages "
            f"{state.kv_free} of {state.kv_total}; the last decision: {rules})"
        )


ENDS: Mapping[str, End] = {"invalid": End.REFUSED, "never_fits": End.REFUSED, "overloaded": End.SHED}
"""By the code of `Failed`; all others mean that something broke. A plan is invalid by its lengths only."""
