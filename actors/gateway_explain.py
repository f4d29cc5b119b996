"""What the gateway answers to `Explain`: where requests are and why, and what the policy decided about them.

A plain helper that the gateway owns. Where requests are is asked of the actors; decisions come from the
journal, and are explained on a thread of the runtime. On the clients' front a connection learns of its own
requests only: of decisions those that are about one request, for others show what other clients asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from muxk.actors import protocol as wire
from muxk.actors.gateway_owner import Owner
from muxk.actors.gateway_state import Choice, GatewayState, Live
from muxk.actors.policy_messages import ExplanationMade
from muxk.actors.refs import Everybody
from muxk.kernel.fronts import Front, front_of
from muxk.kernel.journal import Record
from muxk.kernel.messages import ReportRequests, RequestsReported
from muxk.kernel.policy import PolicyBook
from muxk.kernel.statuses import RequestStatus, strongest
from muxk.policies.explain import Known, explain
from muxk.policies.explanation import Explanation
from muxk.policies.selection import about, around, latest

EXPLAINS_MAX = 16
"""Bound on questions that wait for answers."""
DECISIONS_MAX = 200
REQUESTS_MAX = 1000
"""Choices that one answer tells of."""
ANSWER_BYTES_MAX = 192 * 1024
"""Of the decisions in one answer: a client that is slow to read must not count as one that does not."""
ABOUT_REQUESTS = ("requests", "request")
"""Questions that the actors are asked; the others are answered from the journal alone."""
OF_ONE_REQUEST = ("classify", "admit", "retain")
"""Questions that hold nothing of other requests."""
NOT_FOR_CLIENTS = "shows the requests of other clients: ask on the server's admin socket"

Choose = Callable[[Sequence[Record]], list[Record]]


@dataclass(slots=True)
class Question:
    """An `Explain` that waits for the actors."""

    peer: bytes
    command: wire.Explain
    choices: dict[int, Choice]
    """Those it is about, by internal id."""
    statuses: list[RequestStatus] = field(default_factory=list)
    reported: int = 0
    requests: tuple[wire.ExplainedRequest, ...] = ()


class GatewayExplain:
    """One a gateway."""

    def __init__(self, owner: Owner, everybody: Everybody, state: GatewayState, book: PolicyBook) -> None:
        self._owner = owner
        self._everybody = everybody
        self._state = state
        self._book = book
        self._questions: dict[int, Question] = {}

    def ask(self, peer: bytes, command: wire.Explain) -> None:
        """Answer now, or once the actors have told where requests are."""
        asks_of_requests = command.about in ABOUT_REQUESTS
        error = ""
        if len(self._questions) >= EXPLAINS_MAX:
            error = f"{EXPLAINS_MAX} such questions wait already"
        elif not asks_of_requests and front_of(peer) is not Front.ADMIN:
            error = f"'{command.about}' {NOT_FOR_CLIENTS}"
        choices = self._choices(peer, command) if asks_of_requests else {}
        if command.about == "request" and not choices and not error:
            error = f"no request {command.request_id[:64]!r} is live, or was lately"
        if error:
            self._tell(peer, wire.Explained(command.ticket, error))
            return
        ticket = self._state.next_ticket()
        self._questions[ticket] = Question(peer, command, choices)
        if not asks_of_requests:
            self._offload(ticket)
            return
        report = ReportRequests(ticket, tuple(choices)[:REQUESTS_MAX])
        for ref in self._everybody.holding:
            self._owner.send(ref, report)

    def reported(self, message: RequestsReported) -> None:
        """One actor's answer."""
        question = self._questions.get(message.ticket)
        if question is None:
            return
        question.statuses += message.statuses
        question.reported += 1
        if question.reported == len(self._everybody.holding):
            self._all_reported(message.ticket, question)

    def _all_reported(self, ticket: int, question: Question) -> None:
        found = strongest(question.statuses)
        now_ns = self._owner.now_ns()
        told = list(question.choices.items())[:REQUESTS_MAX]
        question.requests = tuple(_told(choice, found.get(key), now_ns) for key, choice in told)
        if question.command.about == "request":
            self._offload(ticket)
        else:
            self._answer(ticket, wire.Explained(question.command.ticket))

    def made(self, message: ExplanationMade) -> None:
        """The decisions are explained."""
        if message.ticket in self._questions:
            self._answer(message.ticket, message.explained)

    def actors_were_rebuilt(self) -> None:
        """Answers that were not given yet are lost."""
        for ticket, question in list(self._questions.items()):
            waits = question.reported < len(self._everybody.holding)
            if question.command.about in ABOUT_REQUESTS and waits:
                error = "the server was restarted inside meanwhile; ask again"
                self._answer(ticket, wire.Explained(question.command.ticket, error))

    def _answer(self, ticket: int, explained: wire.Explained) -> None:
        question = self._questions.pop(ticket)
        now = (self._owner.now_ns() - self._book.journal.zero_ns) / 1e9
        live = len(self._state.live) if front_of(question.peer) is Front.ADMIN else len(question.choices)
        told = msgspec.structs.replace(explained, now=now, live=live, requests=question.requests)
        self._tell(question.peer, told)

    def _tell(self, peer: bytes, explained: wire.Explained) -> None:
        self._owner.tell(peer, explained)

    # --- which requests ---

    def _choices(self, peer: bytes, command: wire.Explain) -> dict[int, Choice]:
        """Choices that the question is about and the peer may know of, by internal id."""
        requests = self._visible(peer)
        if command.about == "request":
            live = [request for request in requests if request.name == command.request_id]
            ended = [request for request in self._ended(peer) if request.name == command.request_id]
            requests = live or ended[-1:]
        return {key: choice for request in requests for key, choice in request.choices.items()}

    def _visible(self, peer: bytes) -> Iterable[Live]:
        names = self._state.names
        peers = names.values() if front_of(peer) is Front.ADMIN else (names.get(peer, {}),)
        return (request for of_peer in peers for request in of_peer.values())

    def _ended(self, peer: bytes) -> list[Live]:
        admin = front_of(peer) is Front.ADMIN
        return [request for request in self._state.ended if admin or request.peer == peer]

    # --- decisions ---

    def _offload(self, ticket: int) -> None:
        """Explain on the runtime's thread, from a copy of the journal."""
        question = self._questions[ticket]
        journal = self._book.journal
        records: Sequence[Record] = journal.snapshot()
        if question.command.about == "differences":
            records = list(journal.differences)
        if front_of(question.peer) is not Front.ADMIN:
            records = [record for record in records if record.point in OF_ONE_REQUEST]
        asked_about = frozenset(question.choices)
        known = Known(self._book.find, self._names(question), journal.zero_ns, asked_about)
        choose = _chooser(question.command, tuple(question.choices), journal.zero_ns)
        ask_ticket = question.command.ticket

        def run() -> ExplanationMade:
            try:
                decisions, left_out = _explain_all(choose(records), known)
            except Exception as error:  # a question must not take the server down
                return ExplanationMade(
                    ticket, wire.Explained(ask_ticket, f"it can not be explained: {error!r}")
                )
            return ExplanationMade(ticket, wire.Explained(ask_ticket, decisions=decisions, left_out=left_out))

        self._owner.offload(run, size=len(records))

    def _names(self, question: Question) -> Mapping[int, str]:
        """What clients call their requests, of those that the peer may know of."""
        requests = [*self._ended(question.peer), *self._visible(question.peer)]
        names: dict[int, str] = {}
        for request in requests:
            for key, choice in request.choices.items():
                names[key] = request.name if len(request.choices) == 1 else f"{request.name}[{choice.index}]"
        return names


def _told(choice: Choice, status: RequestStatus | None, now_ns: int) -> wire.ExplainedRequest:
    request = choice.request
    where, code, detail, rule = "", "moving", "it is on its way between two actors", None
    if status is not None:
        where, code, detail, rule = status.where, str(status.code), status.detail, status.rule
    elif request.ended or choice.finish_reason is not None:
        code, detail = "ended", f"it ended: {choice.finish_reason or 'failed or aborted'}"
    return wire.ExplainedRequest(
        request_id=request.name,
        choice=choice.index,
        client=request.peer[1:].hex()[-8:] or "local",
        where=where,
        code=code,
        detail=detail,
        rule=rule,
        request_class=request.class_name,
        waited=(now_ns - request.arrival_ns) / 1e9,
        tokens=choice.completion_tokens,
    )


def _chooser(command: wire.Explain, requests: Sequence[int], zero_ns: int) -> Choose:
    count = max(1, min(command.count, DECISIONS_MAX))
    match command.about:
        case "moment":
            at_ns = zero_ns + _nanoseconds(command.at)
            return lambda records: around(records, at_ns, count)
        case "request":
            return lambda records: about(records, requests, count)
        case _:
            return lambda records: latest(records, count)


LONGEST_S = 1e9


def _nanoseconds(seconds: float) -> int:
    """Within what can be told; NaN is the beginning."""
    return 0 if math.isnan(seconds) else round(min(max(seconds, 0.0), LONGEST_S) * 1e9)


def _explain_all(records: Sequence[Record], known: Known) -> tuple[tuple[Explanation, ...], int]:
    """The latest that fit into an answer, in the order of time, and how many do not."""
    explained: list[Explanation] = []
    size = 0
    for record in reversed(records):
        explanation = explain(record, known)
        size += len(msgspec.msgpack.encode(explanation))
        if size > ANSWER_BYTES_MAX and explained:
            break
        explained.append(explanation)
    return tuple(reversed(explained)), len(records) - len(explained)
