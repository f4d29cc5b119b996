"""`muxk schema`: the JSON Schema of policies and tests, for editors."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from muxk.client.options import USAGE, die

KINDS = ("policy", "test", "any")


def schema(
    kind: Annotated[
        str, typer.Argument(metavar="[policy|test|any]", help="Which documents it is for.")
    ] = "any",
) -> None:
    """Print the JSON Schema of policy files, for editors. docs/editor.md says how to set them up."""
    from muxk.policies.json_schema import policy_schema
    from muxk.policies.policy_test_schema import any_schema, policy_test_schema

    makers = dict(zip(KINDS, (policy_schema, policy_test_schema, any_schema), strict=True))
    if kind not in makers:
        die(f"schema {kind}: there is one for {', '.join(KINDS[:-1])} and {KINDS[-1]}", USAGE)
    typer.echo(json.dumps(makers[kind](), indent=2))
