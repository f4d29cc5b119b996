"""From the text of a policy to a `CompiledPolicy` that answers the kernel's questions.

A compiled policy is immutable and pure. An answer never raises: a rule that fails is told in the answer's
`errors`, and the point's built-in default answers (or the next rule, with `on_error: next`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from muxk.kernel.placing import PlaceAnswer, PlaceView
from muxk.kernel.policy import DEFAULT_GUARD
from muxk.kernel.view import (
    AdmitAnswer,
    AdmitView,
    ClassAnswer,
    Decision,
    FormAnswer,
    FormView,
    Limits,
    OrderAnswer,
    RequestView,
    RetainAnswer,
    VictimAnswer,
    View,
)
from muxk.policies.answers import POINTS, Context, Verdict
from muxk.policies.classes import Classes
from muxk.policies.loader import MAX_CHARACTERS, load
from muxk.policies.marks import Node, plain
from muxk.policies.migrations import current
from muxk.policies.place_section import PlaceSection, read_place
from muxk.policies.placing import Placing, by_default, place_mentions
from muxk.policies.points import CLASSES, compile_points, mentions, params_in_force, quoted_in
from muxk.policies.problems import PolicyError, Problem, Report, did_you_mean
from muxk.policies.rules import OnError as OnError
from muxk.policies.rules import Point as Point
from muxk.policies.rules import Rule as Rule
from muxk.policies.schema import PolicySource, read_policy
from muxk.policies.scopes import DecideScope, KnownLayers, RequestScope, SortScope
from muxk.policies.shares import with_classes
from muxk.policies.shipped_files import DEFAULTS, shipped_text
from muxk.policies.shipped_files import shipped_policies as shipped_policies
from muxk.policies.steady import Steady
from muxk.policies.units import TtftSlo

_PRIORITIES = frozenset({"request.priority", "head.priority"})
_DEADLINES = frozenset(
    f"{who}.{what}"
    for who in ("request", "head", "running", "parked", "candidate")
    for what in ("deadline", "slack")
)


@dataclass(frozen=True)
class CompiledPolicy:
    """A policy; implements `muxk.kernel.policy.Policy`."""

    name: str
    sha: str
    limits: Limits
    tbt_slo_ns: int
    ttft: TtftSlo
    points: Mapping[str, Point]
    """By name, and `classes`."""
    class_rows: Classes
    """What its classes are owed."""
    version: str = ""
    description: str = ""
    reads_priority: bool = False
    """Whether any rule that can be reached looks at the priority of a request."""
    reads_deadline: bool = False
    """The same of a deadline."""
    guard: str = DEFAULT_GUARD
    """Of decode estimates, by name."""
    known_classes: tuple[str, ...] = ()
    """What clients can name as the class of a request: conditions of its classes ask for these."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Values of its params in force, by name."""
    source: PolicySource | None = field(default=None, repr=False, compare=False)
    """As it was read."""
    placing: Placing | None = field(default=None, repr=False, compare=False)
    """What it says of several devices, if anything."""
    warnings: tuple[Problem, ...] = field(default=(), compare=False)
    """What was noted while it was read, such as an earlier version of the language."""
    _steady: Steady = field(init=False, repr=False, compare=False)
    _layers: KnownLayers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert set(self.points) == {*POINTS, CLASSES}, "defaults.yaml answers every point"
        # What spares work for equal answers; a frozen dataclass is told of it so.
        object.__setattr__(self, "_steady", Steady(self.points["split"].rules))
        object.__setattr__(self, "_layers", KnownLayers())

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of its classes, by rank."""
        return self.class_rows.names

    def classify(self, request: RequestView) -> ClassAnswer:
        """The class of a request: the first whose condition holds."""
        errors: list[str] = []
        label, rank = self.points[CLASSES].ask(RequestScope(request, 0), errors)
        chosen = self.class_rows.rows[rank].of(request.prompt_tokens)
        return ClassAnswer(chosen, label, tuple(errors))

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
        errors: list[str] = []
        label, order = self.points["order"].ask(SortScope(requests, now_ns), errors)
        if self.class_rows.has_shares or self.class_rows.has_max_wait:
            order = with_classes(order, requests, self.class_rows, now_ns, service)
        return OrderAnswer(order, label, tuple(errors))

    def form(self, view: FormView) -> FormAnswer:
        """How large the next prefill batch may be."""
        errors: list[str] = []
        label, (requests, tokens) = self.points["form"].ask(view, errors)
        return FormAnswer(requests, tokens, label, tuple(errors))

    def decide(self, view: View) -> Decision:
        """Split, then preemption where a batch runs and another waits, then the slice of what runs next."""
        again = self._steady.again(view)
        if again is not None:
            return again
        errors: list[str] = []
        scope = DecideScope(view, self._layers)
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
        decision = Decision(split, layers, preempt, tuple(rules), tuple(errors), tokens, fuse)
        if scope.batch is None:
            self._steady.remember(view, decision)
        return decision

    def victim(self, requests: Sequence[RequestView], now_ns: int) -> VictimAnswer:
        """Who to recompute later; the latest to arrive when a sort key fails. `requests` holds one."""
        assert requests, "somebody holds the pages"
        errors: list[str] = []
        label, order = self.points["victim"].ask(SortScope(requests, now_ns), errors)
        return VictimAnswer(order[0], label, tuple(errors))

    def retain(self, request: RequestView) -> RetainAnswer:
        """Keep the pages of a finished request in the prefix index."""
        errors: list[str] = []
        label, keep = self.points["retain"].ask(RequestScope(request, 0), errors)
        return RetainAnswer(keep, label, tuple(errors))

    @property
    def places(self) -> bool:
        """Whether it has a section `place`."""
        return self.placing is not None

    @property
    def devices_min(self) -> int:
        """Devices that its pools or its plan need."""
        return 1 if self.placing is None else self.placing.devices_min

    @property
    def group_devices_max(self) -> int:
        """Devices of the largest group that its plan forms."""
        return 1 if self.placing is None else self.placing.group_devices_max

    @property
    def fetches_prefix(self) -> bool:
        """Whether a prefill first fetches what of its prefix lies where the request will decode."""
        return self.placing is not None and self.placing.fetches_prefix

    def place(self, view: PlaceView) -> PlaceAnswer:
        """Where requests go; to the device with the fewest requests when it does not say."""
        return by_default(view, view.queue) if self.placing is None else self.placing.place(view)


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
    root = load(current(text, filename, report), filename, report)
    source = read_policy(root, settings or {}, _shipped_root, report) if root is not None else None
    points = {} if source is None else compile_points(source, _context(source, report))
    place = None if source is None else read_place(source.spec.get("place"), _context(source, report))
    report.raise_any()
    assert source is not None, "a policy that can not be read has a problem"
    placing = None if place is None else place.placing
    return CompiledPolicy(
        name=source.name,
        sha=_sha(source, place),
        limits=source.limits,
        tbt_slo_ns=source.tbt_ns,
        ttft=source.ttft,
        points=points,
        class_rows=source.classes,
        version=source.version,
        description=source.description,
        guard=source.guard,
        reads_priority=mentions(points, _PRIORITIES) or place_mentions(placing, _PRIORITIES),
        reads_deadline=mentions(points, _DEADLINES) or place_mentions(placing, _DEADLINES),
        known_classes=quoted_in(points[CLASSES]),
        params=params_in_force(source),
        source=source,
        placing=placing,
        warnings=report.problems,
    )


def _context(source: PolicySource, report: Report) -> Context:
    return Context(report, source.constants, source.classes, source.variables)


def load_policy(path_or_name: str | Path, settings: Mapping[str, str] | None = None) -> CompiledPolicy:
    """Compile a shipped policy by name (`muxwise`), or a file by path.

    Raises:
        PolicyError: the file can not be read, or has mistakes.
    """
    name = str(path_or_name)
    if name in shipped_policies():
        return compile_policy(shipped_text(name), f"{name}.yaml", settings)
    return compile_policy(_read(Path(path_or_name)), name, settings)


@cache
def _shipped_root(name: str) -> Node | None:
    """What a shipped file says; kept, as every policy extends one and nodes never change."""
    if name != DEFAULTS and name not in shipped_policies():
        return None
    return load(shipped_text(name), f"{name}.yaml", Report())


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


def _sha(source: PolicySource, place: PlaceSection | None) -> str:
    """Of what the policy says, not of how it is laid out: comments and key order do not count."""
    content = {
        "name": source.name,
        "version": source.version,
        "spec": plain(source.spec),
        "settings": dict(source.settings),
    }
    if place is not None and place.origin:
        content["plan"] = place.origin
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
