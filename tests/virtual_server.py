"""A whole server over the small simulated device in virtual time, driven through the wire protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from muxk.actors import protocol as wire
from muxk.actors.backends import Backend
from muxk.actors.kv_pool import KvPool
from muxk.actors.system import build_specs, start_devices
from muxk.kernel.actor import Ref
from muxk.kernel.arbiter import Arbiter
from muxk.kernel.devices.sim import END_TOKEN, HASH_FACTOR, SimCosts, SimDevice, _mix, _token_of
from muxk.kernel.fronts import ADMIN_PREFIX
from muxk.kernel.messages import FrameReceived, PeerGone, PolicyChanged, SendFrame
from muxk.kernel.policy import Policy
from muxk.kernel.trace import Trace
from muxk.kernel.virtual import StillBusy, VirtualRuntime
from muxk.kernel.work import PAGE_SIZE
from muxk.models.tokenizer import ByteTokenizer
from muxk.policies.engine import load_policy

MS = 1_000_000
S = 1_000_000_000
GATEWAY: Ref[Any] = Ref("gateway")


@dataclass
class Outcome:
    """What a client saw of one request; `tokens`, `text` and `times_ns` are those of choice 0."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    times_ns: list[int] = field(default_factory=list)
    terminal: list[Any] = field(default_factory=list)
    accepted: int = 0
    notes: tuple[str, ...] = ()
    prompt: wire.Prompt | None = None
    logprobs: list[wire.TokenLogprob] = field(default_factory=list)
    choice_tokens: dict[int, list[int]] = field(default_factory=dict)
    choice_texts: dict[int, str] = field(default_factory=dict)
    choice_ends: dict[int, wire.ChoiceFinished] = field(default_factory=dict)

    def take(self, event: wire.Tokens, now_ns: int) -> None:
        choice = event.choice
        assert not self.terminal, "tokens after the terminal event"
        assert choice not in self.choice_ends, "tokens after the end of their choice"
        self.choice_tokens.setdefault(choice, []).extend(event.token_ids)
        self.choice_texts[choice] = self.choice_texts.get(choice, "") + event.text
        if choice == 0:
            self.tokens.extend(event.token_ids)
            self.text += event.text
            self.times_ns.append(now_ns)
            self.logprobs += event.logprobs

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) / MS for a, b in zip(self.times_ns, self.times_ns[1:], strict=False)]


class VirtualServer:
    """`submit`, `abort` and `leave` schedule client actions; `run_until` moves the clock."""

    def __init__(
        self,
        policy: str | Policy = "muxwise",
        units: int = 8,
        kv_tokens: int = 4096,
        layers: int = 4,
        seed: int = 1,
        jitter: bool = False,
        costs: SimCosts | None = None,
        calibrate: bool = True,
        settings: dict[str, str] | None = None,
        device: SimDevice | None = None,
        backend: Backend | None = None,
    ) -> None:
        """`backend` takes the place of all that describes a device."""
        if backend is None:
            pages = kv_tokens // PAGE_SIZE + 1
            self.device = device or SimDevice(units=units, layers=layers, pages=pages, costs=costs)
            backend = Backend(self.device, ByteTokenizer(), "sim", (pages - 1) * PAGE_SIZE)
        self.backend = backend
        self.trace = Trace(hashed=True)
        self.events: list[tuple[int, bytes, Any]] = []
        self.outcomes: dict[tuple[bytes, str], Outcome] = {}
        self._decoder = msgspec.msgpack.Decoder(wire.Frame)
        self._encoder = msgspec.msgpack.Encoder()
        first = load_policy(policy, settings or {}) if isinstance(policy, str) else policy
        specs = build_specs(backend, first, seed=seed, calibrate=calibrate)
        self.runtime = VirtualRuntime(
            specs, trace=self.trace, seed=seed, jitter=jitter, egress=self._receive, encode_every=1
        )
        start_devices(backend, self.runtime.port)

    def send(self, at_ns: int, command: Any, peer: bytes = b"client") -> None:
        """Admin commands go to the admin front, as the client library sends them."""
        if isinstance(command, wire.SwapPolicy | wire.AbortAny | wire.Drain):
            peer = ADMIN_PREFIX + peer
        self.runtime.inject(GATEWAY, FrameReceived(peer, self._encoder.encode(command)), at_ns)

    def send_raw(self, at_ns: int, payload: bytes, peer: bytes = b"client") -> None:
        self.runtime.inject(GATEWAY, FrameReceived(peer, payload), at_ns)

    def submit(self, at_ns: int, name: str, peer: bytes = b"client", **fields: Any) -> None:
        self.send(at_ns, wire.Submit(request_id=name, **fields), peer)

    def abort(self, at_ns: int, name: str, peer: bytes = b"client") -> None:
        self.send(at_ns, wire.Abort(name), peer)

    def leave(self, at_ns: int, peer: bytes) -> None:
        self.runtime.inject(GATEWAY, PeerGone(peer), at_ns)

    def swap(self, at_ns: int, policy: Policy) -> None:
        """Have the actors use a policy that the gateway could not compile from a text."""
        self.runtime.start()
        for group in self.groups:
            arbiter = self.runtime.actor(f"arbiter{group}")
            assert isinstance(arbiter, Arbiter)
            sha = arbiter.state.decider._book.add(policy)
            for name in ("arbiter", "admission", "prefill", "decode"):
                self.runtime.inject(Ref(f"{name}{group}"), PolicyChanged(sha), at_ns)
        if self.backend.cluster is not None:
            self.runtime.inject(Ref("placement"), PolicyChanged(policy.sha), at_ns)

    @property
    def groups(self) -> list[str]:
        """What the names of a group's actors end with."""
        cluster = self.backend.cluster
        return [""] if cluster is None else [f"@{group}" for group in range(len(cluster.devices))]

    def run_until(self, at_ns: int) -> None:
        self.runtime.run_until(at_ns)

    def step(self) -> None:
        """One message; time moves on where none is due."""
        try:
            handled = self.runtime.run_until_idle(max_events=1)
        except StillBusy:  # there are others behind it
            return
        assert handled, "nothing happens any more"

    def outcome(self, name: str, peer: bytes = b"client") -> Outcome:
        return self.outcomes.setdefault((peer, name), Outcome())

    def describe(self, actor: str) -> dict[str, Any]:
        return self.runtime.actor(actor).describe()

    def check_whole(self) -> None:
        """Nothing is live, and every page is free or only cached."""
        for group in self.groups:
            actor = self.runtime.actor(f"kv_pool{group}")
            assert isinstance(actor, KvPool)
            actor.state.pool.check()
            assert actor.state.pool.used == 0, group
            assert actor.state.prompts == {}
            assert self.describe(f"decode{group}")["rows"] == 0
            assert self.describe(f"prefill{group}")["batches"] == 0
            assert self.describe(f"admission{group}")["waiting"] == 0
        assert self.describe("gateway")["live"] == 0
        assert self.describe("tokenizer")["live"] == 0
        if self.backend.cluster is not None:
            placement, migration = self.describe("placement"), self.describe("migration")
            assert (placement["waiting"], placement["placed"], placement["transfers"]) == (0, 0, 0)
            assert migration["moving"] == 0

    def _receive(self, frame: SendFrame) -> None:
        now_ns = self.runtime.now_ns()
        for event in self._decoder.decode(frame.payload).events:
            self.events.append((now_ns, frame.peer.removeprefix(ADMIN_PREFIX), event))
            if isinstance(event, wire.TokenIds):
                at_ns = now_ns if event.at_ns is None else event.at_ns
                for tokens in one_by_one(event):
                    self.outcome(tokens.request_id, frame.peer).take(tokens, at_ns)
            name = getattr(event, "request_id", None)
            if name is None or isinstance(event, wire.DuplicateRequest):
                continue
            outcome = self.outcome(name, frame.peer)
            if isinstance(event, wire.Tokens):
                outcome.take(event, now_ns)
            elif isinstance(event, wire.Accepted):
                outcome.accepted += 1
                outcome.notes = event.notes
            elif isinstance(event, wire.Prompt):
                assert outcome.prompt is None
                assert 0 not in outcome.choice_tokens, "the prompt after what follows it"
                outcome.prompt = event
            elif isinstance(event, wire.ChoiceFinished):
                assert not outcome.terminal, "the end of a choice after that of the request"
                assert event.choice not in outcome.choice_ends
                outcome.choice_ends[event.choice] = event
            else:
                outcome.terminal.append(event)


def one_by_one(event: wire.TokenIds) -> list[wire.Tokens]:
    """What each choice got."""
    choices = event.choices or (0,) * len(event.request_ids)
    columns = zip(event.request_ids, event.token_ids, choices, strict=True)
    return [wire.Tokens(name, "", (token_id,), choice) for name, token_id, choice in columns]


def expected_tokens(
    prompt: list[int], count: int, *, seed: int = 0, temperature: float = 0.0, stop_at_end: bool = False
) -> list[int]:
    """What the simulated model says to a prompt, computed without pages, batches or a scheduler."""
    tokens = list(prompt)
    generated: list[int] = []
    while len(generated) < count:
        token = _next_token(tokens, seed, temperature)
        tokens.append(token)
        generated.append(token)
        if stop_at_end and token == END_TOKEN:
            break
    return generated


def _next_token(tokens: list[int], seed: int, temperature: float) -> int:
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(tokens), HASH_FACTOR, dtype=np.uint64), dtype=np.uint64)
        mixed = int(((np.array(tokens, dtype=np.uint64) + np.uint64(1)) * powers).sum())
    if temperature > 0:
        mixed ^= _mix(seed ^ _mix(len(tokens)) ^ _mix(0))
    return _token_of(_mix(mixed))
