"""Values as policies write them (`12.3ms`, `4GiB`, moments relative to a decision), and answers in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from muxk.kernel.placing import Action, Assign, Move, PlaceAnswer, Shrink
from muxk.kernel.view import (
    AdmitAnswer,
    ClassAnswer,
    Decision,
    FormAnswer,
    OrderAnswer,
    RetainAnswer,
    VictimAnswer,
    View,
)
from muxk.kernel.work import Split

_DURATIONS = ((3_600e9, "h"), (60e9, "min"), (1e9, "s"), (1e6, "ms"), (1e3, "us"))
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
IDS_SHOWN = 8


def show(value: Any, kind: str, now_ns: int) -> str:
    """A value of a static type of the language, as a policy would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"'{value}'"
    if not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    if kind == "duration":
        return duration(value)
    if kind == "moment":
        return moment(value, now_ns)
    if kind == "size":
        return size(value)
    return f"{100 * value:.4g}%" if kind == "percent" else number(value)


def number(value: float) -> str:
    """Whole numbers as they are, others with four digits."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def duration(value_ns: float) -> str:
    """`12.3ms`."""
    for scale, unit in _DURATIONS:
        if abs(value_ns) >= scale:
            return (
                f"{value_ns / scale:.3g}{unit}"
                if abs(value_ns) < 100 * scale
                else _whole(value_ns, scale, unit)
            )
    return f"{value_ns:.3g}ns" if value_ns else "0ms"


def _whole(value: float, scale: float, unit: str) -> str:
    return f"{round(value / scale)}{unit}"


def moment(value_ns: float, now_ns: int) -> str:
    """Relative to the decision."""
    return f"now {'-' if value_ns < now_ns else '+'} {duration(abs(value_ns - now_ns))}"


def size(value: float) -> str:
    """`4GiB`."""
    for scale, unit in _SIZES:
        if abs(value) >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{number(value)}B"


def split_in_words(split: Split, total: int) -> str:
    """What each phase gets."""
    if split.decode_units == split.prefill_units == total:
        return f"both phases share all {total} units in time, decode first"
    if not split.prefill_units:
        return f"decode gets {split.decode_units} of {total} units, prefill none"
    if not split.decode_units:
        return f"prefill gets {split.prefill_units} of {total} units, decode none"
    return f"of {total} units decode gets {split.decode_units} and prefill {split.prefill_units}"


def slice_in_words(decision: Decision, layers_total: int) -> str:
    """What the next prefill item is."""
    tokens = "all tokens that are left" if decision.tokens is None else f"at most {decision.tokens} tokens"
    if decision.fuse:
        return f"{tokens} through all layers, in one pass with the decode step"
    if decision.layers >= layers_total:
        return f"the next item runs all layers of {tokens}"
    plural = "" if decision.layers == 1 else "s"
    return f"the next item runs {decision.layers} layer{plural} of {tokens}"


def preempt_in_words(decision: Decision) -> str:
    """Whether the running batch is parked."""
    return (
        "the running batch is parked for the one that waits"
        if decision.preempt
        else "the running batch goes on"
    )


def answer_in_words(answer: Any, view: Any, requests: Sequence[str]) -> str:
    """An answer to a question; `requests` are names of those that indices of the answer mean."""
    match answer:
        case Decision():
            return _decision(answer, view)
        case AdmitAnswer():
            return answer.action if not answer.reason else f"{answer.action}: {answer.reason}"
        case ClassAnswer():
            return _class(answer)
        case FormAnswer():
            return f"at most {answer.max_requests} requests and {answer.max_tokens} tokens"
        case OrderAnswer():
            return _order(answer, requests)
        case VictimAnswer():
            who = (
                f"request {requests[answer.index]}"
                if answer.index < len(requests)
                else f"place {answer.index}"
            )
            return f"{who} is computed again later"
        case PlaceAnswer():
            return _place(answer, requests)
        case RetainAnswer():
            return "its pages are kept for reuse" if answer.keep else "its pages are freed"
    return str(answer)


def _place(answer: PlaceAnswer, requests: Sequence[str]) -> str:
    """The actions of an answer; `requests` are those that it sends, in its sequence."""
    names = iter(requests)
    parts = [_action(action, names) for action in answer.actions[:IDS_SHOWN]]
    more = len(answer.actions) - len(parts)
    return "; ".join([*parts, *([f"{more} more"] if more else [])]) or "nobody is placed"


def _action(action: Action, names: Iterator[str]) -> str:
    match action:
        case Assign():
            who = ", ".join(next(names, f"#{request}") for request in action.requests)
            parts = [f"{who} to group {action.group}"]
            parts += [f"which takes devices {_numbers(action.devices)}"] if action.devices else []
            parts += [f"and keeps {action.keep}"] if action.keep is not None else []
            parts += [f"to decode in group {action.decode}"] if action.decode is not None else []
            return " ".join(parts)
        case Move():
            return f"what decodes in group {action.group} moves to {action.to}"
        case Shrink():
            return f"group {action.group} gives up devices {_numbers(action.devices)}"
    return f"group {action.group} takes devices {_numbers(action.devices)}"


def _numbers(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices))


def _decision(decision: Decision, view: View) -> str:
    asked = {rule.partition("/")[0] for rule in decision.rules}
    parts = [split_in_words(decision.split, view.units_total)]
    if "preempt" in asked:
        parts.append(preempt_in_words(decision))
    if "slice" in asked:
        parts.append(slice_in_words(decision, view.layers))
    return "; ".join(parts)


def _class(answer: ClassAnswer) -> str:
    chosen = answer.chosen
    slo = f"TBT {duration(chosen.tbt_slo_ns)}, TTFT {duration(chosen.ttft_slo_ns)}"
    wait = "" if chosen.max_wait_ns is None else f", waits {duration(chosen.max_wait_ns)} at most"
    share = "" if chosen.share == 1 else f", share {number(chosen.share)}"
    return f"class {chosen.name}: {slo}{share}{wait}"


def _order(answer: OrderAnswer, requests: Sequence[str]) -> str:
    if not answer.order:
        return "nobody waits"
    first = [requests[index] for index in answer.order[:IDS_SHOWN] if index < len(requests)]
    more = len(answer.order) - len(first)
    return f"first {', '.join(first)}" + (f" and {more} more" if more else "")
