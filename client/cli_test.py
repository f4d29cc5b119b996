"""`muxk test`: run PolicyTests in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client.options import FAILED, USAGE, AsJson, Settings, die, parse_settings

if TYPE_CHECKING:
    from muxk.client.policy_test_files import Collection
    from muxk.client.test_report import Result, TextReport
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

    values = parse_settings(settings)
    if values and policy is None:
        die("--set is for the policy of --policy; a test sets its own params", USAGE)
    instead = _instead(policy, values)
    collection = collect(paths or (), instead)
    if keywords.strip():
        select(collection, keywords)
    if record is not None and len(collection.tests) > 1:
        die(f"--record is for one test, not {len(collection.tests)}; choose one with -k", USAGE)
    raise typer.Exit(_run(collection, verbose, first, rules, junit, record, as_json))


def _instead(policy: str | None, values: dict[str, str]) -> PolicyChoice | None:
    from muxk.policies.policy_choice import open_choice
    from muxk.policies.problems import PolicyError

    if policy is None:
        return None
    try:
        return open_choice(policy, values)
    except PolicyError as error:
        die(f"--policy {policy}\n{error}", USAGE)


def _run(
    collection: Collection,
    verbose: bool,
    first: bool,
    rules: bool,
    junit: Path | None,
    record: Path | None,
    as_json: bool,
) -> int:
    from time import perf_counter

    from muxk.client.policy_test_formats import as_json as results_as_json
    from muxk.client.policy_test_formats import write_junit
    from muxk.client.test_report import TextReport, rule_uses

    began = perf_counter()
    report = None if as_json else TextReport(lambda text: typer.echo(text, nl=False), verbose=verbose)
    if report is not None:
        report.begin(collection)
    results = _results(collection, report, first, record)
    seconds = perf_counter() - began
    uses = rule_uses(results) if rules else None
    if report is not None:
        report.end(results, collection, uses, seconds)
    else:
        import msgspec

        typer.echo(
            msgspec.json.format(msgspec.json.encode(results_as_json(results, collection, uses, seconds)))
        )
    if junit is not None:
        try:
            write_junit(junit, results, collection, seconds)
        except OSError as error:
            die(f"--junit {junit}: {error.strerror or error}", USAGE)
    if collection.errors or not results:
        return USAGE
    return 0 if all(result.outcome.passed for result in results) else FAILED


def _results(
    collection: Collection, report: TextReport | None, first: bool, record: Path | None
) -> list[Result]:
    from time import perf_counter

    from muxk.actors.policy_tests import run_test
    from muxk.client.test_report import Result
    from muxk.kernel.record_frames import NotARecording

    results: list[Result] = []
    if first and collection.errors:
        return results
    for collected in collection.tests:
        began = perf_counter()
        try:
            outcome = run_test(collected.test, record)
        except NotARecording as error:
            die(f"--record: {error}", USAGE)
        results.append(Result(collected, outcome, perf_counter() - began))
        if report is not None:
            report.ran(results[-1])
        if first and not outcome.passed:
            break
    return results
