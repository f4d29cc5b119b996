"""One run of `muxk sim`: a workload against the production actors on a simulated GPU, in virtual time.

Requests are made when they are due and forgotten when they ended, so that memory does not grow with their
number. Time 0 is when the device has been measured, as a server measures a real one. The same plan gives the
same result; only `Run.wall` differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
from muxk.actors import protocol as wire
from muxk.actors.gpu_backend import GpuBackend
from muxk.actors.policy_files import OpenedPolicy
from muxk.actors.system import build_specs, installed_version, start_devices
from muxk.client.class_measures import ClassMeasures
from muxk.client.closed_loop import ClosedLoop
from muxk.client.collecting import collected_rarely
from muxk.client.errors import ClientError
from muxk.client.measures import Measures, Objectives, Served
from muxk.client.sim_clients import LiveRequest, LiveRequests
from muxk.client.spoken import SpokenAnswers
from muxk.client.timed_policy import TimedPolicy
from muxk.client.traffic import TrafficRequest, Workload, token_ids
from muxk.client.turns import Turns
from muxk.kernel.actor import Ref
from muxk.kernel.arbiter import Arbiter
from muxk.kernel.idle import IdleReport, combined
from muxk.kernel.journal import Sink
from muxk.kernel.messages import FrameReceived, SendFrame
from muxk.kernel.policy import Policy, PolicyBook
from muxk.kernel.recording import Recorder
from muxk.kernel.shadow import ShadowTally
from muxk.kernel.supervisor import CrashReport
from muxk.kernel.trace import Trace
from muxk.kernel.view import RequestView
from muxk.kernel.virtual import VirtualRuntime

S = 1_000_000_000
STEP_NS, LIVE_STEP_NS, QUIET_STEP_NS = 100_000_000, S, 100 * S
"""How often the driver looks around: at the end of the run, before it with live requests, and without."""
SILENCE_MAX_NS = 600 * S
"""After so long without a token while requests are live, something is wrong."""
PEERS, PEER_REQUESTS = 64, 1024
"""Clients that the requests come from, so many from each in turn: a server bounds what one of them may have
live, and sends one frame a client and step."""
TRACE_RECORDS = 64
CHECK_EVERY_NS = 60 * S
"""Between two checks of the server's invariants: they read the whole KV pool, which is large here."""
GATEWAY: Ref[Any] = Ref("gateway")
COUNTED = ("preemptions", "split changes", "decode steps")
MOVED = (("migrations", "requests"), ("migrated pages", "pages"))
FETCHED = (("fetches", "fetches"), ("fetched pages", "fetched_pages"))

Progress = Callable[[float | None, float, int], None]
"""(share done, None where it is not known; seconds of virtual time; requests ended)."""


class SimError(ClientError):
    """A run that could not go on: the text is for the user."""


@dataclass(frozen=True)
class SimPlan:
    """What to run."""

    opened: OpenedPolicy
    gpu: GpuBackend
    workload: Workload
    requests_max: int | None
    duration_ns: int | None
    """Requests that arrive before this are sent."""
    seed: int = 0
    record: Path | None = None
    output_max: int | None = None
    """No more requests are sent after those that ask for so many tokens together."""
    objectives: Objectives | None = None
    """What is judged by; None: the policy's SLOs. Classes of requests are judged by their own."""
    turns: Turns = Turns.OPEN
    shadow: ShadowTally | None = None
    """Who is asked beside the policy, and never acts."""
    sink: Sink | None = None
    """Where decisions go, in place of a record."""
    each: Callable[[Served], None] = lambda served: None
    """Called with every request that ended."""


@dataclass
class Wall:
    """What depends on the machine that simulated."""

    seconds: float = 0.0
    scheduler_seconds: float = 0.0
    scheduler_slowest_seconds: float = 0.0


@dataclass
class Run:
    """What a run came to. Times in ns."""

    measures: Measures
    classes: dict[str, Measures] = field(default_factory=dict)
    """Of a policy with several classes, each by its own SLOs."""
    duration_ns: int = 0
    """Of virtual time, from the end of the calibration."""
    calibration_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts of completed requests: taken from the KV pool."""
    refused: dict[str, int] = field(default_factory=dict)
    """Requests that did not end well, by the code of their error."""
    reason: str = ""
    """What the first of those was told."""
    residency_ms: dict[str, int] = field(default_factory=dict)
    """By split, as `decode+prefill` units."""
    counts: dict[str, int] = field(default_factory=dict)
    idle: IdleReport | None = None
    """Why units had no kernel; None of a run that failed."""
    recomputes: int = 0
    answers: int = 0
    """Questions that the policy answered."""
    rule_errors: dict[str, int] = field(default_factory=dict)
    """By their text: what the policy could not answer, so that what it extends or the defaults did."""
    longest_tokens: int = 0
    """Of a prompt with its answer."""
    record_ended: str = ""
    """Why the record ends before the run does; empty when it is whole."""
    wall: Wall = field(default_factory=Wall)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def objectives_of(policy: Policy) -> Objectives:
    """The SLOs of a policy for a request without a class."""
    short, long = (_ttft_ns(policy, tokens) for tokens in (1000, 2000))
    slope_ns = (long - short) / 1000
    base_ns = max(1.0, short - 1000 * slope_ns)
    return Objectives(policy.tbt_slo_ns / 1e6, base_ns / 1e6, slope_ns / 1e6)


def _ttft_ns(policy: Policy, prompt_tokens: int) -> int:
    view = RequestView(0, 0, 0, prompt_tokens, 0, 1, 0, 0, 0)
    return policy.classify(view).chosen.ttft_slo_ns


def simulate(plan: SimPlan, progress: Progress = lambda share, now_s, ended: None) -> Run:
    """Raises SimError, NotARecording, or what reading a trace raises."""
    with collected_rarely():
        return _Simulator(plan, progress).run()


class _Simulator:
    """`run` is called once."""

    def __init__(self, plan: SimPlan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._policy = TimedPolicy(plan.opened.policy)
        self._book = PolicyBook()
        self._recorder = (
            None if plan.record is None else Recorder(plan.record, self._book, installed_version())
        )
        self._run = Run(Measures(plan.objectives or objectives_of(plan.opened.policy)))
        self._classes = ClassMeasures(plan.opened.policy)
        self._run.classes = self._classes.by_name
        self._loop = ClosedLoop(plan.workload) if plan.turns is Turns.CLOSED else None
        self._live = LiveRequests()
        self._spoken = SpokenAnswers()
        self._sent = self._ended_count = self._output_tokens = 0
        self._start_ns = self._heard_ns = 0
        self._ready = False
        self._crash: CrashReport | None = None
        self._decoder = msgspec.msgpack.Decoder(wire.Frame)
        self._encoder = msgspec.msgpack.Encoder()
        self._runtime = self._compose()

    def _compose(self) -> VirtualRuntime:
        plan, backend = self._plan, self._plan.gpu.backend
        specs = build_specs(
            backend,
            self._policy,
            seed=plan.seed,
            on_ready=self._device_is_measured,
            book=self._book,
            text=plan.opened.text,
        )
        runtime = VirtualRuntime(
            specs,
            trace=Trace(TRACE_RECORDS),
            seed=plan.seed,
            egress=self._receive,
            encode_every=1 << 62,
            report=self._crashed,
            idle_every_ns=CHECK_EVERY_NS,
        )
        start_devices(backend, runtime.port)
        return runtime

    def run(self) -> Run:
        began = perf_counter()
        try:
            self._measure()
            for request in self._planned():
                self._run_to(request.arrival_ns)
                self._submit(request)
            while self._live:
                self._run_to(self._now_ns() + STEP_NS)
            self._tell()
        finally:
            self._close()
        self._run.wall.seconds = perf_counter() - began
        return self._run

    def _planned(self) -> Iterator[TrafficRequest]:
        plan = self._plan
        asked = 0
        source = plan.workload.requests() if self._loop is None else self._loop.requests(self._wait)
        for request in islice(source, plan.requests_max):
            late = plan.duration_ns is not None and request.arrival_ns >= plan.duration_ns
            if late or (plan.output_max is not None and asked >= plan.output_max):
                return
            asked += request.output_tokens
            yield request

    def _tell(self) -> None:
        plan = self._plan
        done = (self._ended_count, self._now_ns(), self._output_tokens)
        wanted = (plan.requests_max, plan.duration_ns, plan.output_max)
        shares = [part / whole for part, whole in zip(done, wanted, strict=True) if whole]
        share = min(1.0, max(shares)) if shares else None
        self._progress(share, self._now_ns() / S, self._ended_count)

    # --- time ---

    def _now_ns(self) -> int:
        return self._runtime.now_ns() - self._start_ns

    def _run_to(self, at_ns: int) -> None:
        """In steps, so that a recording can be written and silence is noticed."""
        while self._now_ns() < at_ns:
            step_ns = QUIET_STEP_NS if self._ready and not self._live else LIVE_STEP_NS
            self._runtime.run_until(self._start_ns + min(at_ns, self._now_ns() + step_ns))
            if self._recorder is not None:
                self._recorder.write(self._recorder.take())
            self._check_progress()
            self._tell()

    def _wait(self, at_ns: int) -> int:
        """One step towards a time."""
        self._run_to(min(at_ns, self._now_ns() + STEP_NS))
        return self._now_ns()

    def _check_progress(self) -> None:
        if self._crash is not None:
            raise SimError(f"{self._crash.actor} crashed: {self._crash.reason}")
        if self._runtime.stop_reason is not None:
            raise SimError(f"the simulated server stopped: {self._runtime.stop_reason}")
        if self._live and self._now_ns() - self._heard_ns > SILENCE_MAX_NS:
            raise SimError(
                f"{len(self._live)} requests are live at {self._now_ns() / S:g} s, and none had a token for "
                f"{SILENCE_MAX_NS // S} s: the policy does not let them go on"
            )

    def _measure(self) -> None:
        """Let the server start and measure the device."""
        while not self._ready:
            self._run_to(self._now_ns() + STEP_NS)
        self._run.calibration_ns = self._start_ns = self._runtime.now_ns()
        self._before = self._describe("arbiter")
        self._idle_before = self._idle()
        self._book.journal.zero_ns = self._start_ns
        self._book.journal.sink = self._plan.sink or self._recorder
        self._book.shadow = self._plan.shadow

    def _device_is_measured(self) -> None:
        self._ready = True

    def _crashed(self, report: CrashReport) -> None:
        self._crash = self._crash or report

    # --- what clients do and get ---

    def _submit(self, request: TrafficRequest) -> None:
        name = f"r{self._sent}"
        ids = token_ids(request.prompt, self._plan.gpu.backend.tokenizer.vocabulary_size, self._spoken)
        prompt = ids.tolist()
        chosen = self._classes.class_of(request, len(prompt))
        self._live.add(name, LiveRequest(request, len(prompt), chosen))
        self._run.longest_tokens = max(self._run.longest_tokens, len(prompt) + request.output_tokens)
        if len(self._live) == 1:
            self._heard_ns = self._now_ns()
        submit = wire.Submit(
            request_id=name,
            prompt_token_ids=prompt,
            max_tokens=request.output_tokens,
            temperature=0.0,
            ignore_eos=True,
            request_class=request.request_class,
            detokenize=False,
        )
        peer = b"client-%d" % (self._sent // PEER_REQUESTS % PEERS)
        frame = FrameReceived(peer, self._encoder.encode(submit))
        self._sent += 1
        self._runtime.inject(GATEWAY, frame, self._runtime.now_ns())

    def _receive(self, frame: SendFrame) -> None:
        now_ns = self._now_ns()
        for event in self._decoder.decode(frame.payload).events:
            if isinstance(event, wire.TokenIds):
                self._live.hear(event, now_ns if event.at_ns is None else event.at_ns - self._start_ns)
                self._output_tokens += len(event.token_ids)
                self._heard_ns = now_ns
            elif isinstance(event, wire.Finished):
                live = self._ended(event.request_id)
                self._run.prompt_tokens += live.prompt_tokens
                self._run.cached_tokens += event.cached_tokens
                self._spoken.keep(live.request.answer_stream, live.said)
                if self._loop is not None:
                    self._loop.answered(live.request, now_ns)
            elif isinstance(event, wire.Failed):
                self._ended(event.request_id, f"{event.code}: {event.message}")
                refused = self._run.refused
                refused[event.code] = refused.get(event.code, 0) + 1
                self._run.reason = self._run.reason or event.message

    def _ended(self, name: str, error: str = "") -> LiveRequest:
        live = self._live.take(name)
        chosen = live.chosen
        slo_ns = None if chosen is None else chosen.ttft_slo_ns
        served = Served(live.request.arrival_ns, live.prompt_tokens, live.token_ns, not error, slo_ns, error)
        self._run.measures.add(served)
        self._plan.each(served)
        self._classes.add(served, chosen)
        self._ended_count += 1
        self._heard_ns = self._now_ns()
        return live

    # --- the end ---

    def _describe(self, actor: str) -> list[dict[str, Any]]:
        """Of each group of devices."""
        return [self._runtime.actor(name).describe() for name in self._names(actor)]

    def _names(self, actor: str) -> list[str]:
        cluster = self._plan.gpu.cluster
        return [actor] if cluster is None else [f"{actor}@{group}" for group in range(len(cluster.devices))]

    def _idle(self) -> IdleReport:
        """Of all devices, since they started."""
        arbiters = [self._runtime.actor(name) for name in self._names("arbiter")]
        return combined([one.idle_report() for one in arbiters if isinstance(one, Arbiter)])

    def _close(self) -> None:
        if self._runtime.stop_reason is None and self._ready:
            self._take_counts()
            self._runtime.request_stop("the run is over")
        if self._plan.sink is not None:
            for record in self._book.journal.runs():
                self._plan.sink.add(record)
        if self._recorder is not None:
            self._recorder.close()
            self._run.record_ended = self._recorder.stopped

    def _take_counts(self) -> None:
        run, policy = self._run, self._policy
        for before, after in zip(self._before, self._describe("arbiter"), strict=True):
            counted = {name: after["counts"].get(name, 0) for name in COUNTED}
            _add_change(run.counts, before["counts"], counted)
            _add_change(run.residency_ms, before["split_residency_ms"], after["split_residency_ms"])
        run.recomputes = sum(decode["recomputes"] for decode in self._describe("decode"))
        if self._plan.gpu.cluster is not None:
            migration = self._runtime.actor("migration").describe()
            run.counts |= {name: migration[key] for name, key in (*MOVED, *FETCHED)}
        run.idle = self._idle().minus(self._idle_before)
        run.duration_ns = self._now_ns()
        run.answers, run.rule_errors = policy.answers, dict(policy.errors)
        run.wall.scheduler_seconds = policy.elapsed_ns / S
        run.wall.scheduler_slowest_seconds = policy.slowest_ns / S


def _add_change(total: dict[str, int], before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Add to `total` what each figure of one device has grown by."""
    for name, figure in after.items():
        total[name] = total.get(name, 0) + figure - before.get(name, 0)
