"""What `muxk test` prints, in the manner of pytest: progress, failures with their reasons, a summary.

Everything but the time in the last line depends on the tests alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import typer
from muxk.actors.policy_tests import Failure, Outcome
from muxk.client.policy_test_files import Collected, Collection
from muxk.policies.problems import PolicyError, Problem

WIDTH = 80


@dataclass(frozen=True)
class Result:
    """A test that ran."""

    collected: Collected
    outcome: Outcome
    seconds: float
    """Real ones."""


@dataclass(frozen=True)
class RuleUse:
    """Which rules of a policy answered in any test that ran."""

    policy: str
    fired: tuple[str, ...]
    idle: tuple[str, ...]

    @property
    def share(self) -> int:
        """Percent that fired, rounded down."""
        return 100 * len(self.fired) // max(1, len(self.fired) + len(self.idle))


def rule_uses(results: Sequence[Result]) -> list[RuleUse]:
    """Of the rules that each policy states itself, whatever its params; without what it inherits."""
    own: dict[tuple[str, str], tuple[str, ...]] = {}
    hits: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        test = result.outcome.test
        for choice in (test.choice, *(swap.choice for swap in test.swaps)):
            key = (choice.label, choice.filename)
            if choice.own_rules:
                own.setdefault(key, choice.own_rules)
                found = result.outcome.hits_of.get(choice.policy.sha, Counter())
                hits.setdefault(key, Counter()).update(found)
    labels = [label for label, _ in own]
    return [
        RuleUse(
            label if labels.count(label) == 1 else f"{label} ({filename})",
            tuple(rule for rule in rules if hits[label, filename][rule]),
            tuple(rule for rule in rules if not hits[label, filename][rule]),
        )
        for (label, filename), rules in sorted(own.items())
    ]


class TextReport:
    """Writes as the tests run."""

    def __init__(self, write: Callable[[str], None], *, verbose: bool, width: int = WIDTH) -> None:
        self._write = write
        self._verbose = verbose
        self._width = width
        self._file = ""
        self._column = 0
        self._total = 0
        self._done = 0

    def begin(self, collection: Collection) -> None:
        self._total = len(collection.tests)
        self._line(rule("muxk test", self._width))
        files = len(collection.files)
        skipped = f" / {collection.deselected} deselected" if collection.deselected else ""
        errors = f" / {_many(len(collection.errors), 'error')}" if collection.errors else ""
        found = self._total + collection.deselected
        self._line(f"collected {_many(found, 'test')} in {_many(files, 'file')}{errors}{skipped}\n")

    def ran(self, result: Result) -> None:
        """One test is over."""
        self._done += 1
        passed = result.outcome.passed
        if self._verbose:
            word = typer.style("PASSED", fg="green") if passed else typer.style("FAILED", fg="red")
            self._with_percent(f"{result.collected.id} ", word, len("PASSED"))
            return
        if result.collected.file != self._file:
            self._end_file(self._done - 1)
            self._file = result.collected.file
            self._write(f"{self._file} ")
            self._column = len(self._file) + 1
        self._write(typer.style(".", fg="green") if passed else typer.style("F", fg="red"))
        self._column += 1

    def _end_file(self, done: int) -> None:
        if self._file:
            self._write(f"{self._percent(done):>{max(7, self._width - self._column)}}\n")

    def _with_percent(self, text: str, word: str, length: int) -> None:
        space = max(len(self._percent(0)) + 1, self._width - len(text) - length)
        self._line(f"{text}{word}{self._percent(self._done):>{space}}")

    def _percent(self, done: int) -> str:
        return f"[{100 * done // max(1, self._total):>3}%]"

    def end(
        self,
        results: Sequence[Result],
        collection: Collection,
        uses: Sequence[RuleUse] | None,
        seconds: float,
    ) -> None:
        """Everything after the last test."""
        self._end_file(self._done)
        self._errors(collection.errors)
        failed = [result for result in results if not result.outcome.passed]
        if failed:
            self._line("\n" + rule("FAILURES", self._width))
            for result in failed:
                self._failures(result)
        self._warnings(results)
        if uses is not None:
            self._rules(uses)
        if failed or collection.errors:
            self._line(rule("short test summary info", self._width))
            for error in collection.errors:
                first = error.problems[0]
                self._line(f"ERROR {first.file}:{first.line}:{first.column} - {first.message}")
            for result in failed:
                self._line(f"FAILED {result.collected.id} - {headline(result.outcome.failures[0])}")
        self._line(summary(results, collection, seconds, self._width))

    def _errors(self, errors: Sequence[PolicyError]) -> None:
        if errors:
            self._line("\n" + rule("ERRORS", self._width))
            for error in errors:
                self._line("\n\n".join(str(problem) for problem in error.problems))

    def _failures(self, result: Result) -> None:
        self._line(rule(result.collected.test.name, self._width, "_"))
        if result.collected.test.description:
            self._line(result.collected.test.description)
        self._line(f"policy {result.collected.test.choice.label}\n")
        self._line("\n\n".join(failure_text(failure) for failure in result.outcome.failures) + "\n")

    def _warnings(self, results: Sequence[Result]) -> None:
        found = [(result.collected.id, text) for result in results for text in result.outcome.warnings]
        if found:
            self._line("\n" + rule("warnings", self._width))
            for id_, text in found:
                self._line(f"{id_}: {text}")

    def _rules(self, uses: Sequence[RuleUse]) -> None:
        self._line("\n" + rule("rules", self._width, "-"))
        if not uses:
            self._line("no policy here has rules of its own: all are taken over from what it extends")
            return
        width = max([6, *(len(use.policy) for use in uses)])
        self._line(f"{'policy':<{width}}  rules  fired  never fired")
        for use in uses:
            total = len(use.fired) + len(use.idle)
            idle = ", ".join(use.idle) or "-"
            self._line(f"{use.policy:<{width}}  {total:>5}  {use.share:>4}%  {idle}")

    def _line(self, text: str) -> None:
        self._write(text + "\n")


def rule(text: str, width: int, character: str = "=") -> str:
    """A line with a text in the middle of it."""
    return f" {text} ".center(width, character)


def expected(failure: Failure) -> str:
    """The expectation and what it is about."""
    return f"{failure.text} {failure.about}".strip()


def headline(failure: Failure) -> str:
    """A failure on one line."""
    if not failure.text:
        return failure.reason
    shown = ", ".join(f"{name} = {value}" for name, value in failure.values)
    return f"{expected(failure)} ({failure.reason or shown})"


def failure_text(failure: Failure) -> str:
    """A failure with its place, all values, and who is to blame."""
    message = f"expected {expected(failure)}" if failure.text else failure.reason
    place = Problem(failure.file, failure.line, failure.column, message, "", failure.source_line)
    lines = [str(place)]
    if failure.text and failure.reason:
        lines.append(f"      {failure.reason}")
    lines += [f"      {name} = {value}" for name, value in failure.values]
    lines += [f"      {line}" for line in failure.worst]
    if failure.because:
        lines.append(f"      because: {failure.because}")
    return "\n".join(lines)


def summary(results: Sequence[Result], collection: Collection, seconds: float, width: int) -> str:
    """The last line."""
    passed = sum(result.outcome.passed for result in results)
    warnings = sum(len(result.outcome.warnings) for result in results)
    counts = {
        "failed": len(results) - passed,
        "passed": passed,
        "deselected": collection.deselected,
        "not run": len(collection.tests) - len(results),
    }
    parts = [f"{count} {word}" for word, count in counts.items() if count]
    parts += [_many(warnings, "warning")] if warnings else []
    parts += [_many(len(collection.errors), "error")] if collection.errors else []
    good = passed == len(results) and not collection.errors and results
    text = rule(f"{', '.join(parts) or 'no tests ran'} in {seconds:.2f}s", width)
    return typer.style(text, fg="green" if good else "red")


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
