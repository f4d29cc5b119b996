"""What `muxk sim` can not run is refused before it runs, with the place and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
from muxk.client.cli import build_app
from typer.testing import CliRunner

MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.6805900,374,44\n" * 3


def refused(*arguments: str, command: str = "sim") -> str:
    done = CliRunner().invoke(build_app(), [command, *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return done.output


@pytest.mark.parametrize("policy", ["splitwise", "loongserve"])
def test_a_policy_for_several_devices_is_refused_on_one_with_the_option_that_gives_them(policy: str) -> None:
    told = refused(policy, "--workload", "sharegpt", "--requests", "1")
    assert f"the policy {policy} needs 2 devices or more, and sim:h200 is one" in told
    assert "use --device sim:h200,devices=2" in told


@pytest.mark.parametrize(
    "command",
    [
        ["sim", "splitwise"],
        ["compare", "muxwise", "splitwise"],
        ["diff", "muxwise", "splitwise"],
        ["tune", "splitwise", "--param", "queue_tokens=1"],
    ],
)
def test_every_command_refuses_a_policy_that_has_too_few_devices_in_the_same_words(
    command: list[str],
) -> None:
    needs = "muxk: the policy splitwise needs 2 devices or more, and "
    assert refused(*command[1:], command=command[0]).startswith(
        f"{needs}sim:h200 is one: use --device sim:h200,devices=2"
    )
    one = refused(*command[1:], "--device", "sim:h200,devices=1", command=command[0])
    assert one == f"{needs}sim:h200,devices=1 is 1\n"


def test_a_folder_is_no_file_for_a_profile() -> None:
    told = refused("--device", "sim:h200", "--model", "qwen3-8b", "--out", ".", command="profile")
    assert "--out .: that is a folder; name the file, as sim-h200_qwen3-8b.json" in told


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [("cut.jsonl", MOONCAKE * 90 + MOONCAKE[:50], 91), ("cut.csv", AZURE + "2023-11-16 18:1", 5)],
)
def test_a_trace_that_was_cut_off_is_refused_with_its_last_line(
    tmp_path: Path, name: str, text: str, line: int
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert f"{path}:{line}: " in refused("muxwise", "--workload", str(path), "--requests", "1")


def test_a_model_spread_over_too_few_gpus_is_refused_with_the_bytes_of_each() -> None:
    told = refused("muxwise", "--model", "qwen3-235b-a22b", "--device", "sim:h100,tp=4")
    assert (
        "does not fit on h100 with tp=4: of 85,899,345,920 bytes a GPU, weights take 117,621,882,880" in told
    )


def test_a_rate_of_zero_is_refused_for_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "whole.jsonl"
    path.write_text(MOONCAKE)
    assert "rate is 0.0; it must be a finite number above 0" in refused(
        "muxwise", "--workload", str(path), "--rate", "0"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("muxwise", "--workload", "a\udcff.csv"), "the name is no UTF-8 text; rename the file"),
        (("muxwise", "--json", "."), "that is a folder"),
        (("",), "an empty name"),
        (("muxwise", "--workload", " "), "an empty name"),
        (("chunked:budget=512",), "here settings have an option of their own: chunked --set budget=512"),
        (("muxwise", "--device", "sim:h200,devices=0"), "after the card comes tp=1, 2, 4, 8"),
        (("muxwise", "--rate", "inf"), "rate is inf"),
        (("muxwise", "--rate", "-1"), "rate is -1.0"),
        (("muxwise", "--workload", "sharegpt", "--rate", "1e-9"), "must be 1e-06 requests a second"),
        (
            ("muxwise", "--workload", "sharegpt", "--rate", "1e-300"),
            "must be 1e-06 requests a second",
        ),
        (("muxwise", "--duration", "nan"), "--duration nan"),
        (("muxwise", "--duration", "1e300"), "--duration 1e+300"),
    ],
)
def test_what_could_only_fail_after_the_run_is_refused_before_it(
    arguments: tuple[str, ...], complaint: str
) -> None:
    assert complaint in refused(*arguments)
