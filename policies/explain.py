"""Why a policy answered as it did: a recorded question is asked again, rule by rule, and each value is shown.

Policies are pure, so this needs no more than the record and the compiled policy. For a policy that is not
written in the language only the answer is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from muxk.kernel.journal import Forgotten, OrderQuestion, Record, VictimQuestion
from muxk.kernel.placing import PlaceAnswer, PlaceView
from muxk.kernel.policy import Policy
from muxk.kernel.shadow import in_classes_of
from muxk.kernel.view import AdmitView, Decision, FormView, OrderAnswer, RequestView, View
from muxk.kernel.work import Split
from muxk.policies.engine import CompiledPolicy
from muxk.policies.explain_place import assigned, place_points
from muxk.policies.explanation import AskedPoint, Explanation, ShownValue, SortedRequest, TriedRule
from muxk.policies.points import CLASSES
from muxk.policies.problems import explain as fault
from muxk.policies.rules import OnError, Point, Rule
from muxk.policies.scopes import DecideScope, RequestScope, SortScope
from muxk.policies.shown import (
    answer_in_words,
    number,
    preempt_in_words,
    show,
    slice_in_words,
    split_in_words,
)
from muxk.policies.splits import DECODE, PREFILL
from muxk.policies.vocabulary import Name

SORTED_SHOWN = 16
TRIED_UNITS_SHOWN = 12

_UNITS = re.compile(r"(?<![.\w])units(?![.\w])")
"""The name `units`, which `fewest` tries, in the text of a call."""
_SEEKS_PREFILL = re.compile(r"prefill: *\{? *fewest")


@dataclass(frozen=True, slots=True)
class Known:
    """What explanations need besides the records."""

    find: Callable[[str], Policy | None]
    """A policy by its sha, or None when it is not known any more."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Requests by the server's id, as their clients named them."""
    zero_ns: int = 0
    """When the server started."""
    asked_about: Collection[int] = ()
    """Requests whose places are told however far behind they are."""

    def name(self, request_id: int) -> str:
        return self.names.get(request_id, f"#{request_id}")


def explain(record: Record, known: Known) -> Explanation:
    """Explain one record: the policy's answer, and the shadow's where it differed."""
    own = _explain(record, record.last_view, record.sha, record.answer, known)
    if record.shadow is None:
        return own
    shadow = record.shadow
    other = _explain(record, _seen_by_shadow(record, shadow.sha, known), shadow.sha, shadow.answer, known)
    return replace(own, differs=shadow.differs, shadow=other)


def _seen_by_shadow(record: Record, sha: str, known: Known) -> Any:
    """The question as the shadow got it: its requests are in classes of its own, where it has others."""
    policy, first = known.find(sha), known.find(record.sha)
    same = first is not None and policy is not None and first.classes == policy.classes
    if same or not isinstance(policy, CompiledPolicy):
        return record.last_view
    return in_classes_of(policy, record.point, record.last_view)


def _explain(record: Record, view: Any, sha: str, answer: Any, known: Known) -> Explanation:
    policy = known.find(sha)
    asked = assigned(answer) if isinstance(answer, PlaceAnswer) else request_ids(record)
    names = tuple(map(known.name, asked))
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
            points = tuple(_points(policy, record, view, answer, known, names))
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
    """Requests that a question names, in its sequence; empty for `decide`, which knows sums only.

    Of `place` those that its answer sends to a device.
    """
    view = record.view
    if isinstance(view, PlaceView):
        return assigned(record.answer)
    if isinstance(view, OrderQuestion | VictimQuestion):
        return tuple(request.request_id for request in view.requests)
    if isinstance(view, AdmitView):
        return (view.request.request_id,)
    if isinstance(view, FormView):
        return (view.head.request_id,)
    return (view.request_id,) if isinstance(view, RequestView) else ()


def _points(
    policy: CompiledPolicy, record: Record, view: Any, answer: Any, known: Known, names: Sequence[str]
) -> Iterator[AskedPoint]:
    question = record.point
    if answer is None:
        return
    if question == "decide":
        yield from _decide_points(policy, view, answer)
        return
    if question == "place":
        yield from place_points(policy.placing, view, answer, known.asked_about, known.name)
        return
    point = policy.points[CLASSES if question == "classify" else question]
    scope, now_ns = _scope(view, record.last_at_ns)
    yield AskedPoint(point.name, tuple(_tried(point, scope, now_ns)), answer_in_words(answer, view, names))


def _scope(view: Any, at_ns: int) -> tuple[Any, int]:
    """The scope in which the rules of a question are asked, and its moment."""
    if isinstance(view, OrderQuestion | VictimQuestion):
        return SortScope(view.requests, view.now_ns), view.now_ns
    if isinstance(view, RequestView):
        return RequestScope(view, at_ns), at_ns
    return view, view.now_ns


def _decide_points(policy: CompiledPolicy, view: View, decision: Decision) -> Iterator[AskedPoint]:
    """Split, preempt and slice, as far as they were asked; each sees what the one before chose."""
    asked = {rule.partition("/")[0] for rule in decision.rules}
    scope = DecideScope(view)
    yield AskedPoint(
        "split",
        tuple(_tried(policy.points["split"], scope, view.now_ns, decision.split)),
        split_in_words(decision.split, view.units_total),
    )
    scope.split = decision.split
    if "preempt" in asked:
        rules = tuple(_tried(policy.points["preempt"], scope, view.now_ns))
        yield AskedPoint("preempt", rules, preempt_in_words(decision))
        scope.batch = view.candidate if decision.preempt else view.running
    if "slice" in asked:
        rules = tuple(_tried(policy.points["slice"], scope, view.now_ns))
        yield AskedPoint("slice", rules, slice_in_words(decision, view.layers))


def _tried(point: Point, scope: Any, now_ns: int, split: Split | None = None) -> Iterator[TriedRule]:
    """The rules that were looked at, up to the one that answered; `split` is the answer, where it is one."""
    for rule in point.rules:
        outcome, why = _outcome(rule, scope)
        values = tuple(_values(rule, outcome, scope, now_ns, split))
        place = f"{rule.mark.source.filename}:{rule.mark.line}"
        yield TriedRule(rule.label, outcome, why, rule.when_text, rule.then_text, place, values)
        if outcome == "matched":
            return
        if outcome == "failed" and point.on_error is not OnError.NEXT:
            break
    if point.base is not None:
        yield from _tried(point.base, scope, now_ns, split)
    else:
        yield TriedRule(f"{point.name}/default", "matched", "the built-in answer, for no rule gave one")


def _outcome(rule: Rule, scope: Any) -> tuple[str, str]:
    try:
        if rule.when is not None and not rule.when(scope):
            return "not matched", ""
        rule.then(scope)
    except Exception as error:  # whatever a rule does
        return "failed", fault(error)
    return "matched", ""


def _values(rule: Rule, outcome: str, scope: Any, now_ns: int, split: Split | None) -> Iterator[ShownValue]:
    """What the condition mentions, then the answer if it was asked; keys of a sort are told by request."""
    for text, name in rule.when_reads.items():
        yield ShownValue(text, _read(name, scope, now_ns))
    if outcome == "not matched" or isinstance(scope, SortScope):
        return
    tried = {text: name for text, name in rule.then_reads.items() if _UNITS.search(text)}
    for text, name in rule.then_reads.items():
        if text not in rule.when_reads and text not in tried:
            yield ShownValue(text, _read(name, scope, now_ns))
    if tried and split is not None:
        yield from _tried_units(rule, tried, scope, now_ns, split)


def _tried_units(
    rule: Rule, reads: Mapping[str, Name], scope: DecideScope, now_ns: int, chosen: Split
) -> Iterator[ShownValue]:
    """What `fewest` saw of each split it tried, by rising units, up to the one that was chosen."""
    side = PREFILL if _SEEKS_PREFILL.search(rule.then_text) else DECODE
    before = scope.split
    for split in side.ascending(scope.view)[:TRIED_UNITS_SHOWN]:
        scope.split, scope.units = split, side.units(split)
        for text, name in reads.items():
            if text != "units":
                yield ShownValue(_UNITS.sub(str(scope.units), text), _read(name, scope, now_ns))
        if split == chosen:
            break
    scope.split = before


def _read(name: Name, scope: Any, now_ns: int) -> str:
    try:
        return show(name.read(scope), name.type.value, now_ns)
    except Exception as error:  # a value that is not there
        return f"none ({fault(error)})"


def _ranked(
    policy: CompiledPolicy, question: str, view: Any, answer: Any, known: Known
) -> tuple[SortedRequest, ...]:
    """The first requests of an order, or the victim, with their sort keys."""
    if not isinstance(view, OrderQuestion | VictimQuestion) or answer is None:
        return ()
    keys = _keys(policy.points[question], answer.rule)
    order = answer.order if isinstance(answer, OrderAnswer) else (answer.index,)
    return tuple(
        _ranked_request(policy, view, index, place, keys, known)
        for place, index in enumerate(order, 1)
        if place <= SORTED_SHOWN or view.requests[index].request_id in known.asked_about
    )


def _keys(point: Point, label: str) -> Mapping[str, Name]:
    """What the sort keys of a rule read of a request."""
    for rule in point.rules:
        if rule.label == label:
            return rule.then_reads
    return {} if point.base is None else _keys(point.base, label)


def _ranked_request(
    policy: CompiledPolicy,
    view: OrderQuestion | VictimQuestion,
    index: int,
    place: int,
    keys: Mapping[str, Name],
    known: Known,
) -> SortedRequest:
    request, now_ns = view.requests[index], view.now_ns
    scope = RequestScope(request, now_ns)
    values = tuple(ShownValue(text, _read(name, scope, now_ns)) for text, name in keys.items())
    service, overdue = "", False
    if isinstance(view, OrderQuestion):
        got = view.service.get(request.class_name)
        service = "" if got is None else f"{number(got)} tokens"
        max_wait_ns = policy.class_rows.named(request.class_name).max_wait_ns
        overdue = max_wait_ns is not None and now_ns >= request.arrival_ns + max_wait_ns
    return SortedRequest(place, known.name(request.request_id), values, request.class_name, service, overdue)
