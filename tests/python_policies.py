"""Policies written in Python for tests: answers of another policy, except where a test wants its own."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec
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
    RequestClass,
    RequestView,
    RetainAnswer,
    VictimAnswer,
    View,
)
from muxk.kernel.work import Split
from muxk.policies.engine import load_policy

MS = 1_000_000
HUGE = 10**12


class Like:
    """Answers as the shipped policy `base` does; tests override what they are about."""

    reads_priority = True
    reads_deadline = True
    known_classes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ("default",)

    def __init__(self, base: str = "inflight", name: str = "", **limits: int) -> None:
        self.base: Policy = load_policy(base)
        self.name = name or f"like {base}"
        self.sha = self.name
        self.limits: Limits = msgspec.structs.replace(self.base.limits, **limits)
        self.tbt_slo_ns = self.base.tbt_slo_ns

    def classify(self, request: RequestView) -> ClassAnswer:
        return self.base.classify(request)

    def admit(self, view: AdmitView) -> AdmitAnswer:
        return self.base.admit(view)

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        return self.base.order(requests, now_ns, service)

    def form(self, view: FormView) -> FormAnswer:
        return self.base.form(view)

    def decide(self, view: View) -> Decision:
        return self.base.decide(view)

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        return self.base.victim(requests, now_ns)

    def retain(self, request: RequestView) -> RetainAnswer:
        return self.base.retain(request)

    @property
    def places(self) -> bool:
        return self.base.places

    @property
    def devices_min(self) -> int:
        return self.base.devices_min

    @property
    def fetches_prefix(self) -> bool:
        return self.base.fetches_prefix

    def place(self, view: PlaceView) -> PlaceAnswer:
        return self.base.place(view)


class Fixed(Like):
    """The same decision at each point, as far as a test names parts of it."""

    def __init__(
        self,
        base: str = "inflight",
        *,
        split: Split | None = None,
        layers: int | None = None,
        tokens: int | None = None,
        preempt: bool | None = None,
        fuse: bool | None = None,
        **limits: int,
    ) -> None:
        super().__init__(base, **limits)
        parts = {"split": split, "layers": layers, "tokens": tokens, "preempt": preempt, "fuse": fuse}
        self.parts = {name: part for name, part in parts.items() if part is not None}

    def decide(self, view: View) -> Decision:
        return msgspec.structs.replace(self.base.decide(view), **self.parts)


NUMBERS = (-HUGE, -1, 0, 1, 2, 7, HUGE)


class Random(Like):
    """Any answer that its type allows, legal or not, drawn by a seed: it breaks the contract of `Policy`."""

    classes = ("a", "b")

    def __init__(self, seed: int, **limits: int) -> None:
        super().__init__("muxwise", f"random {seed}", **limits)
        self.draw = random.Random(seed)

    def number(self) -> int:
        return self.draw.choice(NUMBERS)

    def split(self, view: View) -> Split:
        draw, units = self.draw, view.units_total
        illegal = Split(self.number(), self.number())
        legal = draw.choice([*view.splits, Split(units, units)])
        held = draw.choice([Split(0, legal.prefill_units), Split(legal.decode_units, 0), Split(0, 0)])
        return draw.choice([illegal, legal, legal, held, view.split])

    def decide(self, view: View) -> Decision:
        draw = self.draw
        return Decision(
            split=self.split(view),
            layers=self.number(),
            preempt=draw.random() < 0.5,
            rules=(f"split/{draw.randrange(10**9)}",),
            errors=draw.choice([(), (f"{draw.random()}",)]),
            tokens=draw.choice([None, *NUMBERS]),
            fuse=draw.random() < 0.3,
        )

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        draw, count = self.draw, len(requests)
        shuffled = draw.sample(range(count), count)
        garbage = [draw.randrange(-3, count + 3) for _ in range(draw.randrange(count + 3))]
        return OrderAnswer(
            tuple(draw.choice([shuffled, shuffled[1:], garbage, shuffled * 2, []])), "order/any"
        )

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        return VictimAnswer(self.draw.choice([*NUMBERS, *range(len(requests))]), "victim/any")

    def form(self, view: FormView) -> FormAnswer:
        return FormAnswer(self.number(), self.number(), "form/any")

    def retain(self, request: RequestView) -> RetainAnswer:
        return RetainAnswer(self.draw.random() < 0.5, "retain/any")

    def classify(self, request: RequestView) -> ClassAnswer:
        draw = self.draw
        chosen = RequestClass(
            draw.choice(["a", "b", "", "of no policy"]),
            self.number(),
            self.number(),
            self.number(),
            draw.choice([1.0, 0.0, -2.0, float("inf"), float("nan"), 3.0, 1e300]),
            draw.choice([None, *NUMBERS]),
        )
        return ClassAnswer(chosen, "classes/any")


class InClasses(Like):
    """Classes by the name that clients give; the first is for those who give none of them."""

    def __init__(self, classes: Sequence[RequestClass], base: str = "inflight", **limits: int) -> None:
        super().__init__(base, **limits)
        self.named = {chosen.name: chosen for chosen in classes}
        self.classes = tuple(self.named)
        self.known_classes = self.classes

    def classify(self, request: RequestView) -> ClassAnswer:
        name = request.request_class if request.request_class in self.named else self.classes[0]
        return ClassAnswer(self.named[name], f"classes/{name}")
