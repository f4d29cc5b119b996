"""What the gateway knows of clients and their live requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import repeat
from typing import Any

from muxk.actors import protocol as wire
from muxk.actors.latency import LatencyWindow
from muxk.actors.messages import TextRow

ERROR_CHARS_MAX = 500
"""Of an error that quotes what a client sent: an answer must not be as long as the question."""


def cut(text: str, length: int = ERROR_CHARS_MAX) -> str:
    """`text`, or its beginning and how long it was."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class PolicyInForce:
    """What people want to know of the policy that decides."""

    name: str
    sha: str
    version: str = ""
    """As its author numbers it."""
    api_version: str = ""
    """Of the language; empty for a policy in Python."""
    source: str = ""
    """Where it was loaded from."""
    generation: int = 0
    """How many swaps there were before."""
    since_ns: int = 0

    def describe(self, now_ns: int) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "policy": self.name,
            "policy_version": self.version or "none",
            "policy_sha": self.sha,
            "policy_api": self.api_version or "python",
            "policy_generation": self.generation,
            "policy_from": self.source or "the start",
            "policy_for_s": round((now_ns - self.since_ns) / 1e9, 3),
        }
        return shown


@dataclass(frozen=True, slots=True)
class Refusal:
    """A policy that was refused while the server ran."""

    at_ns: int
    source: str
    report: str

    def describe(self, now_ns: int) -> dict[str, Any]:
        head = self.report.partition("\n")[0]
        ago_s = round((now_ns - self.at_ns) / 1e9, 3)
        return {"from": self.source, "ago_s": ago_s, "report": cut(head)}


@dataclass(frozen=True)
class GatewayOptions:
    """What the gateway tells clients about the server."""

    model: str
    device: str
    policy: PolicyInForce
    settings: Mapping[str, str]
    """Of the policy's params, for files that are read again."""
    vocabulary_size: int
    context_tokens: tuple[int, ...]
    """Longest contexts on groups of one device, of two, and so on up to all devices."""
    seed: int
    """Seeds of requests that bring none are drawn from it."""
    devices: int = 1

    def max_context_tokens(self, widest_group: int) -> int:
        """Under a policy that forms groups of so many devices at most."""
        return self.context_tokens[min(widest_group, len(self.context_tokens)) - 1]


@dataclass(slots=True)
class Live:
    """A request of a client, from its arrival until the owners of all its choices have let go of them."""

    peer: bytes
    name: str
    arrival_ns: int
    choices: dict[int, Choice] = field(default_factory=dict)
    """By internal id, in the order of their indices."""
    unread_chars: int = 0
    """Of its prompt's text, until it is tokenised or dropped."""
    accepted: int = 0
    """Choices that wait for prefill, or have done so."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    class_name: str = ""
    """The class that the policy put it in, once it did."""
    ended: bool = False
    """The client has its terminal event, or is gone."""

    @property
    def all_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices.values())

    def finished(self, reason: str, stop: str | int | None) -> wire.Finished:
        return wire.Finished(
            request_id=self.name,
            finish_reason=reason,
            stop_reason=stop,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in self.choices.values()),
            cached_tokens=self.cached_tokens,
        )


@dataclass(slots=True)
class Choice:
    """One of the `n` outputs of a request; the actors behind know it as a request."""

    request: Live
    index: int
    own_tokens: int = 0
    """But for those that it got in its crowd."""
    own_token_ns: int = 0
    """When it got the last of them, 0 before the first."""
    crowd: Crowd | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def completion_tokens(self) -> int:
        return self.own_tokens + (0 if self.crowd is None else self.crowd.steps)

    @property
    def last_token_ns(self) -> int:
        """0 before the first one."""
        return self.own_token_ns if self.crowd is None else self.crowd.last_ns

    def leave_crowd(self) -> None:
        """Its next step is its own; so it is for the others of its crowd."""
        if self.crowd is not None:
            self.crowd.dissolve()

    def events(self, row: TextRow) -> list[wire.Event]:
        """What the client gets of a row, which was noted before."""
        name = self.request.name
        events: list[wire.Event] = []
        if row.prompt is not None:
            events.append(wire.Prompt(name, row.prompt.text, row.prompt.tokens, row.prompt.logprobs))
        if row.tokens or row.text:
            events.append(wire.Tokens(name, row.text, row.tokens, self.index, row.logprobs))
        return events + self.ends() if self.finish_reason is not None else events

    def ends(self) -> list[wire.Event]:
        """Of this choice, when there are others, and of the request with its last choice; none before."""
        name, reason = self.request.name, self.finish_reason
        if reason is None:
            return []
        ends: list[wire.Event] = []
        choices = list(self.request.choices.values())
        if len(choices) > 1:
            end = wire.ChoiceFinished(name, self.index, reason, self.stop_reason, self.completion_tokens)
            ends.append(end)
        if self.request.all_finished:
            ends.append(self.request.finished(choices[0].finish_reason or reason, choices[0].stop_reason))
        return ends


@dataclass(slots=True)
class Crowd:
    """Choices that get one token each in the same steps, which are noted once for all of them."""

    choices: list[Choice]
    last_ns: int
    """When they got the last one."""
    steps: int = 0
    over: bool = False

    def dissolve(self) -> None:
        """Each choice has its own notes again; idempotent."""
        if self.over:
            return
        self.over = True
        for choice in self.choices:
            choice.own_tokens += self.steps
            choice.own_token_ns = self.last_ns
            choice.crowd = None


@dataclass(slots=True)
class StateCollection:
    """A state request that waits for the actors' answers."""

    peer: bytes
    ticket: int
    parts: dict[str, Any]


class SwapKind(StrEnum):
    """Why a policy is compiled."""

    COMMAND = "command"
    FILE = "file"
    SHADOW = "shadow"


@dataclass(frozen=True, slots=True)
class Swap:
    """A policy that is being compiled, and who waits for it."""

    kind: SwapKind
    source: str
    """Where it comes from."""
    peer: bytes = b""
    """Nobody's, of a file."""
    ticket: int = 0
    withdrawn: bool = False
    """Its operator wants it no more."""


ENDED_KEPT = 1024
"""Requests that have ended and can still be asked about."""


@dataclass
class GatewayState:
    policy: PolicyInForce
    live: dict[int, Choice] = field(default_factory=dict)
    """By internal id: what some actor still works on."""
    names: dict[bytes, dict[str, Live]] = field(default_factory=dict)
    """Requests without a terminal event, by peer and the client's name."""
    open_choices: dict[bytes, int] = field(default_factory=dict)
    """Choices of the requests in `names`, by peer."""
    owed: dict[bytes, dict[str, wire.Finished | wire.Failed]] = field(default_factory=dict)
    """Terminal events that a peer did not take because it does not read, by peer and name. Each is sent
    again, and comes back here when that frame is not taken either."""
    swaps: dict[int, Swap] = field(default_factory=dict)
    last_refused: Refusal | None = None
    """Until a policy is accepted."""
    ended: deque[Live] = field(default_factory=lambda: deque(maxlen=ENDED_KEPT))
    collections: dict[int, StateCollection] = field(default_factory=dict)
    latency: LatencyWindow = field(default_factory=LatencyWindow)
    unread_chars: int = 0
    """Of all requests: what the texts that wait to be tokenised take."""
    last_request: int = 0
    last_ticket: int = 0
    seeds_drawn: int = 0
    ready: bool = False
    draining: bool = False
    drained_ns: int | None = None
    """When nobody was live any more, of a server that drains."""
    stuck_lanes: dict[str, str] = field(default_factory=dict)
    """Lanes whose item does not end, and why that is known; nobody new is taken meanwhile."""
    accepted: int = 0
    refused: int = 0
    failed: int = 0
    aborts: int = 0
    finished: int = 0
    broken_frames: int = 0
    slow_peers: int = 0
    tokens: int = 0

    def add(self, peer: bytes, submit: wire.Submit, now_ns: int) -> int:
        """Name a new request of a peer: the id of its first choice, those of the others follow."""
        self.accepted += 1
        request = Live(peer, submit.request_id, now_ns, unread_chars=text_chars(submit))
        first_id = self.last_request + 1
        for index in range(submit.n):
            request.choices[first_id + index] = self.live[first_id + index] = Choice(request, index)
        self.last_request += submit.n
        self.names.setdefault(peer, {})[request.name] = request
        self.open_choices[peer] = self.open_choices.get(peer, 0) + submit.n
        self.unread_chars += request.unread_chars
        return first_id

    def prompt_was_read(self, request: Live) -> None:
        """Its text is tokens now, or nobody wants it any more; idempotent."""
        self.unread_chars -= request.unread_chars
        request.unread_chars = 0

    def live_of(self, peer: bytes) -> int:
        """Choices of a peer's requests that have no terminal event, and ends that it did not take yet."""
        return self.open_choices.get(peer, 0) + len(self.owed.get(peer, ()))

    def end_for_client(self, request: Live) -> None:
        """The client may use the name again; idempotent."""
        if request.ended:
            return
        request.ended = True
        for choice in request.choices.values():
            choice.leave_crowd()
        self.ended.append(request)
        self.prompt_was_read(request)
        names = self.names[request.peer]
        del names[request.name]
        self.open_choices[request.peer] -= len(request.choices)
        if not names:
            del self.names[request.peer]
            del self.open_choices[request.peer]

    def owe(self, peer: bytes, events: Iterable[wire.Finished | wire.Failed], bound: int) -> None:
        """Keep terminal events to be sent again; beyond the bound a peer that never reads loses them."""
        owed = self.owed.setdefault(peer, {})
        for event in events:
            if len(owed) < bound:
                owed[event.request_id] = event

    def note_tokens(self, choice: Choice, row: TextRow, now_ns: int) -> None:
        request = choice.request
        choice.leave_crowd()
        self._note_time(choice, now_ns)
        choice.own_tokens += len(row.tokens)
        if choice.index == 0:
            request.cached_tokens = row.reused_tokens
        self.tokens += len(row.tokens)
        if row.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = row.finish_reason, row.stop_reason
            self.finished += request.all_finished

    def _note_time(self, choice: Choice, now_ns: int) -> None:
        if choice.own_token_ns == 0:
            self.latency.first_tokens_ns.append(now_ns - choice.request.arrival_ns)
        else:
            self.latency.gaps_ns.append(now_ns - choice.own_token_ns)
        choice.own_token_ns = now_ns

    def new_crowd(self, choices: list[Choice], now_ns: int) -> Crowd:
        """Note one token for each of these, and that they may get the next one together."""
        crowd = Crowd(choices, now_ns)
        for choice in choices:
            choice.leave_crowd()
            self._note_time(choice, now_ns)
            choice.own_tokens += 1
            choice.crowd = crowd
        self.tokens += len(choices)
        return crowd

    def note_step(self, crowd: Crowd, now_ns: int) -> None:
        """One more token for each of a crowd."""
        self.latency.gaps_ns.extend(repeat(now_ns - crowd.last_ns, len(crowd.choices)))
        crowd.last_ns = now_ns
        crowd.steps += 1
        self.tokens += len(crowd.choices)

    def drop(self, choice_id: int) -> Choice | None:
        """Nobody works on it any more."""
        choice = self.live.pop(choice_id, None)
        if choice is not None:
            choice.leave_crowd()
        return choice

    def next_ticket(self) -> int:
        self.last_ticket += 1
        return self.last_ticket

    def draw_seed(self, server_seed: int) -> int:
        """A seed for a request that brought none: as random as the server's own seed."""
        self.seeds_drawn += 1
        text = f"{server_seed}/{self.seeds_drawn}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")

    def describe(self, now_ns: int) -> dict[str, Any]:
        shown = self.policy.describe(now_ns)
        if self.last_refused is not None:
            shown["policy_last_refused"] = self.last_refused.describe(now_ns)
        shown |= {
            "ready": self.ready and not self.stuck_lanes,
            "stuck_lanes": dict(self.stuck_lanes),
            "draining": self.draining,
            "clients": len(self.names),
            "live": len(self.live),
            "accepted": self.accepted,
            "finished": self.finished,
            "refused": self.refused,
            "failed": self.failed,
            "aborts": self.aborts,
            "broken_frames": self.broken_frames,
            "slow_peers": self.slow_peers,
            "tokens": self.tokens,
        }
        shown.update(self.latency.describe())
        return shown


def text_chars(submit: wire.Submit) -> int:
    """Characters that have to be tokenised."""
    if submit.prompt is not None:
        return len(submit.prompt)
    return sum(len(message.content) for message in submit.messages or ())
