"""A policy whose answers are timed by the wall clock, whose errors are counted, and which is not changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any, ParamSpec, Protocol, TypeVar

from muxk.kernel.placing import PlaceAnswer, PlaceView
from muxk.kernel.policy import Policy
from muxk.kernel.view import (
    AdmitAnswer,
    AdmitView,
    ClassAnswer,
    Decision,
    FormAnswer,
    FormView,
    Limits,
    OrderAnswer,
    RequestView,
    RetainAnswer,
    VictimAnswer,
    View,
)

ERRORS_MAX = 64
OTHERS = "others"


class _WithErrors(Protocol):
    @property
    def errors(self) -> tuple[str, ...]: ...


Given = ParamSpec("Given")
Answer = TypeVar("Answer", bound=_WithErrors)


class TimedPolicy:
    """Implements `muxk.kernel.policy.Policy`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._decide = policy.decide
        self.answers = 0
        self.elapsed_ns = 0
        self.slowest_ns = 0
        self.errors: dict[str, int] = {}
        """By text; beyond ERRORS_MAX texts all others are one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def _timed(
        self, question: Callable[Given, Answer], *arguments: Given.args, **named: Given.kwargs
    ) -> Answer:
        began_ns = perf_counter_ns()
        answer = question(*arguments, **named)
        elapsed_ns = perf_counter_ns() - began_ns
        self.answers += 1
        self.elapsed_ns += elapsed_ns
        self.slowest_ns = max(self.slowest_ns, elapsed_ns)
        if answer.errors:
            self._count(answer.errors)
        return answer

    def _count(self, errors: Sequence[str]) -> None:
        for text in errors:
            name = text if text in self.errors or len(self.errors) < ERRORS_MAX else OTHERS
            self.errors[name] = self.errors.get(name, 0) + 1

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def sha(self) -> str:
        return self._policy.sha

    @property
    def limits(self) -> Limits:
        return self._policy.limits

    @property
    def tbt_slo_ns(self) -> int:
        return self._policy.tbt_slo_ns

    @property
    def reads_priority(self) -> bool:
        return self._policy.reads_priority

    @property
    def reads_deadline(self) -> bool:
        return self._policy.reads_deadline

    @property
    def classes(self) -> tuple[str, ...]:
        return self._policy.classes

    @property
    def known_classes(self) -> tuple[str, ...]:
        return self._policy.known_classes

    def classify(self, request: RequestView) -> ClassAnswer:
        return self._timed(self._policy.classify, request)

    def admit(self, view: AdmitView) -> AdmitAnswer:
        return self._timed(self._policy.admit, view)

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        return self._timed(self._policy.order, requests, now_ns, service)

    def form(self, view: FormView) -> FormAnswer:
        return self._timed(self._policy.form, view)

    def decide(self, view: View) -> Decision:
        """As `_timed`, in fewer calls: it is asked at each step."""
        began_ns = perf_counter_ns()
        answer = self._decide(view)
        elapsed_ns = perf_counter_ns() - began_ns
        self.answers += 1
        self.elapsed_ns += elapsed_ns
        if elapsed_ns > self.slowest_ns:
            self.slowest_ns = elapsed_ns
        if answer.errors:
            self._count(answer.errors)
        return answer

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        return self._timed(self._policy.victim, requests, now_ns)

    def retain(self, request: RequestView) -> RetainAnswer:
        return self._timed(self._policy.retain, request)

    @property
    def places(self) -> bool:
        return self._policy.places

    @property
    def devices_min(self) -> int:
        return self._policy.devices_min

    @property
    def fetches_prefix(self) -> bool:
        return self._policy.fetches_prefix

    def place(self, view: PlaceView) -> PlaceAnswer:
        return self._timed(self._policy.place, view)
