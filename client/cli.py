"""The `muxk` command. Each command lives in a module of its own; this one puts them together."""

from __future__ import annotations

import typer
from muxk.client import (
    cli_admin,
    cli_bench,
    cli_check,
    cli_compare,
    cli_diff,
    cli_doctor,
    cli_explain,
    cli_migrate,
    cli_policies,
    cli_policy,
    cli_profile,
    cli_run,
    cli_schema,
    cli_sim,
    cli_state,
    cli_talk,
    cli_test,
    cli_tune,
)
from muxk.client.terminal import told_when_full


def build_app() -> typer.Typer:
    """The command with its sub-commands."""
    app = typer.Typer(
        name="muxk",
        help="Serve a language model with prefill and decode side by side, scheduled by a YAML policy.",
        epilog="Start with:  muxk run policies/muxwise.yaml --demo",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    policy = typer.Typer(help="Work with the policy of a running server.", no_args_is_help=True)
    policy.command("swap")(cli_policy.swap)
    policy.command("shadow")(cli_policy.shadow)
    policy.command("list")(cli_policies.list_policies)
    app.command("run")(cli_run.run)
    app.command("submit")(cli_talk.submit)
    app.command("chat")(cli_talk.chat)
    app.command("check")(cli_check.check)
    app.command("schema")(cli_schema.schema)
    app.command("migrate")(cli_migrate.migrate)
    app.add_typer(policy, name="policy")
    app.command("state")(cli_state.state)
    app.command("explain")(cli_explain.explain)
    app.command("abort")(cli_admin.abort)
    app.command("drain")(cli_admin.drain)
    app.command("keys")(cli_admin.keys)
    app.command("test")(cli_test.run_tests)
    app.command("profile")(cli_profile.profile)
    app.command("sim")(cli_sim.sim)
    app.command("compare")(cli_compare.compare)
    app.command("tune")(cli_tune.tune)
    app.command("diff")(cli_diff.diff)
    app.command("bench")(cli_bench.bench)
    app.command("doctor")(cli_doctor.doctor)
    return app


def main() -> None:
    """Entry point of the `muxk` script."""
    with told_when_full():
        build_app()()


if __name__ == "__main__":
    main()
