"""What the host costs: a message hop, one `decide()`, and the host path of a decode step at batch 64.

Run `python -m muxk.client.microbench`. Figures are printed, never asserted. The device here answers at once,
so that the time between two launches of a full batch is the host path and nothing else.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import msgspec
import zmq
from muxk.actors import protocol as wire
from muxk.actors.backends import Backend
from muxk.actors.messages import TokensEmitted
from muxk.actors.refs import Refs
from muxk.actors.system import build_specs
from muxk.actors.tokenizer import TokenizerActor
from muxk.kernel.actor import ActorSpec
from muxk.kernel.device import DevicePort, ItemDone, Lane
from muxk.kernel.devices.sim import SimDevice
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.ingress import Ingress
from muxk.kernel.realtime import RealtimeRuntime
from muxk.kernel.trace import Trace
from muxk.kernel.view import DecodeView, KvView, PrefillView, QueueView, View
from muxk.kernel.work import DecodeWork, Item, Split, int32_bytes
from muxk.models.tokenizer import ByteTokenizer
from muxk.policies.engine import CompiledPolicy, compile_policy, load_policy
from muxk.profiles.hop_bench import measure_hop

BATCH = 64
STEPS = 400
"""Steps with a full batch that are counted."""
ROUNDS = 5


class InstantDevice(SimDevice):
    """Completes every item at once; keeps when it launched a full decode batch."""

    def __init__(self) -> None:
        super().__init__(units=8, layers=8, pages=8192)
        self.launched_ns: list[int] = []
        self._instant_port: DevicePort | None = None
        self._letter = int32_bytes([97])

    def start(self, port: DevicePort) -> None:
        self._instant_port = port

    def launch(self, lane: Lane, item: Item, after: Sequence[int]) -> None:
        port = self._instant_port
        assert port is not None
        now_ns = port.now_ns()
        if isinstance(item.work, DecodeWork) and item.work.rows == BATCH:
            self.launched_ns.append(now_ns)
        rows = item.work.rows if item.is_last else 0
        port.post(ItemDone(item.item_id, now_ns, now_ns + 1, self._letter * rows))


class SilentTokenizer(TokenizerActor):
    """Encodes, and drops what is generated: the host path without detokenising and client sends."""

    def on_tokens_emitted(self, message: TokensEmitted) -> None:
        """Nothing: this is what is left out."""


@dataclass
class Figures:
    """Nanoseconds of one quantity over rounds."""

    name: str
    aim: str
    values_ns: list[float] = field(default_factory=list)

    def line(self) -> str:
        middle = statistics.median(self.values_ns) / 1e3
        low, high = min(self.values_ns) / 1e3, max(self.values_ns) / 1e3
        return f"{self.name:<66} {middle:9.1f} us  ({low:.1f} .. {high:.1f}; aim {self.aim})"


def decide_ns(policy: CompiledPolicy, decisions: int = 5000) -> float:
    """Median time of `decide` with 256 running requests, a running prefill and a candidate."""
    view = busy_view()
    times_ns = []
    for _ in range(decisions):
        started = time.perf_counter_ns()
        policy.decide(view)
        times_ns.append(time.perf_counter_ns() - started)
    return statistics.median(times_ns)


_CONDITIONS = (
    "decode.batch < {n} and queue.tokens > 1k",
    "decode.idle > {n}s or candidate.new_tokens < 2",
    "kv.free < kv.total * {n}% / 100 and running.active",
    "estimate.decode(units.total) > slo.tbt * {n} and running.depth == 0",
    "running.age > {n} * 60s and not parked.waiting and candidate.fits",
)


def fifty_rules() -> CompiledPolicy:
    """A policy that looks at 50 rules for each decision: in each point only the last one matches."""
    lines = ["apiVersion: muxk/v1beta1", "kind: SchedulingPolicy", "metadata: {name: fifty}", "spec:"]
    lines.append("  extends: muxwise")
    answers = {"split": "{decode: all}", "preempt": "park", "slice": "{layers: 2}"}
    lasts = {
        "split": "{decode: fit, prefill: rest, otherwise: {decode: most, prefill: rest}}",
        "preempt": "continue",
        "slice": "{layers: slo.tbt / estimate.prefill_layer(prefill.units)}",
    }
    for point, rules in (("split", 20), ("preempt", 15), ("slice", 15)):
        lines.append(f"  {point}:")
        for n in range(1, rules):
            condition = _CONDITIONS[n % len(_CONDITIONS)].format(n=n)
            lines.append(f"    - {{name: rule-{n}, when: {condition}, then: {answers[point]}}}")
        lines.append(f"    - {{name: last, then: {lasts[point]}}}")
    return compile_policy("\n".join(lines))


def busy_view() -> View:
    """256 running requests on a device of 8 units, everything measured, everything pending."""
    units = range(1, 9)
    prefill = PrefillView(1, 2, 1500, 0, 1_125_750, 20, 0, 10_000_000_000, 0, 0, 1500, 1_125_750)
    candidate = PrefillView(0, 1, 32, 0, 528, 30, 0, 320_000_000, 0, 0, 0, 0, 32, 528)
    return View(
        now_ns=1_000_000,
        units_total=8,
        splits=tuple(Split(n, 8 - n) for n in range(1, 8)),
        split=Split(2, 6),
        layers=30,
        decode=DecodeView(256, 256 * 500, True, False, 0),
        running=prefill,
        parked=None,
        candidate=candidate,
        prefill_in_flight=1,
        queue=QueueView(100, 20_000),
        kv=KvView(10_000, 2_000),
        estimates=Estimates(
            30,
            tuple(DecodeModel(n, 4e6, 4e5 / n, 10.0, 1.1) for n in units),
            tuple(PrefillModel(n, 1e4, 3e3 / n, 1.0, 1.0) for n in units),
        ),
    )


def step_ns(*, emit: bool) -> float:
    """Median time between two launches of a full batch; with `emit`, text goes to a client process."""
    with tempfile.TemporaryDirectory(prefix="muxk-") as directory:
        endpoint = f"ipc://{Path(directory) / 'bench.sock'}"
        device = InstantDevice()
        specs = build_specs(Backend(device, ByteTokenizer(), "none", 8192), load_policy("muxwise"), seed=1)
        if not emit:
            specs = [_silenced(spec) for spec in specs]
        client = subprocess.Popen([sys.executable, "-m", "muxk.client.microbench", "--client", endpoint])
        try:
            anyio.run(_serve, specs, device, Ingress(endpoint))
        finally:
            client.kill()
            client.wait()
    stamps = device.launched_ns
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(stamps))


def _silenced(spec: ActorSpec) -> ActorSpec:
    if spec.name != "tokenizer":
        return spec
    return ActorSpec("tokenizer", partial(SilentTokenizer, Refs(), ByteTokenizer()), SilentTokenizer)


async def _serve(specs: list[ActorSpec], device: InstantDevice, ingress: Ingress) -> None:
    runtime = RealtimeRuntime(specs, trace=Trace(), ingress=ingress)
    device.start(runtime.port("arbiter"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_stop_when_measured, runtime, device)
        await runtime.run()
        tasks.cancel_scope.cancel()


async def _stop_when_measured(runtime: RealtimeRuntime, device: InstantDevice) -> None:
    while len(device.launched_ns) < STEPS:
        await anyio.sleep(0.02)
    runtime.request_stop("measured")


def run_client(endpoint: str) -> None:
    """Be one client a row, and read what comes, until killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    poller = zmq.Poller()
    encode = msgspec.msgpack.Encoder().encode
    for row in range(BATCH):
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        poller.register(socket, zmq.POLLIN)
        prompt = [97 + row % 26] * 8
        submit = wire.Submit(f"r{row}", prompt_token_ids=prompt, max_tokens=1500, ignore_eos=True)
        socket.send(encode(submit))
    while True:
        for socket, _ in poller.poll():
            socket.recv()


def _rounds(figures: Figures, measure: Callable[[], float]) -> Figures:
    for _ in range(ROUNDS):
        figures.values_ns.append(measure())
    return figures


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        run_client(sys.argv[2])
        return
    for figures, measure in (
        (Figures("message hop, realtime runtime", "20 us"), lambda: float(measure_hop(20_000))),
        (
            Figures("decide(), muxwise, 256 running requests, 7 splits", "50 us"),
            lambda: decide_ns(load_policy("muxwise")),
        ),
        (
            Figures("decide(), inflight, 256 running requests", "50 us"),
            lambda: decide_ns(load_policy("inflight")),
        ),
        (
            Figures("decide(), 50 rules, all of them looked at", "100 us"),
            lambda: decide_ns(fifty_rules()),
        ),
        (
            Figures("host path of a decode step, batch 64", "1,000 us"),
            lambda: step_ns(emit=False),
        ),
        (
            Figures("the same with detokenising and sends to 64 clients", "3,000 us"),
            lambda: step_ns(emit=True),
        ),
    ):
        print(_rounds(figures, measure).line(), flush=True)


if __name__ == "__main__":
    main()
