"""The answer of `split`: from what a rule wishes for each phase to a split that the device offers.

Every answer is legal: a disjoint split of `view.splits`, one side of such a split alone, the whole device for
one phase, or the whole device shared in time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

from muxk.kernel.view import View
from muxk.kernel.work import Split
from muxk.policies.closures import Run
from muxk.policies.expressions import Expression
from muxk.policies.fastest import FastestAlone
from muxk.policies.loader import fields
from muxk.policies.marks import MappingNode, Node, Scalar
from muxk.policies.names import PLACES
from muxk.policies.operators import BOOLS
from muxk.policies.problems import Report, did_you_mean, one_of
from muxk.policies.scopes import DecideScope, estimate_decode, shared
from muxk.policies.units import Type

Choose = Callable[[DecideScope], Split]
Pick = Callable[[DecideScope, tuple[Split, ...]], "Split | None"]
"""From the disjoint splits, ascending in the units of its phase and not empty, to one or None."""
ReadExpression = Callable[[Node, Type | tuple[Type, ...], str], "Expression | None"]

FIT = "estimate.decode(units) <= slo.tbt"
"""What `decode: fit` stands for: the fewest units for which this holds."""
_FEWEST = re.compile(r"\s*fewest\b\s*(?P<where>where\b)?\s*")


class Word(StrEnum):
    """What can be wished for a phase."""

    ALL = "all"
    REST = "rest"
    NONE = "none"
    MOST = "most"
    FASTEST = "fastest"
    FEWEST = "fewest"
    NUMBER = "a number"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a rule wishes for one phase; `run` is the number, or the condition of `fewest`."""

    word: Word
    run: Run | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One phase of a split."""

    name: str
    units: Callable[[Split], int]
    descending: bool
    """True when `view.splits` is descending in its units."""

    def ascending(self, view: View) -> tuple[Split, ...]:
        return view.splits[::-1] if self.descending else view.splits

    def alone(self, units: int) -> Split:
        """This phase on some units, nothing for the other."""
        return Split(0, units) if self.descending else Split(units, 0)


DECODE = Side("decode", attrgetter("decode_units"), False)
PREFILL = Side("prefill", attrgetter("prefill_units"), True)
_NOTHING = Wish(Word.NONE)
SPLIT: Mapping[str, str] = {"decode": "", "prefill": "", "otherwise": ""}
KEYWORDS: Mapping[str, Word] = {
    word.value: word for word in (Word.ALL, Word.REST, Word.NONE, Word.MOST, Word.FASTEST)
}
_WORDS = (*KEYWORDS, "fit", "fewest where")
BARE_NAMES = (*BOOLS, *(name for name in PLACES["fewest"] if "." not in name))
"""What an expression of one word can be; another word is a mistyped one of an answer."""


def parse_split(node: Node, report: Report, read: ReadExpression, nested: bool = False) -> Choose | None:
    """The closure of a `then` of split; None when problems were reported."""
    known = {**SPLIT, "otherwise": "can not be nested" if nested else ""}
    found = fields(node, known, "the answer of split", report)
    decode = _wish(found.get("decode"), DECODE, report, read)
    prefill = _wish(found.get("prefill"), PREFILL, report, read)
    otherwise = found.get("otherwise")
    fallback = parse_split(otherwise, report, read, nested=True) if otherwise is not None else None
    if decode is None or prefill is None or not isinstance(node, MappingNode):
        return None
    seeks = Word.FEWEST in (decode.word, prefill.word)
    if seeks and otherwise is None:
        word = _seeking(found.values())
        message = f"`{word}` needs `otherwise`" if not nested else f"`otherwise` can not hold `{word}`"
        report.add(
            node.mark, message, "say what happens when no split will do, such as decode: most, prefill: rest"
        )
        return None
    if otherwise is not None and not seeks:
        report.add(otherwise.mark, "`otherwise` is for `fewest` and `fit`, which are not asked here")
        return None
    if message := _conflict(decode.word, prefill.word):
        report.add(node.mark, message, "one of the two is usually `rest`")
        return None
    return _choose(decode, prefill, fallback or (lambda scope: shared(scope.view)))


def _wish(node: Node | None, side: Side, report: Report, read: ReadExpression) -> Wish | None:
    if node is None:
        return _NOTHING
    if isinstance(node, MappingNode):
        _refuse_mapping(node, side, report)
        return None
    if isinstance(node, Scalar) and node.text in KEYWORDS:
        word = KEYWORDS[node.text]
        if word is Word.FASTEST and side is PREFILL:
            report.add(node.mark, "`fastest` is for decode", "prefill is fastest with `all`")
            return None
        return Wish(word)
    if isinstance(node, Scalar) and node.text == "fit":
        return _fit(node, side, report, read)
    if isinstance(node, Scalar) and (match := _FEWEST.match(node.text)):
        return _fewest_where(node, match, report, read)
    if isinstance(node, Scalar) and node.text.isalpha() and node.text not in BARE_NAMES:
        hint = did_you_mean(node.text, _WORDS, f"write a number, a percentage, or {one_of(_WORDS)}")
        report.add(node.mark, f"'{node.text[:40]}' is no answer for {side.name}", hint)
        return None
    return _number(node, read)


def _seeking(wishes: Iterable[Node]) -> str:
    """The word that asks for a search."""
    fit = any(isinstance(wish, Scalar) and wish.text == "fit" for wish in wishes)
    return "fit" if fit else "fewest"


def _number(node: Node, read: ReadExpression) -> Wish | None:
    """A number of units, or a percentage of all units."""
    expression = read(node, (Type.NUMBER, Type.PERCENT), "split")
    if expression is None:
        return None
    run = expression.run
    if expression.constant == 0:
        return _NOTHING
    if expression.type is Type.PERCENT:
        return Wish(Word.NUMBER, lambda scope: run(scope) * scope.view.units_total)
    return Wish(Word.NUMBER, run)


def _fewest_where(node: Scalar, match: re.Match[str], report: Report, read: ReadExpression) -> Wish | None:
    rest = node.after(match.end())
    if match["where"] is None or not rest.text.strip():
        message = "`fewest` needs a condition on the units that are tried"
        report.add(node.mark, message, f"write fewest where {rest.text.strip()[:200] or FIT}")
        return None
    expression = read(rest, Type.BOOL, "fewest")
    return Wish(Word.FEWEST, expression.run) if expression is not None else None


def _fit(node: Scalar, side: Side, report: Report, read: ReadExpression) -> Wish | None:
    """The fewest units for which the decode step keeps its SLO."""
    if side is PREFILL:
        hint = "write prefill: rest, or what prefill needs, such as fewest where units >= 8"
        report.add(node.mark, "`fit` is for decode, which has an SLO for each step", hint)
        return None
    expression = read(Scalar(FIT, node.style, node.mark, node.start, node.end), Type.BOOL, "fewest")
    return Wish(Word.FEWEST, expression.run) if expression is not None else None


def _refuse_mapping(node: MappingNode, side: Side, report: Report) -> None:
    """`{fewest: condition}` was how muxk/v1alpha1 wrote it."""
    condition = node.get("fewest")
    text = condition.text if isinstance(condition, Scalar) else "estimate.decode(units) <= 50ms"
    message = f"the units for {side.name} must be a word or an expression, not a mapping"
    report.add(node.mark, message, f"write {side.name}: fewest where {text[:200]}")


def _conflict(decode: Word, prefill: Word) -> str:
    """Why two wishes can not both be met, or empty."""
    pair = (decode, prefill)
    if pair == (Word.NONE, Word.NONE):
        return "neither phase gets units"
    if Word.NONE in pair or pair in ((Word.ALL, Word.ALL), (Word.NUMBER, Word.NUMBER)):
        return ""
    if pair == (Word.REST, Word.REST):
        return "both phases can not have the rest"
    if Word.REST in pair:
        return ""
    return f"decode: {decode} and prefill: {prefill} can overlap"


def _choose(decode: Wish, prefill: Wish, otherwise: Choose) -> Choose:
    """The closure for two wishes without a conflict."""
    if decode.word is Word.ALL and prefill.word is Word.ALL:
        return lambda scope: shared(scope.view)
    for side, wish, other in ((DECODE, decode, prefill), (PREFILL, prefill, decode)):
        if wish.word is Word.ALL or (wish.word is Word.REST and other.word is Word.NONE):
            return _whole(side)
    if prefill.word is Word.NONE:
        return _alone(DECODE, decode, otherwise)
    if decode.word is Word.NONE:
        return _alone(PREFILL, prefill, otherwise)
    if decode.word is Word.REST:
        return _both(PREFILL, prefill, otherwise)
    return _both(DECODE, decode, otherwise)


def _whole(side: Side) -> Choose:
    return lambda scope: side.alone(scope.view.units_total)


def _both(side: Side, wish: Wish, otherwise: Choose) -> Choose:
    """A disjoint split chosen by one side; the other side gets what is left."""
    if wish.word is Word.NUMBER and wish.run is not None:
        return _both_by_number(side, wish.run)
    pick = _pick(side, wish)

    def choose(scope: DecideScope) -> Split:
        splits = side.ascending(scope.view)
        if not splits:
            return shared(scope.view)
        return pick(scope, splits) or otherwise(scope)

    return choose


def _both_by_number(side: Side, run: Run) -> Choose:
    """0 or less and the device's units or more mean all for one side, if the device can be split."""
    other = PREFILL if side is DECODE else DECODE

    def choose(scope: DecideScope) -> Split:
        view, wanted = scope.view, _rounded_up(run(scope))
        splits = side.ascending(view)
        if not splits:
            return shared(view)
        if wanted <= 0:
            return other.alone(view.units_total)
        if wanted >= view.units_total:
            return side.alone(view.units_total)
        return _at_least(side, wanted, splits) or splits[-1]

    return choose


def _rounded_up(units: float) -> int:
    """Rounded up, but for what floating point adds: 7% of 100 are 7."""
    return math.ceil(round(units, 6))


def _at_least(side: Side, wanted: int, splits: tuple[Split, ...]) -> Split | None:
    return next((split for split in splits if side.units(split) >= wanted), None)


def _alone(side: Side, wish: Wish, otherwise: Choose) -> Choose:
    """Some units for one side and none for the other: one side of a disjoint split, or all units."""
    if wish.word is Word.NUMBER and wish.run is not None:
        return _alone_by_number(side, wish.run)
    if wish.word is Word.FASTEST:
        return FastestAlone()
    pick = _pick(side, wish)

    def choose(scope: DecideScope) -> Split:
        splits = side.ascending(scope.view)
        if not splits:
            return side.alone(scope.view.units_total)
        split = pick(scope, splits)
        return side.alone(side.units(split)) if split is not None else otherwise(scope)

    return choose


def _alone_by_number(side: Side, run: Run) -> Choose:
    def choose(scope: DecideScope) -> Split:
        wanted = _rounded_up(run(scope))
        split = _at_least(side, wanted, side.ascending(scope.view))
        return side.alone(side.units(split) if split is not None else scope.view.units_total)

    return choose


def _pick(side: Side, wish: Wish) -> Pick:
    if wish.word is Word.MOST:
        return lambda scope, splits: splits[-1]
    if wish.word is Word.FASTEST:
        return _fastest
    assert wish.word is Word.FEWEST, wish
    assert wish.run is not None
    return _fewest(side.units, wish.run)


def _fastest(scope: DecideScope, splits: tuple[Split, ...]) -> Split:
    return min(splits, key=lambda split: estimate_decode(scope, split.decode_units))


def _fewest(units: Callable[[Split], int], condition: Run) -> Pick:
    """The first split for which the condition holds; the scope shows each as if it were chosen."""

    def pick(scope: DecideScope, splits: tuple[Split, ...]) -> Split | None:
        before: Any = scope.split
        try:
            for split in splits:
                scope.split, scope.units = split, units(split)
                if condition(scope):
                    return split
        finally:
            scope.split = before
        return None

    return pick
