"""The `then` of each decision point: how it is written, and the closure that makes the answer.

A new verb of a point is a case here; a new point is a row of `POINTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muxk.kernel.view import RequestView
from muxk.policies.classes import Classes
from muxk.policies.closures import Run, negate
from muxk.policies.expressions import Expression, compile_expression
from muxk.policies.loader import fields
from muxk.policies.marks import MappingNode, Node, Scalar, SequenceNode, describe
from muxk.policies.names import vocabulary
from muxk.policies.problems import Report, did_you_mean, one_of
from muxk.policies.scopes import RequestScope, SortScope, shared
from muxk.policies.splits import BARE_NAMES, parse_split
from muxk.policies.units import Type
from muxk.policies.vocabulary import Constant, Vocabulary

LARGEST_COUNT = 1 << 31
MAX_KEYS = 8
MAX_REASON = 500

ADMIT = ("accept", "refuse", "shed")
WITH_REASON = ("refuse", "shed")
PREEMPT = ("park", "continue")
RETAIN = ("keep", "free")
FUSE = ("decode",)
ALL = "all"
SORT_KEYS: Mapping[str, str] = {"by": ""}
FORM: Mapping[str, str] = {"requests": "", "tokens": ""}
SLICE: Mapping[str, str] = {"layers": "", "tokens": "", "fuse": ""}

Answer = Callable[[Any], Any]
"""From the scope of the decision to the answer of the point."""


@dataclass(frozen=True, slots=True)
class Context:
    """What compiling a policy needs everywhere."""

    report: Report
    constants: Mapping[str, Constant]
    classes: Classes | None = None
    variables: Mapping[str, Scalar] = field(default_factory=dict)
    expressions: list[Expression] = field(default_factory=list)
    """Those that were compiled so far; collected for each rule."""
    vocabularies: dict[str, Vocabulary] = field(default_factory=dict)
    """By place, those asked for so far."""

    def vocabulary(self, place: str) -> Vocabulary:
        """What expressions of a place may name in this policy."""
        if place not in self.vocabularies:
            self.vocabularies[place] = vocabulary(place, self.constants, self.classes, self.variables)
        return self.vocabularies[place]

    def expression(
        self, node: Node | None, wanted: Type | tuple[Type, ...], place: str, sort_key: bool = False
    ) -> Expression | None:
        """The expression of a scalar node; None, with a report, when it is no such thing."""
        if node is None:
            return None
        if not isinstance(node, Scalar):
            hint = "inside { } put quotes around it"
            self.report.add(node.mark, f"an expression is expected, not {describe(node)}", hint)
            return None
        expression = compile_expression(node, wanted, self.vocabulary(place), self.report, sort_key)
        if expression is not None:
            self.expressions.append(expression)
        return expression

    def word(self, node: Node, words: tuple[str, ...], what: str) -> str | None:
        """One of a closed set of words."""
        if isinstance(node, Scalar) and node.text in words:
            return node.text
        hint = did_you_mean(node.text, words) if isinstance(node, Scalar) else ""
        self.report.add(node.mark, f"{what} must be {one_of(words)}, not {describe(node)}", hint)
        return None


@dataclass(frozen=True, slots=True)
class PointKind:
    """A decision point of the language."""

    parse: Callable[[Node, Context], Answer | None]
    fallback: Answer
    """The answer when rules fail; legal on every device."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer of admit."""

    action: str
    reason: str


def _parse_admit(node: Node, context: Context) -> Answer | None:
    actions: tuple[str, ...] = ADMIT
    reason = ""
    if isinstance(node, MappingNode) and len(node.entries) == 1:
        (entry,) = node
        reason = _reason(entry.value, context)
        node = entry.key
        actions = WITH_REASON
    action = context.word(node, actions, "the answer of admit")
    if action is None:
        return None
    default = {"accept": "", "refuse": "refused by the policy", "shed": "too many requests wait; retry later"}
    verdict = Verdict(action, reason or default[action])
    return lambda scope: verdict


def _reason(node: Node, context: Context) -> str:
    if isinstance(node, Scalar) and node.text.strip() and len(node.text) <= MAX_REASON:
        return node.text
    context.report.add(node.mark, f"a reason must be a text of at most {MAX_REASON} characters")
    return ""


def _admit_fallback(view: Any) -> Verdict:
    """What the kernel's bounds ask for."""
    if view.request.pages > view.kv.pages_total:
        return Verdict("refuse", "the request can never fit into the KV pool")
    if view.queue.requests >= view.queue_bound:
        return Verdict("shed", "too many requests wait; retry later")
    return Verdict("accept", "")


def _parse_keys(place: str) -> Callable[[Node, Context], Answer | None]:
    def parse(node: Node, context: Context) -> Answer | None:
        by = fields(node, SORT_KEYS, f"the answer of {place}", context.report).get("by")
        if by is None:
            if isinstance(node, MappingNode):
                hint = "write by: [request.arrival]"
                context.report.add(node.mark, f"the answer of {place} needs sort keys: by", hint)
            return None
        items = by.items if isinstance(by, SequenceNode) else (by,)
        if not 0 < len(items) <= MAX_KEYS:
            context.report.add(by.mark, f"1 to {MAX_KEYS} sort keys are expected, not {len(items)}")
            return None
        keys = [context.expression(item, SORTABLE, f"a key of {place}", sort_key=True) for item in items]
        return Keys(tuple(key_run(key) for key in keys if key is not None)).order

    return parse


SORTABLE = (Type.NUMBER, Type.DURATION, Type.MOMENT, Type.SIZE, Type.PERCENT, Type.BOOL)


def key_run(key: Expression) -> Run:
    return negate(key.run) if key.descending else key.run


@dataclass(frozen=True, slots=True)
class Keys:
    """Answer of order and victim: what to sort by, ascending."""

    runs: tuple[Run, ...]

    def order(self, scope: SortScope) -> tuple[int, ...]:
        """Indices of the requests of a scope, first to last; equal ones keep their sequence."""
        reader = self._reader(scope.requests, scope.now_ns)
        return tuple(sorted(range(scope.count), key=reader))

    def _reader(self, requests: Sequence[RequestView], now_ns: int) -> Callable[[int], Any]:
        """From an index of `requests` to its sort key."""
        scope = RequestScope(requests[0], now_ns)
        runs = self.runs

        def read_one(index: int) -> Any:
            scope.request = requests[index]
            return run(scope)

        def read_all(index: int) -> Any:
            scope.request = requests[index]
            return [one(scope) for one in runs]

        if len(runs) == 1:
            (run,) = runs
            return read_one
        return read_all


BY_ARRIVAL = Keys((lambda scope: scope.request.arrival_ns,))
LATEST_FIRST = Keys((lambda scope: -scope.request.arrival_ns,))


def _parse_form(node: Node, context: Context) -> Answer | None:
    found = fields(node, FORM, "the answer of form", context.report)
    if isinstance(node, MappingNode):
        for key in FORM:
            if key not in found:
                context.report.add(node.mark, f"the answer of form needs '{key}'", f"write {key}: 8")
    requests = context.expression(found.get("requests"), Type.NUMBER, "form")
    tokens = context.expression(found.get("tokens"), Type.NUMBER, "form")
    if requests is None or tokens is None:
        return None
    run_requests, run_tokens = requests.run, tokens.run
    return lambda scope: (count(run_requests(scope)), count(run_tokens(scope)))


def count(value: float) -> int:
    """A number as a count: rounded up, at least 1, and within 32 bits."""
    return max(1, min(math.ceil(value), LARGEST_COUNT))


def count_down(value: float) -> int:
    """A number as a count: rounded down, at least 1, and within 32 bits."""
    return max(1, min(math.floor(value), LARGEST_COUNT))


def _parse_slice(node: Node, context: Context) -> Answer | None:
    """From the scope to (layers, tokens or None for all, fused with the decode step)."""
    found = fields(node, SLICE, "the answer of slice", context.report)
    if not _slice_makes_sense(node, found, context):
        return None
    layers = _amount(found.get("layers"), "layers", count, context)
    tokens = _amount(found.get("tokens"), "tokens", count_down, context)
    if layers is None or tokens is None:
        return None
    run_layers, run_tokens = layers, tokens
    fuse = "fuse" in found

    def answer(scope: Any) -> tuple[int, int | None, bool]:
        wanted = run_layers(scope)
        return scope.view.layers if wanted is None else wanted, run_tokens(scope), fuse

    return answer


def _slice_makes_sense(node: Node, found: Mapping[str, Node], context: Context) -> bool:
    """Whether the keys of a slice go together; reported if they do not."""
    report = context.report
    fuse = found.get("fuse")
    if fuse is not None:
        if "layers" in found:
            hint = "a fused step runs all layers; leave 'layers' out"
            report.add(fuse.mark, "'fuse' and 'layers' do not go together", hint)
        elif "tokens" not in found:
            report.add(fuse.mark, "'fuse' needs 'tokens'", "write {tokens: 256, fuse: decode}")
        return context.word(fuse, FUSE, "fuse") is not None and "tokens" in found
    if isinstance(node, MappingNode) and not node.entries:
        hint = "write layers: all, or tokens: 256"
        report.add(node.mark, "the answer of slice needs 'layers' or 'tokens'", hint)
    return bool(found)


def _amount(node: Node | None, what: str, rounded: Callable[[float], int], context: Context) -> Answer | None:
    """From the scope to a rounded number, or to None for `all`, which is meant where there is no node."""
    if node is None or (isinstance(node, Scalar) and node.text == ALL):
        return lambda scope: None
    if isinstance(node, Scalar) and node.text.isalpha() and node.text not in BARE_NAMES:
        hint = did_you_mean(node.text, ["all"], "write a number, or all")
        context.report.add(node.mark, f"'{node.text[:40]}' is no number of {what}", hint)
        return None
    expression = context.expression(node, Type.NUMBER, "slice")
    if expression is None:
        return None
    run = expression.run
    return lambda scope: rounded(run(scope))


def _parse_preempt(node: Node, context: Context) -> Answer | None:
    word = context.word(node, PREEMPT, "the answer of preempt")
    return None if word is None else lambda scope: word == "park"


def _parse_retain(node: Node, context: Context) -> Answer | None:
    word = context.word(node, RETAIN, "the answer of retain")
    return None if word is None else lambda scope: word == "keep"


def _parse_split_rule(node: Node, context: Context) -> Answer | None:
    return parse_split(node, context.report, context.expression)


POINTS: Mapping[str, PointKind] = {
    "admit": PointKind(_parse_admit, _admit_fallback),
    "order": PointKind(_parse_keys("order"), BY_ARRIVAL.order),
    "form": PointKind(_parse_form, lambda scope: (1, 1)),
    "split": PointKind(_parse_split_rule, lambda scope: shared(scope.view)),
    "slice": PointKind(_parse_slice, lambda scope: (1, None, False)),
    "preempt": PointKind(_parse_preempt, lambda scope: False),
    "victim": PointKind(_parse_keys("victim"), LATEST_FIRST.order),
    "retain": PointKind(_parse_retain, lambda scope: True),
}
"""Decision points, in the order of a request's life."""
