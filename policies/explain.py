"""Why a policy answered as it did: a recorded question is asked again, rule by rule, and each value is shown.

Policies are pure, so this needs no more than the record and the compiled policy. For a policy that is not
written in the language only the answer is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from muxk.kernel.journal import Forgotten, OrderQuestion, Record, VictimQuestion
from muxk.kernel.policy import Policy
from muxk.kernel.view import AdmitView, FormView, OrderAnswer, RequestView, View
from muxk.policies import expressions
from muxk.policies.engine import CompiledPolicy, Point, Rule
from muxk.policies.explanation import AskedPoint, Explanation, ShownValue, SortedRequest, TriedRule
from muxk.policies.names import PLACES, DecideScope, RequestScope, SortScope
from muxk.policies.shown import (
    answer_in_words,
    duration,
    number,
    preempt_in_words,
    show,
    slice_in_words,
    split_in_words,
)
from muxk.policies.vocabulary import Name

SORTED_SHOWN = 16
TRIED_UNITS_SHOWN = 12

_FUNCTIONS_OF_UNITS = ("estimate.decode", "estimate.prefill_layer")
_KEY_PLACES: Mapping[str, str] = {"order": "a key of order", "victim": "a key of victim"}


@dataclass(frozen=True, slots=True)
class Known:
    """What explanations need besides the records."""

    find: Callable[[str], Policy | None]
    """A policy by its sha, or None when it is not known any more."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Requests by the server's id, as their clients named them."""
    zero_ns: int = 0
    """When the server started."""

    def name(self, request_id: int) -> str:
        return self.names.get(request_id, f"#{request_id}")


def explain(record: Record, known: Known) -> Explanation:
    """Explain one record: the policy's answer, and the shadow's where it differed."""
    own = _explain(record, record.sha, record.answer, known)
    if record.shadow is None:
        return own
    other = _explain(record, record.shadow.sha, record.shadow.answer, known)
    return replace(own, differs=record.shadow.differs, shadow=other)


def _explain(record: Record, sha: str, answer: Any, known: Known) -> Explanation:
    policy, view = known.find(sha), record.last_view
    names = tuple(map(known.name, request_ids(record)))
    points: tuple[AskedPoint, ...] = ()
    ranked: tuple[SortedRequest, ...] = ()
    note = ""
    if policy is None:
        note = "its policy is not kept any more"
    elif not isinstance(policy, CompiledPolicy):
        note = "its policy is not written in the language: only its answer is known"
    elif isinstance(view, Forgotten):
        note = f"it was about {view.requests} requests, which are not kept any more"
    else:
        try:
            points = tuple(_points(policy, record, answer, names))
            ranked = _ranked(policy, record.point, view, answer, known)
        except Exception as error:  # an explanation that fails must not take those of others with it
            note = f"it can not be explained: {error}"
    return Explanation(
        at_ns=record.at_ns - known.zero_ns,
        last_at_ns=record.last_at_ns - known.zero_ns,
        count=record.count,
        actor=record.actor,
        question=record.point,
        policy="" if policy is None else policy.name,
        sha=sha,
        answer="not kept any more" if answer is None else answer_in_words(answer, view, names),
        points=points,
        sorted=ranked,
        errors=() if answer is None else answer.errors,
        note=note,
    )


def request_ids(record: Record) -> tuple[int, ...]:
    """Requests that a question names, in its sequence; empty for `decide`, which knows sums only."""
    view = record.view
    if isinstance(view, OrderQuestion | VictimQuestion):
        return tuple(request.request_id for request in view.requests)
    if isinstance(view, AdmitView):
        return (view.request.request_id,)
    if isinstance(view, FormView):
        return (view.head.request_id,)
    return (view.request_id,) if isinstance(view, RequestView) else ()


def _points(
    policy: CompiledPolicy, record: Record, answer: Any, names: Sequence[str]
) -> Iterator[AskedPoint]:
    question, view = record.point, record.last_view
    if question == "decide":
        yield from _decide_points(policy, view, answer)
        return
    point = policy.points.get("classes" if question == "classify" else question)
    if point is None or answer is None:
        return
    scope, now_ns = _scope(view, record.last_at_ns)
    rules = tuple(_tried(point, scope, answer.rule, now_ns))
    yield AskedPoint(point.name, rules, answer_in_words(answer, view, names))


def _scope(view: Any, at_ns: int) -> tuple[Any, int]:
    """The scope in which the rules of a question are asked, and its moment."""
    if isinstance(view, OrderQuestion | VictimQuestion):
        return SortScope(len(view.requests), view.now_ns), view.now_ns
    if isinstance(view, RequestView):
        return RequestScope(view, at_ns), at_ns
    return view, view.now_ns


def _decide_points(policy: CompiledPolicy, view: View, decision: Any) -> Iterator[AskedPoint]:
    """Split, preempt and slice, as far as they were asked; each sees what the one before chose."""
    labels = {rule.partition("/")[0]: rule for rule in decision.rules}
    scope = DecideScope(view)
    words = {
        "split": split_in_words(decision.split, view.units_total),
        "preempt": preempt_in_words(decision),
        "slice": slice_in_words(decision, view.layers),
    }
    for name, label in labels.items():
        if name == "preempt":
            rules = tuple(_tried(policy.points[name], scope, label, view.now_ns))
            scope.batch = view.candidate if decision.preempt else view.running
        else:
            rules = tuple(_tried(policy.points[name], scope, label, view.now_ns))
            if name == "split":
                scope.split = decision.split
        yield AskedPoint(name, rules, words[name])


def _tried(point: Point, scope: Any, label: str, now_ns: int) -> Iterator[TriedRule]:
    """The rules that were looked at, up to the one that answered."""
    for rule in point.rules:
        outcome, why = _outcome(rule, scope)
        yield _told(point.name, rule, scope, now_ns, outcome, why)
        if rule.label == label or outcome == "matched":
            return
        if outcome == "failed" and label == f"{point.name}/default":
            break
    if label == f"{point.name}/default":
        yield TriedRule(label, "matched", why="the built-in answer, as a rule failed")


def _outcome(rule: Rule, scope: Any) -> tuple[str, str]:
    try:
        if rule.when is not None and not rule.when(scope):
            return "not matched", ""
        rule.then(scope)
    except Exception as error:  # whatever a rule does
        return "failed", expressions.explain(error)
    return "matched", ""


def _told(point: str, rule: Rule, scope: Any, now_ns: int, outcome: str, why: str) -> TriedRule:
    mark = getattr(rule, "mark", None)
    return TriedRule(
        rule=rule.label,
        outcome=outcome,
        why=why,
        when=getattr(rule, "when_text", "") or "",
        place="" if mark is None else f"{mark.source.filename}:{mark.line}",
        values=tuple(_values(point, rule, scope, now_ns)),
    )


def _values(point: str, rule: Rule, scope: Any, now_ns: int) -> Iterator[ShownValue]:
    """Values of what the condition and the answer mention; keys of a sort are told for each request."""
    known = PLACES.get(point, {})
    for name in sorted(rule.names):
        found = known.get(name)
        if found is not None:
            yield ShownValue(name, _read(found, scope, now_ns))
    if isinstance(scope, DecideScope):
        yield from _estimates(rule, scope)


def _read(name: Name, scope: Any, now_ns: int) -> str:
    try:
        return show(name.read(scope), name.type.value, now_ns)
    except Exception as error:  # a value that is not there
        return f"none ({expressions.explain(error)})"


def _estimates(rule: Rule, scope: DecideScope) -> Iterator[ShownValue]:
    """Estimates for the units that a rule can ask about: those of each split it tries, or those in force."""
    from muxk.policies.names import estimate_decode, estimate_prefill_layer

    functions = {"estimate.decode": estimate_decode, "estimate.prefill_layer": estimate_prefill_layer}
    for name in _FUNCTIONS_OF_UNITS:
        if name not in rule.names:
            continue
        for units in _units_asked(name, rule, scope):
            yield ShownValue(f"{name}({units})", _estimate(functions[name], scope, units))


def _units_asked(name: str, rule: Rule, scope: DecideScope) -> list[int]:
    if "units" in rule.names:
        return sorted({split.decode_units for split in scope.view.splits})[:TRIED_UNITS_SHOWN]
    units = scope.split.decode_units if name == "estimate.decode" else scope.split.prefill_units
    return [units] if units else []


def _estimate(function: Any, scope: DecideScope, units: int) -> str:
    try:
        return duration(function(scope, units))
    except Exception as error:  # nothing measured, or no batch
        return f"none ({expressions.explain(error)})"


def _ranked(
    policy: CompiledPolicy, question: str, view: Any, answer: Any, known: Known
) -> tuple[SortedRequest, ...]:
    """The first requests of an order, or the victim and who would have been next, with their sort keys."""
    if not isinstance(view, OrderQuestion | VictimQuestion) or answer is None:
        return ()
    names = _key_names(policy.points[question], answer.rule)
    order = answer.order if isinstance(answer, OrderAnswer) else (answer.index,)
    return tuple(
        _ranked_request(policy, view, index, place, names, known)
        for place, index in enumerate(order[:SORTED_SHOWN], 1)
    )


def place_of(record: Record, request_id: int, known: Known) -> SortedRequest | None:
    """The place of one request in an answer of `order`, however far behind; None when it is not in it."""
    policy, view, answer = known.find(record.sha), record.last_view, record.answer
    if not isinstance(policy, CompiledPolicy) or not isinstance(view, OrderQuestion):
        return None
    names = _key_names(policy.points["order"], answer.rule)
    for place, index in enumerate(answer.order, 1):
        if view.requests[index].request_id == request_id:
            return _ranked_request(policy, view, index, place, names, known)
    return None


def _key_names(point: Point, label: str) -> frozenset[str]:
    return next((rule.names for rule in point.rules if rule.label == label), frozenset())


def _ranked_request(
    policy: CompiledPolicy,
    view: OrderQuestion | VictimQuestion,
    index: int,
    place: int,
    names: frozenset[str],
    known: Known,
) -> SortedRequest:
    request, now_ns = view.requests[index], view.now_ns
    question = "order" if isinstance(view, OrderQuestion) else "victim"
    vocabulary, scope = PLACES[_KEY_PLACES[question]], RequestScope(request, now_ns)
    keys = tuple(
        ShownValue(name, _read(vocabulary[name], scope, now_ns))
        for name in sorted(names)
        if name in vocabulary and name.startswith(("request.", "class."))
    )
    service, overdue = "", False
    if isinstance(view, OrderQuestion):
        got = view.service.get(request.class_name)
        service = "" if got is None else f"{number(got)} tokens"
        max_wait_ns = policy.classify(request).chosen.max_wait_ns
        overdue = max_wait_ns is not None and now_ns >= request.arrival_ns + max_wait_ns
    return SortedRequest(place, known.name(request.request_id), keys, request.class_name, service, overdue)
