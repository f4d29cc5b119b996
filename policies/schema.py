"""The document of a policy: its sections, read into a `PolicySource` with every mistake reported.

What a policy inherits is merged into its sections before they are read, see `inheritance.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from muxk.kernel.view import Limits
from muxk.policies.answers import POINTS, Context
from muxk.policies.classes import Classes
from muxk.policies.inheritance import ALWAYS, REST, Base, is_inherited, is_rest, with_bases
from muxk.policies.loader import fields
from muxk.policies.marks import MappingNode, Node, Scalar, SequenceNode, describe
from muxk.policies.params import read_params
from muxk.policies.problems import Mark, Report, did_you_mean
from muxk.policies.rules import OnError
from muxk.policies.sections import (
    ClassSource,
    check_variables,
    identifier,
    read_classes,
    read_estimator,
    read_limits,
    read_slo,
    read_variables,
)
from muxk.policies.units import TtftSlo, Type
from muxk.policies.vocabulary import Constant

API_VERSION = "muxk/v1beta1"
"""Earlier versions are converted before they are read, see `migrations.py`."""
KIND = "SchedulingPolicy"
MAX_RULES = 200
MAX_VERSION_CHARACTERS = 64

DOCUMENT: Mapping[str, str] = {"apiVersion": "", "kind": "", "metadata": "", "spec": ""}
METADATA: Mapping[str, str] = {"name": "", "version": "", "description": ""}
SPEC: Mapping[str, str] = {
    "extends": "",
    "slo": "",
    "params": "",
    "variables": "",
    "classes": "",
    "limits": "",
    "estimator": "",
    "on_error": "",
    **dict.fromkeys(POINTS, ""),
    "place": "",
}
RULE: Mapping[str, str] = {"name": "", "when": "", "then": ""}


@dataclass(frozen=True, slots=True)
class RuleSource:
    """One rule as written; `when` is None for a rule that always matches."""

    name: str
    when: Scalar | None
    then: Node | None
    mark: Mark
    broken: bool = False
    """It has mistakes that are reported: nothing follows from a `when` that is not there."""


Rules = tuple[RuleSource, ...]


@dataclass(frozen=True, slots=True)
class BaseSource:
    """What a policy below says of the points that a policy restates, for `on_error: base`."""

    on_error: OnError
    points: Mapping[str, Rules]


@dataclass(frozen=True, slots=True)
class PolicySource:
    """A policy that was read and whose structure is right; its rules are not compiled yet."""

    name: str
    version: str
    description: str
    spec: MappingNode
    """All sections, those of the bases included."""
    settings: tuple[tuple[str, str], ...]
    """Params in force, by name."""
    constants: Mapping[str, Constant]
    variables: Mapping[str, Scalar]
    tbt_ns: int
    ttft: TtftSlo
    classes: Classes
    class_sources: tuple[ClassSource, ...]
    limits: Limits
    guard: str
    on_error: OnError
    points: Mapping[str, Rules]
    bases: tuple[BaseSource, ...]
    """From the policy that it extends down to the defaults; only where `on_error: base` asks them."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a policy says of itself."""

    name: str = ""
    version: str = ""
    description: str = ""


def read_policy(root: Node, settings: Mapping[str, str], base: Base, report: Report) -> PolicySource | None:
    """Read a document; None when it is too broken to go on. Problems are in the report either way."""
    document = fields(root, DOCUMENT, "a policy file", report)
    if not isinstance(root, MappingNode):
        return None
    _fixed(document, "apiVersion", API_VERSION, root, report)
    _fixed(document, "kind", KIND, root, report)
    metadata = _metadata(document.get("metadata"), root, report)
    spec = document.get("spec")
    if not isinstance(spec, MappingNode):
        mark = spec.mark if spec is not None else root.mark
        report.add(mark, "a policy needs a 'spec' mapping", "its sections are slo, split, slice, ...")
        return None
    return _spec(metadata, with_bases(spec, base, report), settings, report)


def _fixed(document: dict[str, Node], key: str, wanted: str, root: Node, report: Report) -> None:
    node = document.get(key)
    if node is None:
        report.add(root.mark, f"'{key}' is missing", f"write {key}: {wanted}", "missing-key")
    elif not isinstance(node, Scalar) or node.text != wanted:
        hint = did_you_mean(node.text, [wanted]) if isinstance(node, Scalar) else ""
        report.add(node.mark, f"{key} must be {wanted}, not {describe(node)}", hint)


def _metadata(node: Node | None, root: Node, report: Report) -> Metadata:
    if node is None:
        report.add(root.mark, "'metadata' is missing", "write metadata: {name: my-policy}", "missing-key")
        return Metadata()
    found = fields(node, METADATA, "metadata", report)
    name = found.get("name")
    if name is None:
        report.add(node.mark, "metadata needs a 'name'", code="missing-key")
    return Metadata(
        identifier(name, "a policy's name", report),
        _version(found.get("version"), report),
        _text(found.get("description"), "a description", report),
    )


def _text(node: Node | None, what: str, report: Report) -> str:
    if isinstance(node, Scalar):
        return node.text
    if node is not None:
        report.add(node.mark, f"{what} is a text")
    return ""


def _version(node: Node | None, report: Report) -> str:
    text = _text(node, "a version", report)
    if node is not None and (len(text) > MAX_VERSION_CHARACTERS or not text.isprintable()):
        report.add(node.mark, f"a version is a text of at most {MAX_VERSION_CHARACTERS} characters")
        return ""
    return text


def _spec(
    metadata: Metadata, specs: list[MappingNode], settings: Mapping[str, str], report: Report
) -> PolicySource:
    spec = specs[0]
    found = fields(spec, SPEC, "spec", report)
    params = read_params(found.get("params"), settings, report)
    constants = {
        f"params.{param.name}": Constant(param.type, param.value, param.description) for param in params
    }
    variables = read_variables(found.get("variables"), report)
    tbt_ns, ttft = read_slo(found.get("slo"), Context(report, constants, variables=variables))
    constants["slo.tbt"] = Constant(Type.DURATION, tbt_ns, "TBT SLO of the policy")
    context = Context(report, constants, variables=variables)
    check_variables(context)
    classes, class_sources = read_classes(found.get("classes"), (tbt_ns, ttft), context)
    on_error = _on_error(found.get("on_error"), context)
    return PolicySource(
        name=metadata.name,
        version=metadata.version,
        description=metadata.description,
        spec=spec,
        settings=tuple((param.name, repr(param.value)) for param in params),
        constants=constants,
        variables=variables,
        tbt_ns=tbt_ns,
        ttft=ttft,
        classes=classes,
        class_sources=class_sources,
        limits=read_limits(found.get("limits"), context),
        guard=read_estimator(found.get("estimator"), context),
        on_error=on_error,
        points={point: _rules(found[point], point, report) for point in POINTS if point in found},
        bases=_bases(specs, on_error, context),
    )


def _bases(specs: list[MappingNode], on_error: OnError, context: Context) -> tuple[BaseSource, ...]:
    """What the policies below say, as far as `on_error: base` goes down."""
    bases: list[BaseSource] = []
    for above, below in pairwise(specs):
        if on_error is not OnError.BASE:
            break
        on_error = _on_error(below.get("on_error"), context)
        restated = {point: below.get(point) for point in POINTS if below.get(point) is not above.get(point)}
        points = {
            point: _rules(node, point, context.report) for point, node in restated.items() if node is not None
        }
        bases.append(BaseSource(on_error, points))
    return tuple(bases)


def _on_error(node: Node | None, context: Context) -> OnError:
    if node is None:
        return OnError.DEFAULT
    return OnError(context.word(node, tuple(OnError), "on_error") or OnError.DEFAULT)


def _rules(node: Node, point: str, report: Report) -> tuple[RuleSource, ...]:
    """Rules of a point; what is no list is the answer of its only rule."""
    if not isinstance(node, SequenceNode):
        return (RuleSource(ALWAYS, None, node, node.mark),)
    if len(node.items) > MAX_RULES:
        report.add(node.mark, f"{point} has more than {MAX_RULES} rules")
        return ()
    rules = tuple(_rule(item, point, report) for item in node.items)
    _check_names(node, point, rules, report)
    _check_order(node, point, rules, report)
    return rules


def _rule(node: Node, point: str, report: Report) -> RuleSource:
    if is_rest(node):
        hint = "its rules always answer; write yours above it"
        report.add(
            node.mark, f"'{REST}', the rules of the extended policy, must be the last of {point}", hint
        )
        return RuleSource("", None, None, node.mark, broken=True)
    found = fields(node, RULE, f"a rule of {point}", report)
    if not isinstance(node, MappingNode):
        return RuleSource("", None, None, node.mark, broken=True)
    for key in ("name", "then"):
        if key not in found:
            report.add(node.mark, f"a rule of {point} needs '{key}'", code="missing-key")
    when = found.get("when")
    if when is not None and not isinstance(when, Scalar):
        hint = "put quotes around the expression"
        report.add(when.mark, f"'when' must be an expression, not {describe(when)}", hint)
    broken = "then" not in found or len(found) < len(node.entries) or not isinstance(when, Scalar | None)
    condition = when if isinstance(when, Scalar) and when.text.strip() not in ("true", "True") else None
    name = identifier(found.get("name"), "a rule's name", report)
    return RuleSource(name, condition, found.get("then"), node.mark, broken)


def _check_names(node: SequenceNode, point: str, rules: tuple[RuleSource, ...], report: Report) -> None:
    marks: dict[str, Mark] = {}
    for item, rule in zip(node.items, rules, strict=True):
        other = marks.get(rule.name)
        if other is not None and is_inherited(item.mark, node):
            hint = f"the extended policy has one on line {item.mark.line} of {item.mark.source.filename}"
            report.add(other, f"{point} has two rules named '{rule.name}'", hint, "duplicate-name")
        elif other is not None:
            report.add(
                item.mark, f"{point} has two rules named '{rule.name}'", f"the other is on line {other.line}"
            )
        elif rule.name:
            marks[rule.name] = item.mark


def _check_order(node: SequenceNode, point: str, rules: tuple[RuleSource, ...], report: Report) -> None:
    """The last rule always matches, and no other does."""
    always: RuleSource | None = None
    for item, rule in zip(node.items, rules, strict=True):
        if always is not None:
            which = f"rule '{always.name}'" if always.name else f"the rule on line {always.mark.line}"
            hint = f"{which} before it always matches; give that one a 'when'"
            inherited = is_inherited(item.mark, node)
            what = f"'{REST}' at the end" if inherited else "this rule"
            mark = always.mark if inherited else item.mark
            report.add(mark, f"{what} of {point} can never be reached", hint, "unreachable-rule")
            return
        if rule.when is None and not rule.broken:
            always = rule
    if always is None and not (rules and rules[-1].broken):
        place = node.items[-1].mark if rules else node.mark
        hint = "end with a rule that has no 'when', such as - {name: otherwise, then: ...}, or with - base"
        report.add(
            place, f"the last rule of {point} must always match: it is the catch-all", hint, "no-catch-all"
        )
