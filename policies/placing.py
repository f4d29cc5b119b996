"""`place`: from rules, or a plan, to which devices compute the prompts of a queue and which decode them.

The requests of the queue are placed in their order. The first rule for which a device qualifies gives the
device; the one with the least sort key of those, and of equal ones the lowest number. A request for which no
rule has a device waits, and those behind it with it. What never happens is that everything waits: a rule that
fails, or an idle server on which nobody is placed, gets the built-in answer. A plan may wait for a device
that is between two groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from muxk.kernel.placing import Assign, PlaceAnswer, PlaceView
from muxk.kernel.view import RequestView
from muxk.policies.closures import Run
from muxk.policies.expressions import Expression
from muxk.policies.place_scopes import DeviceLoad, PlaceScope
from muxk.policies.problems import Mark, explain

DEFAULT_LABEL = "place/default"


class Among(StrEnum):
    """Which devices a rule looks at."""

    ALL = "all"
    PREFILL = "prefill"
    """Of the pool for prefill, those that decode for nobody."""
    DECODE = "decode"
    """Of the pool for decode, those that compute no prompts."""
    MIXED = "mixed"
    """Those that work for the phase of the other pool now."""
    SAME = "same"
    """The one that computes the prompt."""


class Reuse(StrEnum):
    """Where a prefill finds prefixes that earlier requests left behind."""

    OWN = "own"
    DECODE = "decode"


class Placing(Protocol):
    """What answers `place` for a policy; pure, and raises nothing."""

    @property
    def devices_min(self) -> int: ...

    @property
    def group_devices_max(self) -> int:
        """Devices of the largest group that it forms."""

    @property
    def fetches_prefix(self) -> bool: ...

    @property
    def labels(self) -> tuple[str, ...]:
        """All that its answers may bear."""

    def place(self, view: PlaceView) -> PlaceAnswer: ...


@dataclass(frozen=True, slots=True)
class PlaceRule:
    """A compiled rule; `where` is None for one that every device meets."""

    label: str
    among: Among
    where: Run | None
    by: tuple[Run, ...]
    mark: Mark
    condition: Expression | None = None
    keys: tuple[Expression, ...] = ()

    @property
    def expressions(self) -> tuple[Expression, ...]:
        return self.keys if self.condition is None else (self.condition, *self.keys)

    @property
    def never(self) -> bool:
        """Whether its condition is false under the params in force."""
        return self.condition is not None and self.condition.constant is False

    @property
    def where_text(self) -> str:
        return "" if self.condition is None else " ".join(self.condition.text.split())

    @property
    def answer_text(self) -> str:
        """What it takes, as people read it."""
        by = ", ".join(" ".join(key.text.split()) for key in self.keys)
        return f"{self.among} by {by}" if by else str(self.among)


@dataclass(frozen=True, slots=True)
class Pools:
    """How many of the first devices are for prefill; the others are for decode."""

    prefill: float
    """A number of devices, or a share of all."""
    is_share: bool
    is_of_decode: bool = False
    """The number is that of decode, and prefill has the rest."""

    def prefill_devices(self, total: int) -> int:
        """At least one, and one less than all; of a single device both pools have it."""
        wanted = round(self.prefill * total) if self.is_share else round(self.prefill)
        if self.is_of_decode:
            wanted = total - wanted
        return max(1, min(total - 1, wanted))

    @property
    def devices_min(self) -> int:
        return 2 if self.is_share else max(2, round(self.prefill) + 1)


class Chosen(NamedTuple):
    """A device, and the rule that has it."""

    rule: PlaceRule
    device: DeviceLoad


class Placed(NamedTuple):
    """Where a request goes."""

    prefill: DeviceLoad
    decode: DeviceLoad
    labels: tuple[str, ...]


@dataclass(frozen=True)
class RulePlacing:
    """Rules of the policy language; implements `Placing`."""

    prefill: tuple[PlaceRule, ...] = ()
    decode: tuple[PlaceRule, ...] = ()
    """Without them a request decodes where it was computed."""
    both: tuple[PlaceRule, ...] = ()
    """One device for both phases: asked where `prefill` or `decode` has none."""
    pools: Pools | None = None
    fetches_prefix: bool = False

    @property
    def devices_min(self) -> int:
        return 1 if self.pools is None else self.pools.devices_min

    @property
    def group_devices_max(self) -> int:
        """Rules place on single devices."""
        return 1

    @property
    def rules(self) -> tuple[PlaceRule, ...]:
        return (*self.prefill, *self.decode, *self.both)

    @property
    def labels(self) -> tuple[str, ...]:
        return (*(rule.label for rule in self.rules), DEFAULT_LABEL)

    def place(self, view: PlaceView) -> PlaceAnswer:
        """The requests of the queue that have a place now."""
        scope, errors = PlaceScope(view), Errors()
        actions: list[Assign] = []
        labels: list[str] = []
        for request in view.queue:
            placed = self._place(scope, request, errors)
            if placed is None:
                break
            actions.append(send(scope, request, placed))
            labels += placed.labels
        stuck = errors or all(device.idle for device in scope.devices)
        if view.queue and not actions and stuck:
            return by_default(view, view.queue[:1], errors.told)
        return PlaceAnswer(tuple(actions), tuple(labels), errors.told)

    def _place(self, scope: PlaceScope, request: RequestView, errors: Errors) -> Placed | None:
        scope.request = request
        prefill = self.choose(self.prefill, scope, None, errors)
        if prefill is not None and not self.decode:
            return Placed(prefill.device, prefill.device, (prefill.rule.label,))
        decode = None if prefill is None else self.choose(self.decode, scope, prefill.device, errors)
        if prefill is not None and decode is not None:
            return Placed(prefill.device, decode.device, (prefill.rule.label, decode.rule.label))
        both = self.choose(self.both, scope, None, errors)
        return None if both is None else Placed(both.device, both.device, (both.rule.label,))

    def choose(
        self, rules: Sequence[PlaceRule], scope: PlaceScope, same: DeviceLoad | None, errors: Errors
    ) -> Chosen | None:
        """The device for the request of the scope; `same` is the one that computes its prompt."""
        for rule in rules:
            device = best(rule, scope, self.devices(rule.among, scope, same), errors)
            if device is not None:
                return Chosen(rule, device)
        return None

    def devices(self, among: Among, scope: PlaceScope, same: DeviceLoad | None) -> Iterator[DeviceLoad]:
        """Those that a rule looks at."""
        if among is Among.SAME:
            yield from () if same is None else (same,)
            return
        for device in scope.devices:
            if among is Among.ALL or self._pool(device, scope) is among:
                yield device

    def _pool(self, device: DeviceLoad, scope: PlaceScope) -> Among:
        assert self.pools is not None, "rules that name a pool have pools"
        if device.number < self.pools.prefill_devices(len(scope.view.groups)):
            return Among.MIXED if device.decodes else Among.PREFILL
        return Among.MIXED if device.prefills else Among.DECODE


@dataclass(frozen=True)
class PlanPlacing:
    """A plan under the parameters of the policy; implements `Placing`."""

    name: str
    answer: Callable[[PlaceView], PlaceAnswer]
    mark: Mark
    devices_min: int = 1
    fetches_prefix: bool = False
    labels: tuple[str, ...] = (DEFAULT_LABEL,)
    group_devices_max: int = 1

    def place(self, view: PlaceView) -> PlaceAnswer:
        """What the plan says; the built-in answer when it fails."""
        try:
            answer = self.answer(view)
        except Exception as error:  # a plan must never stop serving, whatever a view holds
            return by_default(view, view.queue, (f"place/{self.name}: {explain(error)}",))
        working = any(not group.idle or group.promised_pages for group in view.groups if group.devices)
        if view.queue and not answer.actions and not (working or view.between_groups):
            told = (*answer.errors, f"place/{self.name}: nobody is placed on an idle server")
            return by_default(view, view.queue[:1], told)
        return answer


@dataclass
class Errors:
    """What went wrong in an answer, each text once."""

    _texts: dict[str, None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._texts)

    def note(self, rule: PlaceRule, error: Exception) -> None:
        self._texts.setdefault(f"{rule.label}: {explain(error)}")

    @property
    def told(self) -> tuple[str, ...]:
        return tuple(self._texts)


def best(
    rule: PlaceRule, scope: PlaceScope, devices: Iterator[DeviceLoad], errors: Errors
) -> DeviceLoad | None:
    """The first of the devices that qualify, by the keys of the rule; one for which it fails does not."""
    found: DeviceLoad | None = None
    least: list[Any] = []
    for device in devices:
        scope.device = device
        try:
            if rule.where is not None and not rule.where(scope):
                continue
            key = [run(scope) for run in rule.by]
        except Exception as error:  # a rule must never stop serving, whatever a view holds
            errors.note(rule, error)
            continue
        if found is None or key < least:
            found, least = device, key
    return found


def send(scope: PlaceScope, request: RequestView, placed: Placed) -> Assign:
    """The action for a request that has its place, counted in the loads of the scope."""
    scope.send(request, placed.prefill, placed.decode)
    decode = None if placed.decode is placed.prefill else placed.decode.number
    return Assign((request.request_id,), placed.prefill.number, decode=decode)


def by_default(view: PlaceView, requests: Sequence[RequestView], errors: tuple[str, ...] = ()) -> PlaceAnswer:
    """The built-in answer: each request to the device with the fewest requests, for good."""
    scope = PlaceScope(view)
    if not scope.devices:
        return PlaceAnswer((), (), errors)
    actions = []
    for request in requests:
        device = min(scope.devices, key=lambda one: one.waiting + one.incoming + one.decoding)
        actions.append(send(scope, request, Placed(device, device, ())))
    return PlaceAnswer(tuple(actions), len(actions) * (DEFAULT_LABEL,), errors)


def place_mentions(placing: Placing | None, names: frozenset[str]) -> bool:
    """Whether a rule that can be reached mentions one of the names."""
    rules = placing.rules if isinstance(placing, RulePlacing) else ()
    return any(names & expression.names for rule in rules for expression in rule.expressions)
