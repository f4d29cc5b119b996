"""Warnings about the rules of one decision point: what can never match, never matters, or lacks its guard.

Everything said here is proved by `formulas.py` for all values that a view can hold: a warning is never wrong,
and what can not be proved is not mentioned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from muxk.policies.conditions import Facts, formula_of
from muxk.policies.expressions import Expression
from muxk.policies.formulas import (
    BOOL,
    TRUE,
    Atom,
    Budget,
    Domain,
    Formula,
    Numbers,
    Some,
    Words,
    contradictory,
    implies,
    negate,
    terms,
)
from muxk.policies.operators import BUILTINS
from muxk.policies.problems import Mark, Report
from muxk.policies.terms import Form, Term
from muxk.policies.units import Type
from muxk.policies.vocabulary import Name, Vocabulary

_FRACTIONS = ("class.share",)
"""Numbers that need not be whole."""
_AT_MOST: Mapping[tuple[str, str], float] = {
    ("kv.free", "kv.total"): 1.0,
    ("decode.units", "units.total"): 1.0,
    ("prefill.units", "units.total"): 1.0,
    ("units", "units.total"): 1.0,
}


def _is(name: str) -> Formula:
    return Atom(name, "==", 1, BOOL)


def _either(*names: str) -> Formula:
    return Some(tuple(_is(name) for name in names))


_PRESENCES = ("running.active", "parked.waiting", "candidate.waiting")
_AXIOMS: tuple[Formula, ...] = (
    Some((negate(_is("candidate.fits")), _is("candidate.waiting"))),
    Some((negate(_is("prefill.pending")), _either(*_PRESENCES))),
    *(Some((_is("prefill.pending"), negate(_is(presence)))) for presence in _PRESENCES),
)
"""What holds of the presence of batches in every view."""
_GIVEN: Mapping[str, tuple[Formula, ...]] = {
    "preempt": (_is("running.active"), _is("candidate.waiting")),
    "slice": (_is("prefill.pending"),),
}
"""What holds whenever a point is asked."""
_NEED_ESTIMATES = (".time_left", ".slack")
_BATCHES = ("running.", "parked.", "candidate.")


@dataclass(frozen=True, slots=True)
class CheckedRule:
    """A rule without mistakes, and where it stands."""

    name: str
    mark: Mark
    when: Expression | None
    then: tuple[Expression, ...]
    """Expressions of its answer."""
    own: bool
    """Whether it stands in the file that is checked, and not in a policy that it extends."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Where the names of one place lie."""

    vocabulary: Vocabulary
    params: Mapping[str, Numbers]
    """By `params.name`, from the least to the largest value that `--set` takes."""
    fixed: bool = False
    options: Collection[str] = ()
    """Params of type bool that nobody set: what they turn off is meant to be off."""

    def facts(self) -> Facts:
        """For `conditions.py`."""
        return Facts(self._domain, _AT_MOST, self.fixed, self.options)

    def _domain(self, term: Term) -> Domain:
        if term.type is Type.BOOL:
            return BOOL
        if term.type is Type.NAME:
            return Words(self.vocabulary.words if term.form is Form.NAME else None)
        if term.text in self.params:
            return self.params[term.text]
        if term.form is Form.CALL:
            least = self.vocabulary.functions[term.text].least
        else:
            known = self.vocabulary.names.get(term.text)
            least = known.least if isinstance(known, Name) else 0 if term.text.startswith("slo.") else None
        whole = term.type is Type.NUMBER and term.form is not Form.CONSTANT and term.text not in _FRACTIONS
        if term.text == "kv.total":
            least = 1
        if least is None:
            return Numbers(whole=whole)
        is_positive_time = term.form is Form.CONSTANT
        return Numbers(low=least, low_open=is_positive_time, whole=whole)


class RuleAnalysis:
    """Warns of the rules of one point."""

    def __init__(
        self, point: str, ranges: Ranges, skips_failing: bool, report: Report, budget: Budget
    ) -> None:
        self._point = point
        self._free = ranges.facts()
        self._fixed = replace(ranges, fixed=True).facts()
        self._skips_failing = skips_failing
        self._report = report
        self._budget = budget
        self._noun = "class" if point == "classes" else "rule"
        self._ended = False
        """Whether a rule always matched, so that none after it is asked."""

    def check(self, rules: Sequence[CheckedRule]) -> None:
        """All warnings; those of rules of other files are left out."""
        before: list[tuple[CheckedRule, Formula]] = []
        for rule in rules:
            when = TRUE if rule.when is None else formula_of(rule.when.tree, self._free)
            if not self._never(rule, when, before):
                self._parts(rule)
                self._off(rule)
            self._guards(rule, when, before)
            if self._ended:
                break
            if rule.when is not None and when is not None and self._counts(rule.when.tree):
                before.append((rule, when))

    def _counts(self, tree: Term) -> bool:
        """Whether it is known to be false where the rules after it are asked."""
        return not (self._skips_failing and can_fail(tree))

    def _holds(self, facts: Sequence[Formula], formula: Formula) -> bool:
        return implies([*self._known(facts, formula), *facts], formula, self._budget)

    def _excluded(self, formulas: Sequence[Formula]) -> bool:
        return contradictory([*self._known(formulas), *formulas], self._budget)

    def _known(self, formulas: Sequence[Formula], *more: Formula) -> tuple[Formula, ...]:
        """What is known anyway of the presence of batches, if they are spoken of."""
        spoken = [term for formula in (*formulas, *more) for term in terms(formula)]
        speaks = any(name in spoken for name in ("candidate.fits", "prefill.pending", *_PRESENCES))
        return (*_AXIOMS, *_GIVEN.get(self._point, ())) if speaks else ()

    def _warn(self, rule: CheckedRule, mark: Mark, message: str, hint: str, code: str) -> None:
        if rule.own:
            self._report.warn(mark, message, hint, code)

    # --- rules that never match ---

    def _never(
        self, rule: CheckedRule, when: Formula | None, before: Sequence[tuple[CheckedRule, Formula]]
    ) -> bool:
        """Whether a rule can not match, or always does; that is told."""
        if when is None:
            return False
        if rule.when is not None and self._excluded([when]):
            place = rule.when.scalar.mark_at(self._culprit(rule.when.tree))
            hint = f"take the {self._noun} out, or correct what it asks for"
            self._warn(rule, place, "this condition can never hold", hint, "never-true")
            return True
        earlier = [formula for _, formula in before]
        if before and self._excluded([when, *map(negate, earlier)]):
            self._unreachable(rule, when, before)
            return True
        if rule.when is not None and not can_fail(rule.when.tree) and self._holds([], when):
            hint = "leave `when` out, and what comes after it, which is never asked"
            self._warn(rule, rule.when.scalar.mark, "this condition always holds", hint, "always-true")
            self._ended = True
            return True
        return False

    def _unreachable(
        self, rule: CheckedRule, when: Formula, before: Sequence[tuple[CheckedRule, Formula]]
    ) -> None:
        noun = self._noun
        code = f"unreachable-{noun}"
        name = f"{noun} '{rule.name}' can never be reached"
        other = next((e for e, formula in before if self._excluded([when, negate(formula)])), None)
        if other is None or rule.when is None:
            hint = "the conditions before it cover every case; the last of them can do without its `when`"
            self._warn(rule, rule.mark, name, hint, code)
            return
        same = other.when is not None and _same(other.when.tree, rule.when.tree)
        why = "has the same condition" if same else "matches whenever it would"
        hint = f"{noun} '{other.name}' on line {other.mark.line} {why}; put the narrower one first"
        if same:
            hint = f"{noun} '{other.name}' on line {other.mark.line} {why}"
        self._warn(rule, rule.mark, name, hint, code)

    def _culprit(self, tree: Term) -> int:
        """Offset of the first part of an `and` that excludes those before it."""
        if tree.form is Form.OPERATOR and tree.text == "and":
            known: list[Formula] = []
            for part in tree.parts:
                formula = formula_of(part, self._free)
                if formula is not None:
                    known.append(formula)
                    if self._excluded(known):
                        return part.offset
        return tree.offset

    def _off(self, rule: CheckedRule) -> None:
        """A note of a rule that can not match with the params in force, unless a switch is off by default."""
        if rule.when is None or not rule.own:
            return
        when = formula_of(rule.when.tree, self._fixed)
        if when is not None and _mentions_constants(rule.when.tree) and self._excluded([when]):
            message = f"{self._noun} '{rule.name}' is off with the params and SLOs in force"
            set_by_params = _mentions_constants(rule.when.tree, "params.")
            hint = "other values of --set turn it on" if set_by_params else "another SLO turns it on"
            self._report.note(rule.when.scalar.mark, message, hint, "switched-off")

    # --- parts that never matter ---

    def _parts(self, rule: CheckedRule) -> None:
        if rule.when is not None and rule.own:
            for offset, word in self._idle_parts(rule.when.tree):
                how = (
                    "the rest of the `and` implies it" if word == "and" else "the rest of the `or` covers it"
                )
                place = rule.when.scalar.mark_at(offset)
                self._report.warn(
                    place, f"this can never matter: {how}", "take it out", "redundant-condition"
                )

    def _idle_parts(self, tree: Term) -> Iterator[tuple[int, str]]:
        if tree.form is not Form.OPERATOR or tree.text not in ("and", "or", "not"):
            return
        if tree.text == "not":
            yield from self._idle_parts(tree.parts[0])
            return
        kept = list(tree.parts)
        for part in reversed(tree.parts):
            others = [other for other in kept if other is not part]
            if others and part.text not in _PRESENCES and self._is_idle(part, others, tree.text):
                kept = others
                yield part.offset, tree.text
            else:
                yield from self._idle_parts(part)

    def _is_idle(self, part: Term, others: Sequence[Term], word: str) -> bool:
        formula = formula_of(part, self._free)
        rest = [formula_of(other, self._free) for other in others]
        known = [other for other in rest if other is not None]
        if formula is None or len(known) < len(rest):
            return False
        if word == "and":
            return self._holds(known, formula)
        return self._excluded([formula, *map(negate, known)])

    # --- guards ---

    def _guards(
        self, rule: CheckedRule, when: Formula | None, before: Sequence[tuple[CheckedRule, Formula]]
    ) -> None:
        if not rule.own:
            return
        known = [negate(formula) for _, formula in before]
        told: dict[str, None] = {}
        if rule.when is not None:
            self._guarded(rule.when, rule.when.tree, known, told)
        matched = known if when is None else [*known, when]
        for expression in rule.then:
            self._guarded(expression, expression.tree, matched, told)

    def _guarded(
        self,
        expression: Expression,
        term: Term,
        known: Sequence[Formula],
        told: dict[str, None],
        at: int | None = None,
    ) -> None:
        """Warn of names that may be absent where nothing known says that they are there.

        Args:
            at: the offset of the variable that the term is part of, whose text stands elsewhere.
        """
        for need, name in self._needs(expression, term):
            if need not in told and not self._holds(known, _is(need)):
                told[need] = None
                place = expression.scalar.mark_at(term.offset if at is None else at)
                self._unguarded(place, need, name)
        if term.form is Form.VARIABLE and at is None:
            at = term.offset
        if term.form is Form.OPERATOR and term.text == "if":
            test, yes, no = term.parts
            self._guarded(expression, test, known, told, at)
            self._guarded(expression, yes, self._with(known, test, True), told, at)
            self._guarded(expression, no, self._with(known, test, False), told, at)
            return
        for part in term.parts:
            self._guarded(expression, part, known, told, at)
            if term.form is Form.OPERATOR and term.text in ("and", "or"):
                known = self._with(known, part, term.text == "and")

    def _with(self, known: Sequence[Formula], term: Term, value: bool) -> list[Formula]:
        formula = formula_of(term, self._free)
        if formula is None:
            return list(known)
        return [*known, formula if value else negate(formula)]

    def _needs(self, expression: Expression, term: Term) -> Iterator[tuple[str, str]]:
        """What must hold for a name or a call to have a value, and its text."""
        if term.form is Form.NAME:
            known = expression.reads.get(term.text)
            if known is not None and known.needs:
                yield known.needs, term.text
            if term.text.startswith(_BATCHES) and term.text.endswith(_NEED_ESTIMATES):
                yield "estimate.known", term.text
        elif term.form is Form.CALL and term.text not in BUILTINS:
            yield "estimate.known", term.text

    def _unguarded(self, place: Mark, need: str, name: str) -> None:
        if need == "estimate.known":
            message = f"'{name}' has no value before something was measured"
            hint = "a rule before it with `when: not estimate.known` says what to do until then"
            self._report.note(place, message, hint, "unguarded-estimate")
            return
        message = f"'{name}' is absent where '{need}' is false, and nothing here asks that first"
        self._report.warn(place, message, f"write {need} and ...", "unguarded-batch")


def can_fail(term: Term) -> bool:
    """Whether a condition may have no value: it divides, estimates, or reads a batch."""
    if term.form is Form.CALL and term.text not in BUILTINS:
        return True
    if term.form is Form.OPERATOR and term.text in ("+", "-", "*", "/", "//", "%"):
        return True
    if term.form is Form.NAME and term.text.startswith(_BATCHES):
        return term.text not in (*_PRESENCES, "candidate.fits")
    return any(can_fail(part) for part in term.parts)


def _mentions_constants(term: Term, root: str = "") -> bool:
    """Whether a term mentions a param or an SLO whose name starts so."""
    is_one = term.form is Form.CONSTANT and term.text.startswith(root)
    return is_one or any(_mentions_constants(part, root) for part in term.parts)


def _same(left: Term, right: Term) -> bool:
    return (left.form, left.text) == (right.form, right.text) and all(
        _same(a, b) for a, b in zip(left.parts, right.parts, strict=False)
    )
