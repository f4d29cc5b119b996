"""From the text of a policy to a `CompiledPolicy` that answers the kernel's questions.

A compiled policy is immutable and pure. An answer never raises: a rule that fails is told in the answer's
`errors`, and the point's built-in default answers (or the next rule, with `on_error: next`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

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
from muxk.policies.answers import BY_ARRIVAL, LATEST_FIRST, POINTS, Answer, Context, Keys, Verdict
from muxk.policies.closures import Run
from muxk.policies.loader import MAX_CHARACTERS, load
from muxk.policies.marks import Node, plain
from muxk.policies.names import DecideScope, RequestScope, SortScope
from muxk.policies.problems import PolicyError, Problem, Report, did_you_mean, explain
from muxk.policies.schema import DEFAULTS, PolicySource, RuleSource, read_policy
from muxk.policies.units import TtftSlo, Type

_PRIORITIES = frozenset({"request.priority", "head.priority"})
_DEADLINES = frozenset(
    f"{who}.{what}"
    for who in ("request", "head", "running", "parked", "candidate")
    for what in ("deadline", "slack")
)


@dataclass(frozen=True, slots=True)
class Rule:
    """A compiled rule; `when` is None for one that always matches."""

    label: str
    """`point/name`."""
    when: Run | None
    then: Answer
    names: frozenset[str]
    """Names of the decision point that its condition and its answer mention."""


@dataclass(frozen=True, slots=True)
class Point:
    """The compiled rules of a decision point."""

    name: str
    rules: tuple[Rule, ...]
    fallback: Answer
    skip_failing_rules: bool

    def ask(self, scope: Any, errors: list[str]) -> tuple[str, Any]:
        """The label of the rule that answers, and its answer; what went wrong is added to `errors`."""
        for rule in self.rules:
            try:
                if rule.when is None or rule.when(scope):
                    return rule.label, rule.then(scope)
            except Exception as error:  # a rule must never stop serving, whatever a view holds
                errors.append(f"{rule.label}: {explain(error)}")
                if not self.skip_failing_rules:
                    break
        return f"{self.name}/default", self.fallback(scope)


@dataclass(frozen=True)
class CompiledPolicy:
    """A policy; implements `muxk.kernel.policy.Policy`."""

    name: str
    sha: str
    limits: Limits
    tbt_slo_ns: int
    ttft: TtftSlo
    points: Mapping[str, Point]
    description: str = ""
    reads_priority: bool = False
    """Whether any rule that can be reached looks at the priority of a request."""
    reads_deadline: bool = False
    """The same of a deadline."""
    classes: tuple[str, ...] = ("default",)
    known_classes: tuple[str, ...] = ()
    """Classes that a client can name."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Values of its params in force, by name."""

    def __post_init__(self) -> None:
        assert set(self.points) == set(POINTS), "defaults.yaml answers every point"

    def classify(self, request: RequestView) -> ClassAnswer:
        """The class of a request."""
        ttft_ns = self.ttft.at(request.prompt_tokens)
        return ClassAnswer(RequestClass("default", 0, self.tbt_slo_ns, ttft_ns), "classes/default")

    def admit(self, view: AdmitView) -> AdmitAnswer:
        """Accept, refuse or shed a request."""
        errors: list[str] = []
        label, verdict = self.points["admit"].ask(view, errors)
        assert isinstance(verdict, Verdict), verdict
        return AdmitAnswer(verdict.action, verdict.reason, label, tuple(errors))

    def order(
        self, requests: Sequence[RequestView], now_ns: int, service: Mapping[str, float]
    ) -> OrderAnswer:
        """Indices of `requests`, first to be served first; by arrival when a sort key fails."""
        if not requests:
            return OrderAnswer((), "order/nobody")
        label, order, errors = self._sorted("order", requests, now_ns, BY_ARRIVAL)
        return OrderAnswer(order, label, errors)

    def form(self, view: FormView) -> FormAnswer:
        """How large the next prefill batch may be."""
        errors: list[str] = []
        label, (requests, tokens) = self.points["form"].ask(view, errors)
        return FormAnswer(requests, tokens, label, tuple(errors))

    def decide(self, view: View) -> Decision:
        """Split, then preemption where a batch runs and another waits, then the slice of what runs next."""
        errors: list[str] = []
        scope = DecideScope(view)
        label, split = self.points["split"].ask(scope, errors)
        scope.split = split
        rules = [label]
        preempt = False
        if view.running is not None and view.candidate is not None:
            label, preempt = self.points["preempt"].ask(scope, errors)
            rules.append(label)
            scope.batch = view.candidate if preempt else view.running
        layers, tokens, fuse = 1, None, False
        if split.prefill_units and scope.batch is not None:
            label, (layers, tokens, fuse) = self.points["slice"].ask(scope, errors)
            rules.append(label)
        return Decision(split, layers, preempt, tuple(rules), tuple(errors), tokens, fuse)

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        """Who to recompute later; the latest to arrive when a sort key fails. `requests` holds one."""
        assert requests, "somebody holds the pages"
        label, order, errors = self._sorted("victim", requests, now_ns, LATEST_FIRST)
        return VictimAnswer(order[0], label, errors)

    def retain(self, request: RequestView) -> RetainAnswer:
        """Keep the pages of a finished request in the prefix index."""
        errors: list[str] = []
        label, keep = self.points["retain"].ask(RequestScope(request, 0), errors)
        return RetainAnswer(keep, label, tuple(errors))

    def _sorted(
        self, point: str, requests: Sequence[RequestView], now_ns: int, fallback: Keys
    ) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
        errors: list[str] = []
        label, keys = self.points[point].ask(SortScope(len(requests), now_ns), errors)
        indices = range(len(requests))
        try:
            order = sorted(indices, key=keys.reader(requests, now_ns))
        except Exception as error:  # a failing sort key must not stop serving
            errors.append(f"{label}: {explain(error)}")
            order = sorted(indices, key=fallback.reader(requests, now_ns))
        return label, tuple(order), tuple(errors)


def compile_policy(
    text: str, filename: str = "<policy>", settings: Mapping[str, str] | None = None
) -> CompiledPolicy:
    """Compile the YAML text of a policy.

    Args:
        filename: for error places only.
        settings: values of the policy's params, as `--set` gives them.

    Raises:
        PolicyError: with every mistake that was found.
    """
    report = Report()
    root = load(text, filename, report)
    source = read_policy(root, settings or {}, _shipped_root, report) if root is not None else None
    points = _points(source, Context(report, source.constants)) if source is not None else {}
    report.raise_any()
    assert source is not None, "a policy that can not be read has a problem"
    return CompiledPolicy(
        name=source.name,
        sha=_sha(source),
        limits=source.limits,
        tbt_slo_ns=source.tbt_ns,
        ttft=source.ttft,
        points=points,
        description=source.description,
        reads_priority=_mentions(points, _PRIORITIES),
        reads_deadline=_mentions(points, _DEADLINES),
        params=_params(source),
    )


def load_policy(path_or_name: str | Path, settings: Mapping[str, str] | None = None) -> CompiledPolicy:
    """Compile a shipped policy by name (`muxwise`), or a file by path.

    Raises:
        PolicyError: the file can not be read, or has mistakes.
    """
    name = str(path_or_name)
    if name in shipped_policies():
        return compile_policy(_shipped_text(name), f"{name}.yaml", settings)
    return compile_policy(_read(Path(path_or_name)), name, settings)


def shipped_policies() -> tuple[str, ...]:
    """Names of the policies that come with muxk."""
    files = resources.files("muxk.policies").iterdir()
    names = sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
    return tuple(name for name in names if name != DEFAULTS and not name.endswith(".test"))


def _shipped_text(name: str) -> str:
    return resources.files("muxk.policies").joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def _shipped_root(name: str) -> Node | None:
    if name != DEFAULTS and name not in shipped_policies():
        return None
    return load(_shipped_text(name), f"{name}.yaml", Report())


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(4 * MAX_CHARACTERS).decode("utf-8")
    except OSError as error:
        message = f"can not be read: {error.strerror or error}"
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text: byte {error.start}"
    shipped = shipped_policies()
    hint = did_you_mean(str(path), shipped, f"shipped policies: {', '.join(shipped)}")
    raise PolicyError([Problem(str(path), 1, 1, message, hint, "")])


def _points(source: PolicySource, context: Context) -> dict[str, Point]:
    return {
        name: Point(
            name,
            _reachable([_rule(name, context, rule) for rule in rules]),
            POINTS[name].fallback,
            source.skip_failing_rules,
        )
        for name, rules in source.points.items()
    }


def _params(source: PolicySource) -> dict[str, Any]:
    prefix = "params."
    constants = source.constants.items()
    return {name.removeprefix(prefix): known.value for name, known in constants if name.startswith(prefix)}


def _mentions(points: Mapping[str, Point], names: frozenset[str]) -> bool:
    """Whether a rule that can be reached mentions one of the names."""
    return any(names & rule.names for point in points.values() for rule in point.rules)


def _rule(point: str, context: Context, rule: RuleSource) -> Rule | None:
    """A compiled rule, or None for one whose condition is false under these params, or wrong."""
    context = replace(context, names=set())
    when = context.expression(rule.when, Type.BOOL, point)
    then = POINTS[point].parse(rule.then, context) if rule.then is not None else None
    if then is None or (rule.when is not None and when is None):
        if rule.then is not None and not context.report:
            context.report.add(rule.then.mark, f"this is no answer of {point}")
        return None
    if when is None or when.constant is True:
        return Rule(f"{point}/{rule.name}", None, then, frozenset(context.names))
    if when.constant is False:
        return None
    return Rule(f"{point}/{rule.name}", when.run, then, frozenset(context.names))


def _reachable(rules: Sequence[Rule | None]) -> tuple[Rule, ...]:
    """Rules up to the first that always matches."""
    reached: list[Rule] = []
    for rule in rules:
        if rule is not None:
            reached.append(rule)
            if rule.when is None:
                break
    return tuple(reached)


def _sha(source: PolicySource) -> str:
    """Of what the policy says, not of how it is laid out: comments and key order do not count."""
    content = {"name": source.name, "spec": plain(source.spec), "settings": dict(source.settings)}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
