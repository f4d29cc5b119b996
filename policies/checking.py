"""Everything that can be said of a file of policies and tests: its errors, warnings and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from muxk.policies.analysis import analyse
from muxk.policies.engine import CompiledPolicy, compile_policy
from muxk.policies.migrations import current
from muxk.policies.policy_choice import split_documents
from muxk.policies.policy_test import KIND as TEST_KIND
from muxk.policies.policy_test import POLICY_KIND, read_tests
from muxk.policies.problems import Mark, PolicyError, Problem, Report, Severity, Source


@dataclass(frozen=True, slots=True)
class CheckedPolicy:
    """What was found out about one policy."""

    policy: CompiledPolicy | None
    """None when it has errors."""
    problems: tuple[Problem, ...]
    """In file order."""


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """What was found out about one file."""

    name: str
    policies: tuple[CompiledPolicy, ...]
    """Those without errors."""
    tests: tuple[str, ...]
    """Names of its tests; none when one has errors."""
    problems: tuple[Problem, ...]
    in_python: bool = False
    """It is no file, but a policy in Python that another package brings."""

    def count(self, severity: Severity) -> int:
        """Problems of a severity."""
        return sum(problem.severity is severity for problem in self.problems)


def check_policy(
    text: str, filename: str = "<policy>", settings: Mapping[str, str] | None = None
) -> CheckedPolicy:
    """Compile the YAML text of a policy and look for what is odd about it.

    Args:
        filename: for places only.
        settings: values of the policy's params, as `--set` gives them.
    """
    report = Report()
    current(text, filename, report)
    try:
        policy = compile_policy(text, filename, settings)
    except PolicyError as error:
        return CheckedPolicy(None, _in_order([*report.problems, *error.problems]))
    analyse(policy, report)
    return CheckedPolicy(policy, report.problems)


def check_file(
    text: str, name: str, settings: Mapping[str, str] | None = None, directory: Path | None = None
) -> CheckedFile:
    """Check every document of a file.

    Args:
        directory: where paths of policies begin that its tests name.
    """
    report = Report()
    documents = split_documents(text, name, report)
    kinds = [document.kind for document in documents]
    if TEST_KIND not in kinds and len(documents) == 1 and not report:
        checked = check_policy(text, name, settings)
        found = () if checked.policy is None else (checked.policy,)
        return CheckedFile(name, found, (), checked.problems)
    if not documents and not report:
        report.add(Mark(Source(name, text), 1, 1), "the file is empty", code="syntax")
    problems = list(report.problems)
    tests: tuple[str, ...] = ()
    if any(kind != POLICY_KIND for kind in kinds):
        try:
            tests = tuple(test.name for test in read_tests(text, name, directory))
        except PolicyError as error:
            problems += error.problems
    policies = []
    for document in documents:
        if document.kind == POLICY_KIND:
            checked = check_policy(document.text, name, settings)
            problems += checked.problems
            policies += [] if checked.policy is None else [checked.policy]
    return CheckedFile(name, tuple(policies), tests, _in_order(problems))


def _in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Each once, in file order."""
    found = dict.fromkeys(problems)
    return tuple(sorted(found, key=lambda problem: (problem.file, problem.line, problem.column)))
