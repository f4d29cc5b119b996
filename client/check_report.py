"""What `muxk check` found, for people, for scripts, and as SARIF for CI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from muxk.policies.problems import Problem, Severity
from muxk.policies.shown import duration, show, size

if TYPE_CHECKING:
    from muxk.policies.checking import CheckedFile
    from muxk.policies.engine import CompiledPolicy

SHA_CHARS = 12
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def count(files: Sequence[CheckedFile]) -> str:
    """`2 errors, 1 warning` over all files."""
    counts = [(severity, _total(files, severity)) for severity in Severity]
    words = [f"{number} {severity}{'' if number == 1 else 's'}" for severity, number in counts if number]
    return ", ".join(words) or "no errors, no warnings"


def _total(files: Sequence[CheckedFile], severity: Severity) -> int:
    return sum(file.count(severity) for file in files)


# --- text ---


def summary(file: CheckedFile) -> str:
    """What a file without errors says; empty for one with errors."""
    if file.count(Severity.ERROR):
        return ""
    lines = [f"{file.name}: ok (a policy in Python)"] if file.in_python else []
    for policy in file.policies:
        version = f" {policy.version}" if policy.version else ""
        lines.append(f"{file.name}: ok ({policy.name}{version}, {policy.sha[:SHA_CHARS]})")
        lines += [f"    {label:<9} {text}" for label, text in _says(policy) if text]
    if file.tests:
        plural = "" if len(file.tests) == 1 else "s"
        lines.append(f"{file.name}: ok ({len(file.tests)} test{plural}: {', '.join(file.tests)})")
    return "\n".join(lines)


def _says(policy: CompiledPolicy) -> Iterator[tuple[str, str]]:
    """Rows of the summary of a policy."""
    limits = policy.limits
    yield "extends", _extends(policy)
    yield "answers", ", ".join(own_points(policy))
    yield "classes", "; ".join(_classes(policy))
    yield "params", ", ".join(f"{name} = {text}" for name, text in params(policy).items())
    yield (
        "limits",
        f"backlog {limits.backlog}, decode_ahead {limits.decode_ahead}, "
        f"decode_floor {duration(limits.decode_floor_ns)}, queue {limits.queue_bound}, "
        f"preemptions {limits.preemptions}, parked {size(limits.parked_bytes)}",
    )


def _extends(policy: CompiledPolicy) -> str:
    from muxk.policies.marks import Scalar

    node = policy.source.spec.get("extends") if policy.source is not None else None
    return node.text if isinstance(node, Scalar) else ""


def own_points(policy: CompiledPolicy) -> list[str]:
    """Points that the policy itself answers, with the number of its rules where there is more than one."""
    if policy.source is None:
        return []
    own = policy.source.spec.mark.source
    found = []
    for name in policy.source.points:
        rules = policy.points[name].written
        if rules and rules[0].mark.source is own:
            found.append(f"{name} ({len(rules)} rules)" if len(rules) > 1 else name)
    place = policy.source.spec.get("place")
    if place is not None and place.mark.source is own:
        least = f" (at least {policy.devices_min} devices)" if policy.devices_min > 1 else ""
        found.append(f"place{least}")
    return found


def _classes(policy: CompiledPolicy) -> Iterator[str]:
    """One text for each class, of a policy that has several."""
    rows = policy.class_rows.rows
    for row in rows if len(rows) > 1 else ():
        words = [f"tbt {duration(row.tbt_ns)}", f"ttft {_ttft(row.ttft.base_ns, row.ttft.per_token_ns)}"]
        words += [] if row.share is None else [f"share {row.share:g}"]
        words += [] if row.max_wait_ns is None else [f"max_wait {duration(row.max_wait_ns)}"]
        yield f"{row.name} ({', '.join(words)})"


def _ttft(base_ns: int, per_token_ns: int) -> str:
    terms = [duration(base_ns)] if base_ns else []
    return " + ".join([*terms, *([f"{duration(per_token_ns)}/token"] if per_token_ns else [])])


def params(policy: CompiledPolicy) -> dict[str, str]:
    """Values of the params in force, as a policy would write them."""
    if policy.source is None:
        return {}
    constants = policy.source.constants
    return {name: show(value, constants[f"params.{name}"].type, 0) for name, value in policy.params.items()}


# --- JSON ---


def as_data(files: Sequence[CheckedFile]) -> dict[str, Any]:
    """The object of `--json`."""
    return {
        "ok": not _total(files, Severity.ERROR),
        "errors": _total(files, Severity.ERROR),
        "warnings": _total(files, Severity.WARNING),
        "notes": _total(files, Severity.NOTE),
        "files": [_file(file) for file in files],
        "problems": [_problem(problem) for file in files for problem in file.problems],
    }


def _file(file: CheckedFile) -> dict[str, Any]:
    policies = [
        {
            "name": policy.name,
            "version": policy.version,
            "sha": policy.sha,
            "extends": _extends(policy) or None,
            "points": [text.partition(" ")[0] for text in own_points(policy)],
            "classes": list(policy.class_rows.names),
            "params": params(policy),
        }
        for policy in file.policies
    ]
    return {"file": file.name, "policies": policies, "tests": list(file.tests)}


def _problem(problem: Problem) -> dict[str, Any]:
    return {
        "file": problem.file,
        "line": problem.line,
        "column": problem.column,
        "severity": str(problem.severity),
        "code": problem.code,
        "message": problem.message,
        "hint": problem.hint,
    }


# --- SARIF ---


def as_sarif(files: Sequence[CheckedFile]) -> dict[str, Any]:
    """A SARIF 2.1.0 log with one run."""
    problems = [problem for file in files for problem in file.problems]
    codes = list(dict.fromkeys(problem.code for problem in problems))
    driver = {"name": "muxk check", "rules": [{"id": code} for code in codes]}
    return {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [_sarif_result(problem) for problem in problems]}],
    }


def _sarif_result(problem: Problem) -> dict[str, Any]:
    text = f"{problem.message}: {problem.hint}" if problem.hint else problem.message
    region = {"startLine": problem.line, "startColumn": problem.column}
    place = {"artifactLocation": {"uri": problem.file.replace("\\", "/")}, "region": region}
    return {
        "ruleId": problem.code,
        "level": str(problem.severity),
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
    }
