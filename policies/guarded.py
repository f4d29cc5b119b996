"""A policy written in Python, made safe to ask: no answer raises, and every answer makes sense.

The guard does for Python what the compiler of the policy language does for YAML, at run time: an exception or
a senseless answer becomes an error of the rule, and the fallback policy answers. How many different
labels and error texts one policy can bring into the counters is bounded. What it can not do is stop a
method that never returns or that damages the process: a policy in Python is code that the operator trusts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from msgspec.structs import replace
from muxk.kernel.placing import PlaceAnswer, PlaceView
from muxk.kernel.policy import Policy, guard_of
from muxk.kernel.view import (
    AdmitAnswer,
    AdmitView,
    ClassAnswer,
    Decision,
    FormAnswer,
    FormView,
    OrderAnswer,
    RequestView,
    RetainAnswer,
    VictimAnswer,
    View,
)
from muxk.policies.answer_checks import (
    ERROR_CHARS_MAX,
    BoundedTexts,
    WrongAnswer,
    boolean,
    described,
    in_words,
    limits,
    names,
    permutation,
    place_actions,
    printable,
    request_class,
    shown,
    split,
    whole_number,
)
from muxk.policies.answers import LARGEST_COUNT, MAX_REASON
from muxk.policies.api import API_VERSION
from muxk.policies.units import LONGEST_NS

LABELS_MAX = 64
"""Different rule labels of one policy; what it answers under others is counted as one."""
ERRORS_MAX = 64
"""The same of its error texts."""
ERRORS_PER_ANSWER_MAX = 8
LABEL_CHARS_MAX = 80
RULES_OF_PLACE_MAX = 256

_DECIDE_POINTS = ("split/", "preempt/", "slice/", "decide/")
_DEFAULT_REASONS: Mapping[str, str] = {
    "accept": "",
    "refuse": "refused by the policy",
    "shed": "too many requests wait; retry later",
}

A = TypeVar(
    "A", AdmitAnswer, ClassAnswer, Decision, FormAnswer, OrderAnswer, PlaceAnswer, RetainAnswer, VictimAnswer
)


class GuardedPolicy:
    """Implements `muxk.kernel.policy.Policy` around one that is not to be relied on."""

    api_version = f"python/{API_VERSION}"
    """Of what it is written in, as YAML policies have one."""

    def __init__(self, policy: Policy, fallback: Policy, name: str, sha: str, *, version: str = "") -> None:
        """Read once what a policy says about itself.

        Args:
            fallback: answers where `policy` does not.
            sha: identity of code, version and settings.
            version: for a policy that names none.

        Raises:
            WrongAnswer: it says something senseless, or its properties raise.
        """
        self._policy = policy
        self._fallback = fallback
        self._labels = BoundedTexts(LABELS_MAX, "other rules")
        self._errors = BoundedTexts(ERRORS_MAX, f"{name}: errors with other texts")
        self.name = name
        self.sha = sha
        self.version = described(policy, "version") or version
        self.description = described(policy, "description")
        try:
            self.limits = limits(policy.limits)
            self.tbt_slo_ns = whole_number(policy.tbt_slo_ns, 1, LONGEST_NS, "tbt_slo_ns")
            self.reads_priority = boolean(policy.reads_priority, "reads_priority")
            self.guard = guard_of(policy)
            self.reads_deadline = boolean(policy.reads_deadline, "reads_deadline")
            self.classes = names(policy.classes, 1, "classes")
            self.known_classes = names(policy.known_classes, 0, "known_classes")
            # A policy that was written before there were several devices says none of these.
            self.places = boolean(getattr(policy, "places", False), "places")
            self.devices_min = whole_number(getattr(policy, "devices_min", 1), 1, 1 << 16, "devices_min")
            widest = getattr(policy, "group_devices_max", 1)
            self.group_devices_max = whole_number(widest, 1, 1 << 16, "group_devices_max")
            self.fetches_prefix = boolean(getattr(policy, "fetches_prefix", False), "fetches_prefix")
        except WrongAnswer:
            raise
        except (Exception, SystemExit) as error:
            raise WrongAnswer(in_words(error)) from error

    def classify(self, request: RequestView) -> ClassAnswer:
        """The class of a request; the last one when there is no sensible answer."""

        def checked(answer: ClassAnswer) -> ClassAnswer:
            chosen = request_class(answer.chosen, self.classes)
            return ClassAnswer(chosen, *self._told("classes", answer.rule, answer.errors))

        def otherwise() -> ClassAnswer:
            answer = self._fallback.classify(request)
            if answer.chosen.name in self.classes:
                rank = self.classes.index(answer.chosen.name)
            else:
                rank = len(self.classes) - 1
            chosen = replace(answer.chosen, name=self.classes[rank], rank=rank)
            return ClassAnswer(chosen, f"classes/{chosen.name}", answer.errors)

        return self._ask("classify", ClassAnswer, lambda: self._policy.classify(request), checked, otherwise)

    def admit(self, view: AdmitView) -> AdmitAnswer:
        """Accept, refuse or shed a request."""

        def checked(answer: AdmitAnswer) -> AdmitAnswer:
            action, reason = answer.action, answer.reason
            if not isinstance(action, str) or action not in _DEFAULT_REASONS:
                raise WrongAnswer(f"action must be accept, refuse or shed, not {shown(action)}")
            if not isinstance(reason, str):
                raise WrongAnswer(f"reason must be a text, not {shown(reason)}")
            reason = printable(reason, MAX_REASON) or _DEFAULT_REASONS[action]
            return AdmitAnswer(action, reason, *self._told("admit", answer.rule, answer.errors))

        fallback = self._fallback
        return self._ask(
            "admit", AdmitAnswer, lambda: self._policy.admit(view), checked, lambda: fallback.admit(view)
        )

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        """Indices of `requests`, first to be served first."""
        given, got = tuple(requests), MappingProxyType(dict(service))

        def checked(answer: OrderAnswer) -> OrderAnswer:
            order = permutation(answer.order, len(given))
            return OrderAnswer(order, *self._told("order", answer.rule, answer.errors))

        return self._ask(
            "order",
            OrderAnswer,
            lambda: self._policy.order(given, now_ns, got),
            checked,
            lambda: self._fallback.order(given, now_ns, got),
        )

    def form(self, view: FormView) -> FormAnswer:
        """How large the next prefill batch may be."""

        def checked(answer: FormAnswer) -> FormAnswer:
            requests = whole_number(answer.max_requests, 1, LARGEST_COUNT, "max_requests")
            tokens = whole_number(answer.max_tokens, 1, LARGEST_COUNT, "max_tokens")
            return FormAnswer(requests, tokens, *self._told("form", answer.rule, answer.errors))

        fallback = self._fallback
        return self._ask(
            "form", FormAnswer, lambda: self._policy.form(view), checked, lambda: fallback.form(view)
        )

    def decide(self, view: View) -> Decision:
        """Split, preemption and the slice of what runs next."""
        fallback = self._fallback
        return self._ask(
            "decide",
            Decision,
            lambda: self._policy.decide(view),
            lambda answer: self._decision(answer, view),
            lambda: fallback.decide(view),
        )

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        """Who to recompute later; `requests` holds at least one."""
        given = tuple(requests)

        def checked(answer: VictimAnswer) -> VictimAnswer:
            index = whole_number(answer.index, 0, len(given) - 1, "index")
            return VictimAnswer(index, *self._told("victim", answer.rule, answer.errors))

        return self._ask(
            "victim",
            VictimAnswer,
            lambda: self._policy.victim(given, now_ns),
            checked,
            lambda: self._fallback.victim(given, now_ns),
        )

    def retain(self, request: RequestView) -> RetainAnswer:
        """Whether to keep the pages of a finished request in the prefix index."""

        def checked(answer: RetainAnswer) -> RetainAnswer:
            keep = boolean(answer.keep, "keep")
            return RetainAnswer(keep, *self._told("retain", answer.rule, answer.errors))

        fallback = self._fallback
        return self._ask(
            "retain",
            RetainAnswer,
            lambda: self._policy.retain(request),
            checked,
            lambda: fallback.retain(request),
        )

    def place(self, view: PlaceView) -> PlaceAnswer:
        """Where requests go; what the rules say when it does not."""
        if not self.places:
            return self._fallback.place(view)

        def checked(answer: PlaceAnswer) -> PlaceAnswer:
            if not isinstance(answer.rules, tuple | list) or len(answer.rules) > RULES_OF_PLACE_MAX:
                raise WrongAnswer(f"rules must be a tuple of at most {RULES_OF_PLACE_MAX} texts")
            labels = tuple(self._label("place", rule) for rule in answer.rules)
            return PlaceAnswer(place_actions(answer.actions), labels, self._error_texts(answer.errors))

        fallback = self._fallback
        return self._ask(
            "place", PlaceAnswer, lambda: self._policy.place(view), checked, lambda: fallback.place(view)
        )

    def _ask(
        self,
        point: str,
        kind: type[A],
        question: Callable[[], A],
        checked: Callable[[A], A],
        otherwise: Callable[[], A],
    ) -> A:
        """The checked answer to a question, or the fallback's with what went wrong."""
        try:
            answer = question()
            if not isinstance(answer, kind):
                raise WrongAnswer(f"the answer must be a {kind.__name__}, not {shown(answer)}")
            return checked(answer)
        except (Exception, SystemExit) as error:
            text = self._errors.known(f"{point}/{self.name}: {in_words(error)}")
        fallen: A = otherwise()
        return replace(fallen, errors=(*fallen.errors, text))

    def _decision(self, answer: Decision, view: View) -> Decision:
        rules, errors = answer.rules, answer.errors
        if not isinstance(rules, tuple | list) or len(rules) > len(_DECIDE_POINTS):
            raise WrongAnswer(f"rules must be a tuple of at most {len(_DECIDE_POINTS)} texts")
        labels = tuple(self._label("decide", rule) for rule in rules)
        tokens = answer.tokens
        return Decision(
            split=split(answer.split, view),
            layers=whole_number(answer.layers, 1, LARGEST_COUNT, "layers"),
            preempt=boolean(answer.preempt, "preempt"),
            rules=labels or (f"decide/{self.name}",),
            errors=self._error_texts(errors),
            tokens=None if tokens is None else whole_number(tokens, 1, LARGEST_COUNT, "tokens"),
            fuse=boolean(answer.fuse, "fuse"),
        )

    def _told(self, point: str, rule: Any, errors: Any) -> tuple[str, tuple[str, ...]]:
        return self._label(point, rule), self._error_texts(errors)

    def _label(self, point: str, rule: Any) -> str:
        """`point/name`, whatever part of it the policy wrote."""
        if not isinstance(rule, str) or not rule:
            raise WrongAnswer(f"rule must be a text, not {shown(rule)}")
        name = printable(rule, LABEL_CHARS_MAX)
        points = _DECIDE_POINTS if point == "decide" else (f"{point}/",)
        return self._labels.known(name if name.startswith(points) else f"{point}/{name}")

    def _error_texts(self, errors: Any) -> tuple[str, ...]:
        if not isinstance(errors, tuple | list) or not all(isinstance(error, str) for error in errors):
            raise WrongAnswer(f"errors must be a tuple of texts, not {shown(errors)}")
        kept = errors[:ERRORS_PER_ANSWER_MAX]
        return tuple(self._errors.known(printable(error, ERROR_CHARS_MAX)) for error in kept)
