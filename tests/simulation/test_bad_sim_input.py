"""What `muxk sim` can not run is refused before it runs, with the place and what would be right."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from muxk.actors import policy_tests
from muxk.client import sim_run
from muxk.client.cli import build_app
from study_data import short_requests
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


@pytest.mark.parametrize("command", [["sim", "muxwise"], ["diff", "muxwise", "chunked"]])
def test_a_rate_that_is_none_is_told_with_its_option(command: list[str]) -> None:
    told = refused(*command[1:], "--rate", "0", command=command[0])
    assert told.startswith("muxk: --rate: rate is 0.0")


def test_a_trace_is_named_once_and_with_the_option_that_named_it(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text(MOONCAKE[:50])
    assert refused("muxwise", "--workload", str(path)).startswith(f"muxk: --workload {path}:1: ")
    told = refused("muxwise", "chunked", "--trace", str(path), command="diff")
    assert told.startswith(f"muxk: --trace {path}:1: ")


def test_lengths_without_times_ask_for_the_option_that_gives_a_rate(tmp_path: Path) -> None:
    assert "say at which rate they come (--rate)" in refused(
        "muxwise", "--workload", str(short_requests(tmp_path))
    )


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("--model", "qwen3-235b-a22b"), "It fits with --device sim:h200,tp=4"),
        (("--model", "qwen3-235b-a22b", "--device", "sim:h100,tp=4"), "It fits with --device sim:h100,tp=8"),
        (("--model", "absent/config.json"), "there is no file 'absent/config.json'"),
        (("--duration", "1e-6", "--rate", "1"), "give more, or a higher --rate"),
        (("--set", "batch_tokens=0"), "hint: write 1 or more"),
    ],
)
def test_who_is_refused_is_told_what_would_be_right(arguments: tuple[str, ...], remedy: str) -> None:
    assert remedy in refused("muxwise", "--workload", "sharegpt", *arguments)


def test_a_model_too_large_for_any_number_of_gpus_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 65536, "num_attention_heads": 64, "num_hidden_layers": 800}
    path.write_text(json.dumps(sizes | {"intermediate_size": 262144, "vocab_size": 32000}))
    assert "No sim:a100 of up to tp=8 holds it" in refused(
        "muxwise", "--model", str(path), "--device", "sim:a100"
    )
    path.write_text(json.dumps(sizes | {"vocab_size": 32000}))
    told = refused("muxwise", "--model", str(path))
    assert f"{path}: intermediate_size is None or missing" in told


@pytest.mark.parametrize("text", ["chunked:budget", "chunked@h200", "chunked:", "chunked@"])
def test_a_contender_that_was_not_written_to_its_end_is_told_how_it_goes_on(text: str) -> None:
    told = refused("muxwise", text, command="compare")
    assert f"{text!r}: after the name of a policy comes :KEY=VALUE, @sim:GPU" in told


def test_a_setting_that_not_all_contenders_take_is_told_with_the_one_that_does_not() -> None:
    told = refused("chunked", "muxwise", "--set", "budget=512", command="compare")
    assert told.startswith("muxk: muxwise: --set:1:1: unknown param 'budget'")


def test_a_param_that_is_tried_is_not_set_as_well() -> None:
    told = refused("chunked", "--param", "budget=128,256", "--set", "budget=64", command="tune")
    assert "--set budget=64: --param tries values of budget already" in told


def test_a_file_that_is_no_profile_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    arguments = ["--device", "sim:h100", "--model", "llama-3.1-8b", "--out", str(path)]
    assert "the file is there and is no profile" in refused(*arguments, command="profile")
    assert path.read_text() == '{"mine": 1}'


@pytest.mark.parametrize(
    ("module", "name", "command"),
    [
        (sim_run, "simulate", ["sim", "muxwise", "--workload", "sharegpt"]),
        (policy_tests, "run_test", ["test", "inflight"]),
    ],
)
def test_ctrl_c_in_a_run_ends_the_command_with_a_word(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, command: list[str]
) -> None:
    def pressed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, pressed)
    done = CliRunner().invoke(build_app(), command)
    assert done.exit_code == 130
    assert done.output.endswith("muxk: stopped\n")
