"""`muxk check` and `muxk policy swap`."""

from __future__ import annotations

from typing import Annotated

import typer
from muxk.client.options import (
    FAILED,
    Admin,
    Endpoint,
    RunDir,
    Settings,
    operator_client,
    parse_settings,
    readable_errors,
)


def check(
    policies: Annotated[
        list[str], typer.Argument(metavar="POLICY...", help="Policy files, or names of shipped policies.")
    ],
    settings: Settings = None,
) -> None:
    """Check policy files and print every mistake as file:line:column. Needs no server.

    Exit code 1 when any of them has a mistake.
    """
    from muxk.policies.engine import load_policy
    from muxk.policies.problems import PolicyError

    values = parse_settings(settings)
    refused = 0
    for name in policies:
        try:
            policy = load_policy(name, values)
        except PolicyError as error:
            refused += 1
            typer.echo(str(error), err=True)
        else:
            typer.echo(f"{name}: ok ({policy.name}, {policy.sha[:12]})")
    if refused:
        raise typer.Exit(FAILED)


def swap(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="A policy file, or a shipped name.")],
    settings: Settings = None,
    endpoint: Endpoint = None,
    run_dir: RunDir = None,
    admin: Admin = None,
) -> None:
    """Replace the policy of the running server. Requests go on; a policy with a mistake changes nothing."""
    values = parse_settings(settings)
    with readable_errors(), operator_client(endpoint, run_dir, admin) as client:
        swapped = client.swap(policy, values)
        typer.echo(f"running {swapped.name} ({swapped.sha[:12]})")
