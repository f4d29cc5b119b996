"""Conversations: sessions of several turns, each of which contains all that was said before.

A session opens with a prompt: text that many sessions share (system prompts and tools, a tree whose branches
are chosen by popularity), then its own. It goes on after each answer with probability `turns_go_on`; the next
prompt is the whole former prompt, the whole former answer, and a new message. A session ends early where the
next prompt would be longer than the workload allows.

Means follow from the shape. With O, U, F, S the mean tokens of answers, later messages, opening prompts and
of their shared part, and q the probability to go on, the mean prompt is M = F + q / (1 - q) * (O + U) and the
mean reused part is R = q * (M + O) + (1 - q) * S: `SessionShape.meeting` solves these for q and F.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from muxk.client.arrivals import Arrivals
from muxk.client.lengths import Draws, Lengths
from muxk.client.traffic import Span, TrafficRequest, WorkloadError, mix

TURNS_MAX = 64
"""Of one session."""

FIT_ROUNDS = 4
INDEX_MASK = (1 << 32) - 1
"""Of a session's number, the bits that count the sessions of a workload."""

# What a draw or a stream is for. Draws of later turns add their turn times TURN.
TURN = 16
OPENING, TURNS, OUTPUT, MESSAGE, THINK, BRANCH, TEXT, ANSWER, SHARED = range(9)


@dataclass(frozen=True)
class SharedText:
    """A level of the tree of shared text. The k-th branch of a branch has the weight 1/k."""

    branches: int
    """Under each branch of the level above."""
    tokens: int


@dataclass(frozen=True)
class SessionShape:
    """How sessions of a workload look. Lengths in tokens."""

    opening: Lengths
    """Of a session's first prompt, shared text included."""
    message: Lengths
    """What each later turn adds."""
    output: Lengths
    turns_go_on: float = 0.0
    """Probability that another turn follows."""
    prompt_max: int = 1 << 30
    reused_max: int = 1 << 30
    shared: tuple[SharedText, ...] = ()

    @property
    def turns_mean(self) -> float:
        return 1 / (1 - self.turns_go_on)

    @staticmethod
    def meeting(
        prompt: Lengths,
        reused_mean: float,
        reused_max: int,
        message: Lengths,
        output: Lengths,
        shared: tuple[SharedText, ...] = (),
    ) -> SessionShape:
        """The shape whose prompts have the given mean, `reused_mean` tokens of it from earlier requests.

        `prompt` gives the bounds and mean of all prompts, and the sigma of opening ones.
        """
        shared_tokens = sum(level.tokens for level in shared)
        shared_mean: float = shared_tokens
        # Openings shorter than the shared text hold a part of it; how many those are depends on the answer.
        for _ in range(FIT_ROUNDS):
            go_on = (reused_mean - shared_mean) / (prompt.mean + output.mean - shared_mean)
            if not 0 <= go_on < 1:
                raise WorkloadError(
                    f"{reused_mean:g} reused tokens a request can not come of {shared_mean:g} shared ones "
                    f"and prompts of {prompt.mean:g}: the reused part must lie between the two"
                )
            opening_mean = prompt.mean - go_on / (1 - go_on) * (output.mean + message.mean)
            opening = Lengths(prompt.min, opening_mean, prompt.max, prompt.sigma)
            shared_mean = opening.mean_of(lambda tokens: min(shared_tokens, tokens - 1))
        return SessionShape(opening, message, output, go_on, prompt.max, reused_max, shared)


@dataclass(frozen=True)
class Pace:
    """When the next turn comes, after the last one ended: think times are exponential."""

    think_s: float = 10.0
    """Mean time between an answer and the next message."""
    answer_token_s: float = 0.03
    """Assumed per token of an answer, where a workload is made ahead and nobody knows when answers end."""

    def __post_init__(self) -> None:
        for name, value in (("think time", self.think_s), ("time of a token", self.answer_token_s)):
            if not (math.isfinite(value) and value >= 0):
                raise WorkloadError(f"{name} is {value!r}; it must be a finite number of seconds, 0 or more")


USUAL_PACE = Pace()


class SessionWorkload:
    """Requests of many sessions. What a session says depends on the seed and its number only.

    `requests()` is the open loop: arrivals are those of `arrivals`, whatever happens; each is the turn that
    is due the longest, or else opens a session. So a run begins with openings, and takes a few think times to
    settle.

    The closed loop: `openings()` at the arrival rate of sessions, and after each answer `next_turn()`.
    """

    def __init__(
        self,
        name: str,
        shape: SessionShape,
        arrivals: Arrivals,
        pace: Pace = USUAL_PACE,
        request_class: str = "",
    ) -> None:
        self._name = name
        self.shape = shape
        self.arrivals = arrivals
        self._pace = pace
        self._request_class = request_class
        self._seed = mix(arrivals.seed, *name.encode())
        self._draws = Draws(self._seed)
        # High bits tell the sessions of one workload from those of another that runs beside it.
        self._first_session = self._seed & ~INDEX_MASK

    @property
    def name(self) -> str:
        return self._name

    def requests(self) -> Iterator[TrafficRequest]:
        """Endless. Memory is that of the open sessions: about rate times think time."""
        waiting: list[_Due] = []
        opened = 0
        for at_ns in self.arrivals.times_ns():
            if waiting and waiting[0].at_ns <= at_ns:
                request = _moved(heapq.heappop(waiting).request, at_ns)
            else:
                request, opened = self._opening(opened, at_ns), opened + 1
            answered_ns = at_ns + round(request.output_tokens * self._pace.answer_token_s * 1e9)
            following = self.next_turn(request, answered_ns)
            if following is not None:
                heapq.heappush(waiting, _Due(following.arrival_ns, following.session, following))
            yield request

    def openings(self) -> Iterator[TrafficRequest]:
        """Endless: first turns, so many that all turns together come at the rate that was asked for."""
        rate = self.arrivals.rate / self.shape.turns_mean
        times_ns = Arrivals(rate, self.arrivals.burstiness, self.arrivals.seed).times_ns()
        for session, at_ns in enumerate(times_ns):
            yield self._opening(session, at_ns)

    def next_turn(self, request: TrafficRequest, ended_ns: int) -> TrafficRequest | None:
        """The turn that follows a request which ended at a time; None where the session ends."""
        turn, session, shape = request.turn + 1, request.session & INDEX_MASK, self.shape
        if turn >= self._turns(session):
            return None
        context = request.prompt_tokens + request.output_tokens
        message = shape.message.at(self._draw(MESSAGE, session, turn))
        if context > shape.reused_max or context + message > shape.prompt_max:
            return None
        text = mix(self._seed, TEXT, session, turn)
        prompt = (
            *request.prompt,
            Span(request.answer_stream, 0, request.output_tokens),
            Span(text, 0, message),
        )
        think_ns = -math.log1p(-self._draw(THINK, session, turn)) * self._pace.think_s * 1e9
        return self._request(session, turn, ended_ns + round(think_ns), prompt)

    def owns(self, request: TrafficRequest) -> bool:
        """Whether a request is of a session of this workload."""
        return request.session & ~INDEX_MASK == self._first_session

    def _opening(self, session: int, at_ns: int) -> TrafficRequest:
        tokens = self.shape.opening.at(self._draw(OPENING, session))
        prompt: list[Span] = []
        for span in self._shared(session):
            # A short prompt has the front of the shared text only; one token at least is its own.
            taken = min(span.tokens, tokens - 1)
            if taken:
                prompt.append(span._replace(tokens=taken))
            tokens -= taken
        prompt.append(Span(mix(self._seed, TEXT, session, 0), 0, tokens))
        return self._request(session, 0, at_ns, tuple(prompt))

    def _request(self, session: int, turn: int, at_ns: int, prompt: tuple[Span, ...]) -> TrafficRequest:
        output = self.shape.output.at(self._draw(OUTPUT, session, turn))
        answer = mix(self._seed, ANSWER, session, turn)
        number = self._first_session + session
        return TrafficRequest(at_ns, prompt, output, number, turn, answer, self._request_class)

    def _turns(self, session: int) -> int:
        go_on = self.shape.turns_go_on
        if go_on == 0.0:
            return 1
        drawn = 1 + math.floor(math.log1p(-self._draw(TURNS, session)) / math.log(go_on))
        return min(drawn, TURNS_MAX)

    def _shared(self, session: int) -> Iterator[Span]:
        """One branch of each level, within the branch of the level above."""
        branch = 0
        for depth, (level, popularity) in enumerate(zip(self.shape.shared, self._popularities, strict=True)):
            chosen = self._draw(BRANCH, session, depth)
            branch = mix(self._seed, SHARED, branch, depth, sum(chosen >= bound for bound in popularity))
            yield Span(branch, 0, level.tokens)

    @cached_property
    def _popularities(self) -> tuple[Sequence[float], ...]:
        return tuple(_cumulative(level.branches) for level in self.shape.shared)

    def _draw(self, purpose: int, session: int, turn: int = 0) -> float:
        return self._draws.at(purpose + TURN * turn, session)


@dataclass(frozen=True, order=True)
class _Due:
    at_ns: int
    session: int
    request: TrafficRequest = field(compare=False)


def _moved(request: TrafficRequest, at_ns: int) -> TrafficRequest:
    return TrafficRequest(
        at_ns,
        request.prompt,
        request.output_tokens,
        request.session,
        request.turn,
        request.answer_stream,
        request.request_class,
    )


def _cumulative(branches: int) -> Sequence[float]:
    """Upper bounds of the branches' shares but the last's, with weights 1, 1/2, 1/3, …"""
    total = sum(1 / rank for rank in range(1, branches + 1))
    return [sum(1 / rank for rank in range(1, last + 1)) / total for last in range(1, branches)]
