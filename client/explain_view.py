"""Explanations as text for a terminal: a table of requests, and decisions rule by rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from muxk.client import protocol
from muxk.policies.explanation import AskedPoint, Explanation, ShownValue, SortedRequest, TriedRule

COLUMNS = ("request", "client", "class", "waited", "tokens", "where", "reason", "rule", "why")
CELL_MAX = 40
MARKS: Mapping[str, str] = {"matched": "=>", "not matched": "  ", "failed": "!!"}


def live(explained: protocol.Explained) -> Iterator[str]:
    """A table of all live requests, as far as the answer has them."""
    if not explained.requests:
        yield "no request waits or runs"
        return
    yield from requests(explained.requests)
    if explained.live > len(explained.requests):
        yield f"... and {explained.live - len(explained.requests)} more"


def requests(told: Sequence[protocol.ExplainedRequest]) -> Iterator[str]:
    """A table with one line for each choice."""
    yield from table([COLUMNS, *map(_row, told)])


def _row(request: protocol.ExplainedRequest) -> tuple[str, ...]:
    name = request.request_id if not request.choice else f"{request.request_id}[{request.choice}]"
    return (
        _cut(name),
        request.client,
        request.request_class or "-",
        f"{request.waited:.3f}s",
        str(request.tokens),
        request.where or "-",
        request.code,
        request.rule or "-",
        request.detail,
    )


def _cut(text: str) -> str:
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown if len(shown) <= CELL_MAX else f"{shown[: CELL_MAX - 3]}..."


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned columns; the last one as long as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[-1]]).rstrip()


def decisions(explanations: Iterable[Explanation]) -> Iterator[str]:
    """Decisions in the order of time, with an empty line between."""
    for index, explanation in enumerate(explanations):
        if index:
            yield ""
        yield from decision(explanation)


def decision(explanation: Explanation) -> Iterator[str]:
    """One decision: when, what, and how it came about."""
    yield f"{_when(explanation)}  {explanation.actor or '-'}  {explanation.question}  {_policy(explanation)}"
    yield from _body(explanation)
    if explanation.shadow is not None:
        yield f"  the shadow {_policy(explanation.shadow)} differs in {', '.join(explanation.differs)}"
        yield from (f"  {line}" for line in _body(explanation.shadow))


def differences(explanations: Iterable[Explanation]) -> Iterator[str]:
    """Both answers of each decision side by side, then what led to them."""
    for index, explanation in enumerate(explanations):
        if index:
            yield ""
        other = explanation.shadow
        yield f"{_when(explanation)}  {explanation.question}  differs in {', '.join(explanation.differs)}"
        if other is not None:
            rows = [
                (f"  {explanation.policy}", _rules(explanation), explanation.answer),
                (f"  {other.policy} (shadow)", _rules(other), other.answer),
            ]
            yield from table(rows)


def _rules(explanation: Explanation) -> str:
    matched = [rule.rule for point in explanation.points for rule in point.rules if rule.outcome == "matched"]
    return ", ".join(matched) or "-"


def _when(explanation: Explanation) -> str:
    first = f"{explanation.at_ns / 1e9:.6f}s"
    if explanation.count == 1:
        return first
    return f"{first} to {explanation.last_at_ns / 1e9:.6f}s ({explanation.count} times)"


def _policy(explanation: Explanation) -> str:
    return f"{explanation.policy or 'a policy that is gone'} ({explanation.sha[:12]})"


def _body(explanation: Explanation) -> Iterator[str]:
    yield f"  {explanation.answer}"
    for point in explanation.points:
        yield from _point(point)
    yield from _sorted(explanation.sorted)
    yield from (f"  rule error: {error}" for error in explanation.errors)
    if explanation.note:
        yield f"  ({explanation.note})"


def _point(point: AskedPoint) -> Iterator[str]:
    for rule in point.rules:
        yield from _rule(rule)


def _rule(rule: TriedRule) -> Iterator[str]:
    condition = f"when {rule.when}" if rule.when else "always"
    place = f"  [{rule.place}]" if rule.place else ""
    yield f"  {MARKS.get(rule.outcome, '  ')} {rule.rule}  {rule.outcome}: {condition}{place}"
    if rule.outcome == "matched" and rule.then:
        yield f"       then {rule.then}"
    if rule.why:
        yield f"       {rule.why}"
    if rule.values:
        yield f"       {_values(rule.values)}"


def _values(values: Iterable[ShownValue]) -> str:
    return ", ".join(f"{value.name} = {value.value}" for value in values)


def _sorted(ranked: Sequence[SortedRequest]) -> Iterator[str]:
    for one in ranked:
        extras = [f"class {one.class_name}"] if one.class_name else []
        extras += [f"got {one.service}"] if one.service else []
        extras += ["waited too long: goes first"] if one.overdue else []
        details = ", ".join([_values(one.keys), *extras])
        yield f"     {one.place}. {_cut(one.request)}  {details}".rstrip()
