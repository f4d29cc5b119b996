"""The command line: what a user reads when all is well and when it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gateway import FakeGateway, Frames, talkative
from muxk.client import cli, protocol
from typer.testing import CliRunner, Result

BAD_POLICY = "apiVersion: muxk/v1alpha1\nkind: SchedulingPolicy\nmetadata: {name: bad}\nspec:\n  ordr: {}\n"


def muxk(*arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(cli.build_app(), list(arguments), input=typed)


@pytest.mark.parametrize(
    "command",
    [
        *((), ("run",), ("submit",), ("chat",), ("check",), ("policy", "swap"), ("policy", "shadow")),
        *(("state",), ("explain",), ("bench",)),
    ],
)
def test_every_command_explains_itself(command: tuple[str, ...]) -> None:
    shown = muxk(*command, "--help")
    assert shown.exit_code == 0
    assert "Usage:" in shown.output


def test_check_prints_every_mistake_with_its_place_and_fails(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(BAD_POLICY, encoding="utf-8")
    shown = muxk("check", "muxwise", str(bad))
    assert shown.exit_code == 1
    assert "muxwise: ok (muxwise, " in shown.stdout
    assert f"{bad}:5:3: " in shown.stderr
    assert "did you mean 'order'?" in shown.stderr


def test_check_of_a_missing_file_names_the_shipped_policies() -> None:
    shown = muxk("check", "nothing.yaml")
    assert shown.exit_code == 1
    assert "muxwise" in shown.stderr


@pytest.mark.parametrize("command", [("check", "muxwise"), ("policy", "swap", "muxwise"), ("run", "muxwise")])
def test_a_setting_without_a_value_is_a_usage_error(command: tuple[str, ...]) -> None:
    shown = muxk(*command, "--set", "slo.tbt")
    assert shown.exit_code == 2
    assert "expected KEY=VALUE" in shown.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("submit", "hello"),
        ("chat",),
        ("state",),
        ("explain",),
        ("policy", "swap", "muxwise"),
        ("policy", "shadow", "off"),
    ],
)
def test_without_a_server_every_command_says_how_to_start_one(
    endpoint: str, command: tuple[str, ...]
) -> None:
    shown = muxk(*command, "--endpoint", endpoint)
    assert shown.exit_code == 1
    assert "no muxk server answers" in shown.stderr
    assert "muxk run policies/muxwise.yaml" in shown.stderr
    assert "Traceback" not in shown.output


def test_submit_streams_the_answer_and_ends_with_a_line_break(endpoint: str) -> None:
    with FakeGateway(endpoint) as gateway:
        shown = muxk("submit", "hello", "--max-tokens", "2", "--stop", "X", "--endpoint", endpoint)
        assert (shown.exit_code, shown.stdout) == (0, "w0 w1 \n")
        sent = gateway.wait_for(protocol.Submit)
        assert (sent.prompt, sent.max_tokens, sent.stop) == ("hello", 2, ["X"])


def test_submit_reads_stdin_and_prints_json(endpoint: str) -> None:
    with FakeGateway(endpoint) as gateway:
        shown = muxk("submit", "-", "--json", "--chat", "--endpoint", endpoint, typed="from a pipe")
        assert json.loads(shown.stdout)["completion_tokens"] == 128
        assert gateway.wait_for(protocol.Submit).messages == [protocol.ChatMessage("user", "from a pipe")]


def test_a_refusal_is_one_readable_line(endpoint: str) -> None:
    def full(command: protocol.Command) -> Frames:
        if isinstance(command, protocol.Submit):
            yield (protocol.Failed(command.request_id, "overloaded", "512 requests wait already"),)
        else:
            yield from talkative(command)

    with FakeGateway(endpoint, full):
        shown = muxk("submit", "hello", "--endpoint", endpoint)
    assert shown.exit_code == 1
    assert shown.stderr == "muxk: 512 requests wait already (overloaded)\n"


def test_a_chat_sends_the_whole_conversation_each_time(endpoint: str) -> None:
    with FakeGateway(endpoint) as gateway:
        typed = "hi\nand?\n/new\nfresh\n/quit\n"
        shown = muxk(
            "chat", "--max-tokens", "1", "--system", "Be brief.", "--endpoint", endpoint, typed=typed
        )
        assert shown.exit_code == 0
        sent = [gateway.wait_for(protocol.Submit).messages or [] for _ in range(3)]
    turns = [[f"{message.role}: {message.content}" for message in messages] for messages in sent]
    assert turns[0] == ["system: Be brief.", "user: hi"]
    assert turns[1] == ["system: Be brief.", "user: hi", "assistant: w0 ", "user: and?"]
    assert turns[2] == ["system: Be brief.", "user: fresh"]


def test_state_is_shown_for_people_and_for_scripts(endpoint: str) -> None:
    with FakeGateway(endpoint):
        assert "policy  muxwise" in muxk("state", "--endpoint", endpoint).stdout
        assert json.loads(muxk("state", "--json", "--endpoint", endpoint).stdout)["server"]["tokens"] == 7


def test_a_refused_swap_prints_the_report_and_fails(endpoint: str) -> None:
    def strict(command: protocol.Command) -> Frames:
        if isinstance(command, protocol.SwapPolicy):
            yield (protocol.PolicySwapped(command.ticket, False, "", "", "bad.yaml:5:3: unknown key"),)
        else:
            yield from talkative(command)

    with FakeGateway(endpoint, strict):
        shown = muxk("policy", "swap", "muxwise", "--endpoint", endpoint)
    assert shown.exit_code == 1
    assert "bad.yaml:5:3: unknown key" in shown.stderr


def test_bench_refuses_a_bad_policy_or_slo_before_it_starts_anything() -> None:
    assert muxk("bench", "--policies", "nothing").exit_code == 2
    shown = muxk("bench", "--slo", "100")
    assert shown.exit_code == 2
    assert "such as 100ms" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["no-such-policy.yaml"], "no-such-policy.yaml"),
        (["muxwise", "--device", "toaster"], "unknown device 'toaster'"),
        (["muxwise", "--device", "sim", "--endpoint", "tcp://nowhere"], "tcp://nowhere"),
        (["muxwise", "--device", "sim", "--endpoint", "tcp://0.0.0.0:5555"], "open to other machines"),
        (["muxwise", "--device", "sim", "--endpoint", "ipc:///no/such/folder/s"], "can not listen on ipc"),
    ],
)
def test_a_server_that_can_not_start_says_why_with_exit_code_two(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "muxk.client.cli", "run", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"MUXK_RUN_DIR": str(tmp_path)},
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False), ended.stderr
    assert complaint in ended.stderr


def test_the_command_starts_without_loading_torch_or_the_server() -> None:
    code = (
        "import sys; from muxk.client import cli, Client; cli.build_app();"
        "assert not {'torch', 'numpy', 'muxk.actors.system', 'muxk.models'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
