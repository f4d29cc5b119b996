"""Views at random for policies: of devices as they are, with numbers that no server would ever measure."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import msgspec
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.journal import OrderQuestion, Record, VictimQuestion
from muxk.kernel.placing import GroupView, PlaceAnswer, PlaceView
from muxk.kernel.sane import sane_place
from muxk.kernel.view import (
    AdmitView,
    DecodeView,
    FormView,
    KvView,
    PrefillView,
    QueueView,
    RequestView,
    View,
)
from muxk.kernel.work import Split
from muxk.policies.answer_checks import WrongAnswer
from muxk.policies.engine import CompiledPolicy
from muxk.policies.explain import Known, explain
from muxk.policies.guarded import GuardedPolicy
from muxk.policies.place_scopes import PlaceScope
from muxk.policies.scopes import DecideScope, RequestScope, SortScope

COUNTS = (0, 1, 2, 7, 100, 4096, 10**6, 2**31, 2**53 + 1, 2**63 - 1, 10**40)
TIMES = (0, 1, 50_000_000, 10**9, 10**15, 2**63 - 1, -1, -(10**12))
FLOATS = (0.0, 1e-9, 1.0, 1e6, 5e7, 1e300, math.inf, math.nan, -1.0)
UNITS = (1, 2, 8, 132)
QUESTIONS = ("classify", "admit", "order", "form", "decide", "victim", "retain", "place")


class ViewMaker:
    """Views and requests; `calm` ones have numbers as servers have them."""

    def __init__(self, random: Random, calm: bool = False) -> None:
        self._random = random
        self._calm = calm

    def count(self, least: int = 0) -> int:
        if self._calm:
            return least + self._random.randrange(300)
        return max(least, self._random.choice(COUNTS))

    def time(self) -> int:
        return self._random.randrange(10**10) if self._calm else self._random.choice(TIMES)

    def number(self) -> float:
        return self._random.random() * 1e7 if self._calm else self._random.choice(FLOATS)

    def request(self, class_name: str = "") -> RequestView:
        return RequestView(
            request_id=self._random.randrange(1000),
            arrival_ns=self.time(),
            deadline_ns=self.time(),
            prompt_tokens=self.count(1),
            generated_tokens=self.count(),
            max_tokens=self.count(),
            pages=self.count(),
            priority=self._random.choice((-5, 0, 0, 1, 10**9)),
            recomputes=self.count(),
            request_class=self._random.choice(("", "gold", "chat", "\x00é", "x" * 300)),
            class_name=class_name,
        )

    def batch(self) -> PrefillView | None:
        if self._random.random() < 0.4:
            return None
        counts = {field: self.count() for field in PrefillView.__struct_fields__}
        counts.update(requests=self.count(1), arrival_ns=self.time(), deadline_ns=self.time())
        return PrefillView(**counts)

    def estimates(self, units: int) -> Estimates:
        if self._random.random() < 0.3:
            return Estimates(4)
        sizes = sorted({1, units, self._random.randint(1, units)})
        decode = tuple(DecodeModel(size, *(self.number() for _ in range(4))) for size in sizes)
        prefill = tuple(PrefillModel(size, *(self.number() for _ in range(4))) for size in sizes)
        return Estimates(4, decode, prefill)

    def decode(self) -> DecodeView:
        flags = (self._random.random() < 0.5, self._random.random() < 0.5)
        tbt_ns = self._random.choice((None, 1, 50_000_000))
        return DecodeView(self.count(), self.count(), *flags, abs(self.time()), tbt_ns)

    def view(self) -> View:
        units = self._random.choice(UNITS)
        splits = tuple(Split(decode, units - decode) for decode in range(1, units)[:: max(1, units // 8)])
        splits = self._random.choice((splits, splits, ()))
        whole = Split(units, units)
        return View(
            now_ns=self.time(),
            units_total=units,
            splits=splits,
            split=self._random.choice((whole, Split(0, units), *splits[:3])),
            layers=self._random.choice((1, 4, 126)),
            decode=self.decode(),
            running=self.batch(),
            parked=self.batch(),
            candidate=self.batch(),
            prefill_in_flight=self._random.randrange(4),
            queue=self.queue(),
            kv=self.kv(),
            estimates=self.estimates(units),
        )

    def queue(self) -> QueueView:
        return QueueView(self.count(), self.count())

    def kv(self) -> KvView:
        return KvView(self.count(), self.count())

    def arguments(self, question: str, classes: tuple[str, ...]) -> tuple[Any, ...]:
        """What a question of `Policy` is asked with."""
        name = self._random.choice((*classes, ""))
        request, estimates = self.request(name), self.estimates(8)
        if question == "decide":
            return (self.view(),)
        if question == "admit":
            bound, waiting = self.count(1), self.queue()
            return (AdmitView(self.time(), request, self.queue(), bound, self.kv(), estimates, waiting),)
        if question == "form":
            return (FormView(self.time(), request, self.queue(), self.decode(), self.kv(), estimates),)
        if question in ("classify", "retain"):
            return (request,)
        if question == "place":
            return (self.place_view(classes),)
        many = [self.request(self._random.choice(classes)) for _ in range(self._random.randint(1, 6))]
        if question == "victim":
            return (many, self.time())
        service = {name: abs(self._random.choice(FLOATS[:6])) for name in classes[:-1]}
        return (many, self.time(), service)

    def group(self, number: int, devices: tuple[int, ...]) -> GroupView:
        counts = {field: self.count() for field in GroupView.__struct_fields__}
        if self._random.random() < 0.4:
            counts.update(waiting=0, incoming=0, decoding=0)
        return GroupView(**{**counts, "group": number, "devices": devices, "since_ns": self.time()})

    def place_view(self, classes: tuple[str, ...] = ("default",)) -> PlaceView:
        draw = self._random
        queue = [self.request(draw.choice(classes)) for _ in range(draw.choice((0, 1, 2, 5)))]
        queue = [msgspec.structs.replace(one, request_id=place) for place, one in enumerate(queue)]
        total, elastic = draw.choice((1, 2, 4, 8)), draw.random() < 0.5
        owners = [draw.randrange(total) if elastic and draw.random() < 0.4 else one for one in range(total)]
        devices = [tuple(one for one in range(total) if owners[one] == group) for group in range(total)]
        sleeping = [group for group in range(total) if group not in devices[group] and devices[group]]
        devices = [(one,) for one in range(total)] if sleeping else devices
        return PlaceView(
            now_ns=self.time(),
            queue=tuple(queue),
            waiting=len(queue) + draw.choice((0, 7)),
            groups=tuple(self.group(number, devices[number]) for number in range(total)),
            layers=draw.choice((1, 4, 126)),
            units=draw.choice(UNITS),
            elastic=elastic,
            page_tokens=draw.choice((1, 16)),
            page_bytes=self.count(1),
            link_bytes_per_ns=draw.choice((0.0, 1e-9, 50.0, 1e300)),
            answer_tokens=draw.choice((0.0, 120.5, 1e9)),
            width_factors=draw.choice(((), tuple(draw.uniform(0.8, 2.0) for _ in range(total)))),
            estimates=self.estimates(8),
        )

    def scope(self, place: str) -> Any:
        """What the closures of a place are given."""
        if place in ("split", "fewest", "preempt", "slice"):
            scope = DecideScope(self.view())
            scope.units = self._random.randint(1, 8)
            return scope
        if place == "place":
            scope_of_place = PlaceScope(self.place_view())
            scope_of_place.request = self.request()
            scope_of_place.device = scope_of_place.devices[0]
            return scope_of_place
        if place in ("admit", "form"):
            return self.arguments(place, ("default",))[0]
        if place in ("order", "victim"):
            return SortScope([self.request()], self.time())
        return RequestScope(self.request(), self.time())


def ask_everything(policy: CompiledPolicy, maker: ViewMaker) -> None:
    """Every question gets an answer that is legal for the device, and the same when it is asked again."""
    guard = GuardedPolicy(policy, policy, "guard", policy.sha)
    for question in QUESTIONS:
        arguments = maker.arguments(question, policy.classes)
        answer = getattr(policy, question)(*arguments)
        assert getattr(policy, question)(*arguments) == answer
        if question == "place":
            assert_can_be_done(arguments[0], answer)
        errors = getattr(guard, question)(*arguments).errors
        senseless = [error for error in errors if error.startswith(f"{question}/guard:")]
        if senseless:
            raise WrongAnswer(f"{senseless}: {answer}")
        explain_it(policy, question, arguments, answer)


def assert_can_be_done(view: PlaceView, answer: PlaceAnswer) -> None:
    """Every action names what is there, and nobody waits on an idle server."""
    assert sane_place(answer, view) == answer
    idle = all(group.idle and not group.promised_pages for group in view.groups if group.devices)
    assert answer.actions or not view.queue or not idle or view.between_groups


def explain_it(policy: CompiledPolicy, question: str, arguments: tuple[Any, ...], answer: Any) -> None:
    """What it answered can be explained, and the explanation names the rule that answered."""
    asked: Any = arguments[0]
    if question == "order":
        asked = OrderQuestion(arguments[1], *arguments[::2])
    elif question == "victim":
        asked = VictimQuestion(arguments[1], arguments[0])
    now_ns = getattr(asked, "now_ns", 0)
    record = Record(now_ns, "fuzz", question, policy.sha, asked, answer, now_ns, asked)
    explanation = explain(record, Known(lambda sha: policy))
    msgspec.msgpack.encode(explanation)
    tried = [rule.rule for point in explanation.points for rule in point.rules]
    told = answer.rules if question in ("decide", "place") else (answer.rule,)
    for label in told:
        assert label in tried or label.endswith("/default"), (label, explanation)
