"""Runs a PolicyTest in virtual time and says which of its expectations did not hold, and why.

An outcome depends on the test alone: no clock, no machine.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muxk.actors.offenders import offenders
from muxk.actors.simulation import DeviceSetup, PlannedRequest, PlannedSwap, Simulation
from muxk.kernel.policy import PolicyText
from muxk.kernel.record_frames import NotARecording
from muxk.policies.expectations import PLACES, RequestsScope, RuleScope, Scope, place_of
from muxk.policies.policy_choice import PolicyChoice
from muxk.policies.policy_test_spec import Arrivals, Expectation, PolicyTest
from muxk.policies.problems import RuleError
from muxk.policies.run_records import RunRecord
from muxk.policies.units import Type

ALPHABET = range(97, 123)
"""Tokens of made-up prompts: the lower-case letters."""
ERRORS_SHOWN = 5


@dataclass(frozen=True)
class Failure:
    """One expectation that did not hold, or a fault of the whole run."""

    text: str
    """The expectation as written; empty for a fault of the run."""
    file: str
    line: int
    column: int
    source_line: str
    reason: str
    """Why it has no value; empty when it is simply false."""
    values: tuple[tuple[str, str], ...] = ()
    """Every name in it with its value."""
    worst: tuple[str, ...] = ()
    """Lines about who is to blame."""
    because: str = ""
    about: str = ""
    """What the expectation is about, such as `for chat`; empty for all requests."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Outcome:
    """What a test came to."""

    test: PolicyTest
    failures: tuple[Failure, ...]
    warnings: tuple[str, ...]
    hits_of: Mapping[str, Counter[str]] = field(default_factory=dict)
    """Answers by `point/rule` of each policy, by its sha."""
    requests: int = 0
    ended_ns: int = 0

    @property
    def passed(self) -> bool:
        return not self.failures


def run_test(test: PolicyTest, record: Path | None = None) -> Outcome:
    """Run a test once, with its seed.

    Args:
        record: a file that decisions are appended to, for `muxk explain --record`. Raises NotARecording.
    """
    try:
        run = simulate(test, record)
    except NotARecording:
        raise
    except Exception as error:  # whatever a policy in Python does, the other tests run
        failure = _fault(test, f"the run broke: {type(error).__name__}: {error}")
        return Outcome(test, (failure,), ())
    return judge(test, run)


def judge(test: PolicyTest, run: RunRecord) -> Outcome:
    """What a test says of its run."""
    failures = [_fault(test, fault) for fault in run.faults]
    if not run.faults:
        found = (_check(test, expectation, run) for expectation in test.expectations)
        failures = [failure for failure in found if failure is not None]
    return Outcome(test, tuple(failures), _warnings(run), run.hits_of, len(run.requests), run.ended_ns)


def simulate(test: PolicyTest, record: Path | None = None) -> RunRecord:
    """The run of a test."""
    device = test.device
    setup = DeviceSetup(
        devices=device.devices,
        units=device.units,
        layers=device.layers,
        granularity=device.granularity,
        kv_tokens=device.kv_tokens,
        costs=device.costs,
        calibrate=device.calibrate,
    )
    choice = test.choice
    text = None if choice.source is None else PolicyText(choice.source, choice.filename, choice.settings)
    simulation = Simulation(
        choice.policy, setup, seed=test.seed, time_max_ns=test.timeout_ns, text=text, record=record
    )
    moments = {each.at_ns: None for each in test.expectations if each.at_ns is not None}
    return simulation.run(planned_requests(test), planned_swaps(test), tuple(moments))


def planned_requests(test: PolicyTest) -> list[PlannedRequest]:
    """All arrivals, request by request."""
    return [request for group in test.arrivals for request in _requests_of(group, test.seed)]


def planned_swaps(test: PolicyTest) -> list[PlannedSwap]:
    """The changes of the policy."""
    return [PlannedSwap(swap.at_ns, swap.choice.policy, swap.choice.source or "") for swap in test.swaps]


def _requests_of(group: Arrivals, seed: int) -> list[PlannedRequest]:
    """Lengths, times and tokens are drawn for each group by itself, so that groups do not disturb another."""
    dice = random.Random(f"{seed}/group/{group.name}")
    shared = tokens_of(f"{seed}/prefix/{group.prefix_of}", group.prefix_tokens)
    requests = []
    at_ns = group.at_ns
    for number in range(1, group.count + 1):
        name = f"{group.name}-{number}"
        own = tokens_of(f"{seed}/prompt/{name}", group.prompt.draw(dice))
        requests.append(
            PlannedRequest(
                name=name,
                group=group.name,
                at_ns=at_ns,
                prompt=shared + own,
                output=group.output.draw(dice),
                request_class=group.request_class,
                priority=group.priority,
                deadline_ns=group.deadline_ns,
                abort_after_ns=group.abort_after_ns,
            )
        )
        at_ns += group.every.draw(dice)
    return requests


def tokens_of(seed: str, count: int) -> list[int]:
    """Made-up tokens; fewer of the same seed are the first of more."""
    return random.Random(seed).choices(ALPHABET, k=count)


def _warnings(run: RunRecord) -> tuple[str, ...]:
    """What a user should know though no expectation says so."""
    warnings = [f"a rule failed: {error} ({count} times)" for error, count in sorted(run.errors.items())]
    warnings = warnings[:ERRORS_SHOWN]
    notes = dict.fromkeys(note for request in run.requests for note in request.notes)
    return (*warnings, *notes)


# --- expectations ---


def _check(test: PolicyTest, expectation: Expectation, run: RunRecord) -> Failure | None:
    """None when it holds."""
    scope = _scope(test, expectation, run)
    try:
        if isinstance(scope, RuleScope):
            _must_be_a_rule(test, scope.label)
        if expectation.expression(scope):
            return None
        reason = ""
    except RuleError as error:
        reason = str(error)
    mark = expectation.mark
    return Failure(
        text=expectation.text,
        file=mark.source.filename,
        line=mark.line,
        column=mark.column,
        source_line=mark.source.line(mark.line),
        reason=reason,
        values=_values(expectation, scope),
        worst=offenders(expectation, scope, run),
        because=expectation.because,
        about=_about(expectation),
    )


def _must_be_a_rule(test: PolicyTest, label: str) -> None:
    """That a rule which is not there was never used proves nothing."""
    choices: Sequence[PolicyChoice] = [test.choice, *(swap.choice for swap in test.swaps)]
    if all(choice.rules is not None and label not in choice.rules for choice in choices):
        raise RuleError(f"the policy {test.choice.label} has no rule '{label}'")


def _scope(test: PolicyTest, expectation: Expectation, run: RunRecord) -> Scope:
    if expectation.at_ns is not None:
        return run.moments[expectation.at_ns]
    if expectation.rule:
        return RuleScope(expectation.rule, run)
    groups, class_name = expectation.groups, expectation.class_name
    requests = [
        request
        for request in run.requests
        if (not groups or request.group in groups or request.name in groups)
        and (not class_name or request.class_name == class_name)
    ]
    return RequestsScope(run, requests, _who(expectation))


def _about(expectation: Expectation) -> str:
    if expectation.at_ns is not None:
        return f"at {show_time(expectation.at_ns)}"
    if expectation.rule:
        return f"of rule {expectation.rule}"
    groups = f"for {', '.join(expectation.groups)}" if expectation.groups else ""
    class_name = f"for class {expectation.class_name}" if expectation.class_name else ""
    return " and ".join(part for part in (groups, class_name) if part)


def _who(expectation: Expectation) -> str:
    groups = ", ".join(expectation.groups)
    of_groups = f" of {groups}" if groups else ""
    of_class = f" of class {expectation.class_name}" if expectation.class_name else ""
    return f"requests{of_groups}{of_class}"


def _values(expectation: Expectation, scope: Scope) -> tuple[tuple[str, str], ...]:
    """Names in the order in which they stand in the expression."""
    names = sorted(expectation.expression.names, key=expectation.text.find)
    return tuple((name, _value(name, scope)) for name in names)


def _value(name: str, scope: Scope) -> str:
    declared = PLACES[place_of(scope)][name]
    try:
        return show(declared.read(scope), declared.type)
    except RuleError:
        return "none"


def show(value: float | bool, kind: Type) -> str:
    """A value as a policy would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if kind is Type.DURATION:
        return show_time(value)
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def show_time(ns: float) -> str:
    """A duration in the unit in which it is easiest to read."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= scale:
            return f"{ns / scale:.4g}{unit}"
    return f"{ns:g}ns"


def _fault(test: PolicyTest, fault: str) -> Failure:
    mark = test.mark
    return Failure("", mark.source.filename, mark.line, mark.column, mark.source.line(mark.line), fault)
