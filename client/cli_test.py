"""`muxk test`: run PolicyTests in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client.options import FAILED, INTERRUPTED, USAGE, AsJson, Settings, die, parse_settings

if TYPE_CHECKING:
    from muxk.client.policy_test_files import Collection
    from muxk.client.test_report import Result, RuleUse, TextReport
    from muxk.policies.policy_choice import PolicyChoice


def run_tests(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH]...",
            help="Test files, folders that hold *.test.yaml files, or names of shipped policies. "
            "Default: the current folder.",
        ),
    ] = None,
    keywords: Annotated[
        str,
        typer.Option("-k", metavar="WORDS", help="Only tests whose name holds them, as 'chat and not long'."),
    ] = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for each test.")] = False,
    first: Annotated[bool, typer.Option("--exitfirst", "-x", help="Stop at the first failure.")] = False,
    rules: Annotated[
        bool, typer.Option("--rules", help="Also show which rules of the policies never fired.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="POLICY", help="Run this policy in place of the one a test names."),
    ] = None,
    settings: Settings = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write a JUnit report.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="FILE", help="Keep the run of one test for `muxk explain --record`."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the tests of policies in virtual time, on a simulated device. Needs no server and no model.

    Exit code 1 when an expectation does not hold, 2 when a file is wrong or there is no test.
    """
    from muxk.client.policy_test_files import collect, select

    began = perf_counter()
    values = parse_settings(settings)
    if values and policy is None:
        die("--set is for the policy of --policy; a test sets its own params", USAGE)
    instead = _instead(policy, values)
    collection = collect(paths or (), instead)
    if keywords.strip():
        select(collection, keywords)
    if record is not None and len(collection.tests) > 1:
        die(f"--record is for one test, not {len(collection.tests)}; choose one with -k", USAGE)
    try:
        code = _run(collection, _Wanted(verbose, first, rules, as_json, junit, record, began))
    except KeyboardInterrupt:
        typer.echo()  # behind the dots of the tests that ran
        die("stopped", INTERRUPTED)
    raise typer.Exit(code)


def _instead(policy: str | None, values: dict[str, str]) -> PolicyChoice | None:
    from muxk.policies.policy_choice import open_choice
    from muxk.policies.problems import PolicyError

    if policy is None:
        return None
    try:
        return open_choice(policy, values)
    except PolicyError as error:
        die(f"--policy {policy}\n{error}", USAGE)


@dataclass(frozen=True)
class _Wanted:
    """What the command line asks for besides the tests."""

    verbose: bool
    first: bool
    rules: bool
    as_json: bool
    junit: Path | None
    record: Path | None
    began: float


def _run(collection: Collection, wanted: _Wanted) -> int:
    """Run, report, and the exit code."""
    from muxk.client.test_report import TextReport, rule_uses

    report = None
    if not wanted.as_json:
        report = TextReport(lambda text: typer.echo(text, nl=False), verbose=wanted.verbose)
        report.begin(collection)
    results = _results(collection, report, wanted)
    seconds = perf_counter() - wanted.began
    uses = rule_uses(results) if wanted.rules else None
    if report is not None:
        report.end(results, collection, uses, seconds)
    else:
        _print_json(results, collection, uses, seconds)
    if wanted.junit is not None:
        _write_junit(wanted.junit, results, collection, seconds)
    if collection.errors or not results:
        return USAGE
    return 0 if all(result.outcome.passed for result in results) else FAILED


def _print_json(
    results: list[Result], collection: Collection, uses: list[RuleUse] | None, seconds: float
) -> None:
    import msgspec
    from muxk.client.policy_test_formats import as_json

    document = msgspec.json.encode(as_json(results, collection, uses, seconds))
    typer.echo(msgspec.json.format(document))


def _write_junit(path: Path, results: list[Result], collection: Collection, seconds: float) -> None:
    from muxk.client.policy_test_formats import write_junit

    try:
        write_junit(path, results, collection, seconds)
    except OSError as error:
        die(f"--junit {path}: {error.strerror or error}", USAGE)


def _results(collection: Collection, report: TextReport | None, wanted: _Wanted) -> list[Result]:
    from muxk.actors.policy_tests import run_test
    from muxk.client.test_report import Result
    from muxk.kernel.record_frames import NotARecording

    results: list[Result] = []
    if wanted.first and collection.errors:
        return results
    for collected in collection.tests:
        began = perf_counter()
        try:
            outcome = run_test(collected.test, wanted.record)
        except NotARecording as error:
            die(f"--record: {error}", USAGE)
        results.append(Result(collected, outcome, perf_counter() - began))
        if report is not None:
            report.ran(results[-1])
        if wanted.first and not outcome.passed:
            break
    return results
