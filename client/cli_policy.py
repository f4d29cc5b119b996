"""`muxk policy swap`."""

from __future__ import annotations

from typing import Annotated

import typer
from muxk.client.options import (
    Admin,
    Endpoint,
    RunDir,
    Settings,
    operator_client,
    parse_settings,
    readable_errors,
)


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
