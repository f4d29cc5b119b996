"""`muxk policy swap` and `muxk policy shadow`."""

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
    policy: Annotated[
        str, typer.Argument(metavar="POLICY", help="A file, or a name known here or at the server.")
    ],
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


OFF = "off"


def shadow(
    policy: Annotated[
        str, typer.Argument(metavar="POLICY|off", help="A file, a name as for swap, or `off` to end it.")
    ],
    settings: Settings = None,
    endpoint: Endpoint = None,
    run_dir: RunDir = None,
    admin: Admin = None,
) -> None:
    """Have the running server ask another policy too, and count where it differs. It never acts.

    `muxk state` shows the shares of decisions that differ, `muxk explain --shadow` the latest of them.
    """
    values = parse_settings(settings)
    with readable_errors(), operator_client(endpoint, run_dir, admin) as client:
        shadowed = client.set_shadow(None if policy == OFF else policy, values)
    if policy == OFF:
        typer.echo("no shadow policy is asked any more")
    else:
        typer.echo(f"{shadowed.name} ({shadowed.sha[:12]}) is asked too, and never acts")
