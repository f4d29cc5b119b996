"""Who is to blame when an expectation of a PolicyTest does not hold, in a few lines for people.

For a time: the request that has the longest, when, what the device did meanwhile, and which rules fired. For
a count: some of those that were counted. For a rule: what answered in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from muxk.policies.expectations import RequestsScope, RuleScope, Scope
from muxk.policies.policy_test_spec import Expectation
from muxk.policies.problems import RuleError
from muxk.policies.run_records import End, ItemRecord, RequestRecord, RunRecord

SHOWN = 3
"""Items, rules or requests that are named of many."""


def offenders(expectation: Expectation, scope: Scope, run: RunRecord) -> tuple[str, ...]:
    """Lines about what made an expectation fail; none where there is nothing to say."""
    if isinstance(scope, RuleScope):
        return _instead_of(scope)
    if not isinstance(scope, RequestsScope):
        return (f"the last decision before: {', '.join(scope.rules) or 'none'}",)
    roots = dict.fromkeys(_root(name) for name in sorted(expectation.expression.names))
    lines: list[str] = []
    for root in roots:
        tell = TELLERS.get(root)
        try:
            lines += tell(scope, run) if tell is not None else ()
        except RuleError:
            continue  # the reason says it already
    return tuple(lines)


def _root(name: str) -> str:
    return name.split(".")[0]


def _longest_gap(scope: RequestsScope, run: RunRecord) -> list[str]:
    gaps = scope.gaps
    if not gaps:
        return []
    worst = max(gaps, key=lambda gap: gap.length_ns)
    begins_ns = worst.ends_ns - worst.length_ns
    return [
        f"longest gap: {worst.request.name} waited {_ms(worst.length_ns)} for token {worst.index + 1}, "
        f"from {_at(begins_ns)} to {_at(worst.ends_ns)}",
        *_meanwhile(begins_ns, worst.ends_ns, run),
    ]


def _latest_first_token(scope: RequestsScope, run: RunRecord) -> list[str]:
    answered = [request for request in scope.requests if request.ttft_ns is not None]
    if not answered:
        return []
    worst = max(answered, key=lambda request: request.ttft_ns or 0)
    waited_ns = worst.ttft_ns or 0
    due = f", due after {_ms(worst.ttft_slo_ns)}" if worst.ttft_slo_ns is not None else ""
    return [
        f"latest first token: {worst.name} (prompt {worst.prompt_tokens:,}) waited {_ms(waited_ns)}{due}, "
        f"from {_at(worst.arrival_ns)} to {_at(worst.token_ns[0])}",
        *_meanwhile(worst.arrival_ns, worst.token_ns[0], run),
    ]


def _longest_latency(scope: RequestsScope, run: RunRecord) -> list[str]:
    finished = [request for request in scope.requests if request.end is End.FINISHED and request.token_ns]
    if not finished:
        return []
    worst = max(finished, key=lambda request: request.token_ns[-1] - request.arrival_ns)
    took_ns = worst.token_ns[-1] - worst.arrival_ns
    return [f"longest: {worst.name} took {_ms(took_ns)}, from {_at(worst.arrival_ns)}, {worst.tokens} tokens"]


def _ended(end: End) -> Callable[[RequestsScope, RunRecord], list[str]]:
    """Some of the requests that ended so, with what they were told."""

    def tell(scope: RequestsScope, run: RunRecord) -> list[str]:
        found = [request for request in scope.requests if request.end is end]
        return _some([_end_line(request) for request in found])

    return tell


def _not_finished(scope: RequestsScope, run: RunRecord) -> list[str]:
    others = [request for request in scope.requests if request.end is not End.FINISHED]
    return _some([_end_line(request) for request in others])


def _end_line(request: RequestRecord) -> str:
    return f"{request.name} {request.end} at {_at(request.end_ns)}: {request.message}".removesuffix(": ")


def _recomputed(scope: RequestsScope, run: RunRecord) -> list[str]:
    found = [request for request in scope.requests if request.recomputes]
    return _some([f"{request.name} lost its pages {_times(request.recomputes)}" for request in found])


def _errors(scope: RequestsScope, run: RunRecord) -> list[str]:
    return _some([f"{text} ({_times(count)})" for text, count in run.errors.most_common()])


def _phase(phase: str) -> Callable[[RequestsScope, RunRecord], list[str]]:
    """On which units a phase ran."""

    def tell(scope: RequestsScope, run: RunRecord) -> list[str]:
        items = [item for item in run.items if (item.decodes if phase == "decode" else item.prefills)]
        units = sorted(Counter(item.units for item in items).items())
        shown = ", ".join(f"{count:,} on {size}" for size, count in units[:8])
        return [f"{phase} items by units: {shown or 'none'}"]

    return tell


TELLERS: Mapping[str, Callable[[RequestsScope, RunRecord], list[str]]] = {
    "tbt": _longest_gap,
    "ttft": _latest_first_token,
    "latency": _longest_latency,
    "finished": _not_finished,
    "refused": _ended(End.REFUSED),
    "shed": _ended(End.SHED),
    "aborted": _ended(End.ABORTED),
    "failed": _ended(End.FAILED),
    "recomputes": _recomputed,
    "errors": _errors,
    "decode": _phase("decode"),
    "prefill": _phase("prefill"),
}


def _instead_of(scope: RuleScope) -> tuple[str, ...]:
    point = scope.label.split("/")[0] + "/"
    hits = {label: count for label, count in scope.run.hits.items() if label.startswith(point)}
    shown = ", ".join(f"{label} {_times(hits[label])}" for label in sorted(hits))
    return (f"answers of {point.removesuffix('/')}: {shown or 'none'}",)


def _meanwhile(begins_ns: int, ends_ns: int, run: RunRecord) -> list[str]:
    """What the device did in a time, longest first, and which rules fired."""
    groups = _by_requests(run.items_in(begins_ns, ends_ns))
    shown = [_item_line(group, begins_ns, ends_ns) for group in groups[:SHOWN]]
    rules = show_rules(run, begins_ns, ends_ns)
    return [*(f"  meanwhile {line}" for line in shown), f"  rules that fired: {rules}"]


def _by_requests(items: Sequence[ItemRecord]) -> list[list[ItemRecord]]:
    """Items of one batch together, those that took longest first."""
    groups: dict[tuple[str, tuple[str, ...]], list[ItemRecord]] = {}
    for item in items:
        groups.setdefault((item.phase, item.requests), []).append(item)
    return sorted(groups.values(), key=lambda group: -sum(item.ends_ns - item.begins_ns for item in group))


def _item_line(items: Sequence[ItemRecord], begins_ns: int, ends_ns: int) -> str:
    took_ns = sum(min(item.ends_ns, ends_ns) - max(item.begins_ns, begins_ns) for item in items)
    first = items[0]
    units = "/".join(str(size) for size in sorted({item.units for item in items}))
    units += " unit" if units == "1" else " units"
    if not first.prefills:
        steps = f"{len(items)} steps" if len(items) > 1 else "1 step"
        return f"decode: {_ms(took_ns)} in {steps} of up to {max(i.rows for i in items)} rows, on {units}"
    names = ", ".join(first.requests[:SHOWN]) + (", ..." if len(first.requests) > SHOWN else "")
    many = f"{len(items)} items" if len(items) > 1 else "1 item"
    tokens, layers = max(item.tokens for item in items), max(item.layers for item in items)
    return (
        f"{first.phase} of {names}: {_ms(took_ns)} in {many} of up to {tokens:,} tokens and {layers} layers, "
        f"on {units}"
    )


def show_rules(run: RunRecord, begins_ns: int, ends_ns: int) -> str:
    """Rules of the decisions in a time, the most frequent first."""
    fired: Counter[str] = Counter()
    for decision in run.decisions_in(begins_ns, ends_ns):
        fired.update(decision.rules)
    shown = [f"{label} {_times(count)}" for label, count in fired.most_common(2 * SHOWN)]
    return ", ".join(shown) or "none"


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - SHOWN
    return lines if more <= 0 else [*lines[:SHOWN], f"and {more} more"]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.1f}ms"


def _at(ns: int) -> str:
    return f"{ns / 1e9:.4f}s"
