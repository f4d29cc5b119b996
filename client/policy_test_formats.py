"""Results of `muxk test` for machines: JSON, and JUnit's XML, which continuous integration shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from muxk.actors.policy_tests import Failure
from muxk.client.policy_test_files import Collection
from muxk.client.test_report import Result, RuleUse, failure_text, headline
from muxk.policies.problems import PolicyError

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_json(
    results: Sequence[Result], collection: Collection, uses: Sequence[RuleUse] | None, seconds: float
) -> dict[str, Any]:
    """Everything as plain data. Only keys `seconds` hold real time."""
    passed = sum(result.outcome.passed for result in results)
    document: dict[str, Any] = {
        "tests": [_result(result) for result in results],
        "errors": [_problem(problem) for error in collection.errors for problem in error.problems],
        "summary": {
            "passed": passed,
            "failed": len(results) - passed,
            "errors": len(collection.errors),
            "deselected": collection.deselected,
            "not_run": len(collection.tests) - len(results),
            "seconds": round(seconds, 3),
        },
    }
    if uses is not None:
        document["rules"] = [
            {"policy": use.policy, "fired": list(use.fired), "never_fired": list(use.idle)} for use in uses
        ]
    return document


def _result(result: Result) -> dict[str, Any]:
    test, outcome = result.outcome.test, result.outcome
    return {
        "id": result.collected.id,
        "file": result.collected.file,
        "name": test.name,
        "policy": test.choice.label,
        "outcome": "passed" if outcome.passed else "failed",
        "requests": outcome.requests,
        "virtual_seconds": outcome.ended_ns / 1e9,
        "failures": [_failure(failure) for failure in outcome.failures],
        "warnings": list(outcome.warnings),
        "seconds": round(result.seconds, 3),
    }


def _failure(failure: Failure) -> dict[str, Any]:
    return {
        "file": failure.file,
        "line": failure.line,
        "column": failure.column,
        "expected": failure.text,
        "about": failure.about,
        "reason": failure.reason,
        "values": dict(failure.values),
        "worst": [line.strip() for line in failure.worst],
        "because": failure.because,
    }


def _problem(problem: Any) -> dict[str, Any]:
    return {
        "file": problem.file,
        "line": problem.line,
        "column": problem.column,
        "message": problem.message,
        "hint": problem.hint,
    }


def write_junit(path: Path, results: Sequence[Result], collection: Collection, seconds: float) -> None:
    """One suite with a case a test, and an error for each file that is wrong. Raises OSError."""
    failed = sum(not result.outcome.passed for result in results)
    counts = {
        "tests": str(len(results) + len(collection.errors)),
        "failures": str(failed),
        "errors": str(len(collection.errors)),
        "time": f"{seconds:.3f}",
    }
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", {"name": "muxk test", **counts})
    for error in collection.errors:
        _error_case(suite, error)
    for result in results:
        _case(suite, result)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _error_case(suite: ElementTree.Element, error: PolicyError) -> None:
    first = error.problems[0]
    case = ElementTree.SubElement(suite, "testcase", classname=_xml(first.file), name="reading", time="0.000")
    element = ElementTree.SubElement(case, "error", message=_xml(first.message))
    element.text = _xml(str(error))


def _case(suite: ElementTree.Element, result: Result) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_xml(result.collected.file),
        name=_xml(result.collected.test.name),
        time=f"{result.seconds:.3f}",
    )
    if not result.outcome.passed:
        failures = result.outcome.failures
        element = ElementTree.SubElement(case, "failure", message=_xml(headline(failures[0])))
        element.text = _xml("\n\n".join(failure_text(failure) for failure in failures))
    if result.outcome.warnings:
        ElementTree.SubElement(case, "system-err").text = _xml("\n".join(result.outcome.warnings))


def _xml(text: str) -> str:
    """Without the characters that no XML may hold."""
    return _NOT_XML.sub("?", text)
