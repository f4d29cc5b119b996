"""Why requests went to which devices: the rules of `place` that were tried, with the values that they saw."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from muxk.kernel.placing import Assign, PlaceAnswer, PlaceView
from muxk.kernel.view import RequestView
from muxk.policies.explanation import AskedPoint, ShownValue, TriedRule
from muxk.policies.place_scopes import DeviceLoad, PlaceScope
from muxk.policies.placing import (
    DEFAULT_LABEL,
    Chosen,
    Errors,
    Placed,
    PlaceRule,
    Placing,
    RulePlacing,
    best,
    send,
)
from muxk.policies.problems import explain as fault
from muxk.policies.shown import show

REQUESTS_SHOWN = 4
"""Of an answer about many; those that were asked about are always told."""
DEVICES_SHOWN = 4
"""Whose values are told for a rule that no device met."""


def place_points(
    placing: Placing | None,
    view: PlaceView,
    answer: PlaceAnswer,
    wanted: Collection[int],
    name: Callable[[int], str],
) -> Iterator[AskedPoint]:
    """For each request that was placed, and the first that was not, the rules that were looked at."""
    if not isinstance(placing, RulePlacing) or DEFAULT_LABEL in answer.rules:
        rules = tuple(TriedRule(label, "matched") for label in dict.fromkeys(answer.rules))
        yield AskedPoint("place", rules, f"{len(answer.actions)} actions")
        return
    scope, told = PlaceScope(view), 0
    for request in view.queue:
        tried: list[TriedRule] = []
        placed = _place(placing, scope, request, tried)
        if told < REQUESTS_SHOWN or request.request_id in wanted:
            told += 1
            yield AskedPoint("place", tuple(tried), _where(name(request.request_id), placed))
        if placed is None:
            return
        send(scope, request, placed)


def assigned(answer: PlaceAnswer) -> tuple[int, ...]:
    """Requests that an answer places."""
    return tuple(
        request for action in answer.actions if isinstance(action, Assign) for request in action.requests
    )


def _where(request: str, placed: Placed | None) -> str:
    if placed is None:
        return f"request {request} waits"
    if placed.decode is placed.prefill:
        return f"request {request} goes to device {placed.prefill.number}"
    return (
        f"request {request} is computed on device {placed.prefill.number} "
        f"and decodes on device {placed.decode.number}"
    )


def _place(
    placing: RulePlacing, scope: PlaceScope, request: RequestView, tried: list[TriedRule]
) -> Placed | None:
    """As RulePlacing does it, with what was looked at."""
    scope.request = request
    prefill = _choose(placing, placing.prefill, scope, None, tried)
    if prefill is not None and not placing.decode:
        return Placed(prefill.device, prefill.device, ())
    decode = None if prefill is None else _choose(placing, placing.decode, scope, prefill.device, tried)
    if prefill is not None and decode is not None:
        return Placed(prefill.device, decode.device, ())
    both = _choose(placing, placing.both, scope, None, tried)
    return None if both is None else Placed(both.device, both.device, ())


def _choose(
    placing: RulePlacing,
    rules: Sequence[PlaceRule],
    scope: PlaceScope,
    same: DeviceLoad | None,
    tried: list[TriedRule],
) -> Chosen | None:
    for rule in rules:
        devices = tuple(placing.devices(rule.among, scope, same))
        errors = Errors()
        device = best(rule, scope, iter(devices), errors)
        tried.append(_tried(rule, scope, devices, device, errors))
        if device is not None:
            return Chosen(rule, device)
    return None


def _tried(
    rule: PlaceRule,
    scope: PlaceScope,
    devices: Sequence[DeviceLoad],
    chosen: DeviceLoad | None,
    errors: Errors,
) -> TriedRule:
    outcome = "matched" if chosen is not None else "failed" if errors else "not matched"
    why = "; ".join(errors.told) if chosen is None else ""
    if not devices:
        why = f"no device is among {rule.among} now"
    shown = devices[:DEVICES_SHOWN] if chosen is None else (chosen,)
    values = tuple(value for device in shown for value in _values(rule, scope, device))
    place = f"{rule.mark.source.filename}:{rule.mark.line}"
    return TriedRule(rule.label, outcome, why, rule.where_text, rule.answer_text, place, values)


def _values(rule: PlaceRule, scope: PlaceScope, device: DeviceLoad) -> Iterator[ShownValue]:
    """What a rule read of a device, and of the request."""
    scope.device = device
    reads = {text: name for expression in rule.expressions for text, name in expression.reads.items()}
    for text, name in reads.items():
        of_device = text.startswith("device.")
        shown = f"device {device.number}: {text.removeprefix('device.')}" if of_device else text
        try:
            value = show(name.read(scope), name.type.value, scope.now_ns)
        except Exception as error:  # a value that is not there
            value = f"none ({fault(error)})"
        yield ShownValue(shown, value)
