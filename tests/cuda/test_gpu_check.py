"""gpu_check without a card: every stage as far as it goes, and what is made of what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import yaml
from fake_cuda import INSTALLED, build, environment
from muxk.client.traffic import token_ids
from muxk.profiles import gpu_check, gpu_check_operators
from muxk.profiles.gpu import CoRunConstants, HostConstants, Partition
from muxk.profiles.gpu_check import main
from muxk.profiles.gpu_check_build import build as build_attention
from muxk.profiles.gpu_check_constants import suggested
from muxk.profiles.gpu_check_load import FULL_LOAD
from muxk.profiles.gpu_check_rig import TimeBox
from processes import ends

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "Build", lambda arguments: SimpleNamespace(settle=lambda: None))


def report(folder: Path, stage: int) -> dict[str, Any]:
    found = json.loads((folder / f"stage-{stage}.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.skipif(not INSTALLED, reason="needs cuda-bindings: make install brings them")
def test_the_first_stage_reads_the_driver_and_gives_back_every_byte(tmp_path: Path) -> None:
    driver = build(tmp_path)
    command = [sys.executable, "-m", "muxk.profiles.gpu_check", "--dry-run", "--stages", "1"]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path)], env=environment(driver, DRIVER=13000), capture_output=True
    )
    assert ended.returncode == 0, ended.stderr.decode()
    found = report(tmp_path, 1)
    assert "failed" not in found
    assert (found["units"], found["driver_cuda"]) == (132, "13.0")
    assert found["splits"] == [[16, 116], [24, 108], [32, 100], [48, 84], [64, 68], [80, 52], [96, 36]]
    opening = found["opening"]
    assert opening["contexts"] == 14
    assert opening["bytes_a_context"] > 0
    assert opening["bytes_left_behind"] == 0
    assert found["events_across_lanes"]["turns_that_read_too_early"] == 0
    assert found["sm_ids"] == "needs a card"


@pytest.mark.slow
def test_operators_parity_and_decode_run_without_a_card_and_say_so(tmp_path: Path) -> None:
    assert main(["--dry-run", "--stages", "2,3,4", "--out", str(tmp_path)]) == 0
    operators, parity, decode = (report(tmp_path, stage) for stage in (2, 3, 4))
    assert all(found["dry_run"] and found["date"].endswith("Z") for found in (operators, parity, decode))
    lanes = [(row["lane"], row["units"], row["beside"] is None) for row in operators["rows"]]
    assert lanes[:4] == [
        ("whole", 132, True),
        ("decode", 16, True),
        ("prefill", 116, True),
        ("decode", 16, False),
    ]
    assert parity["all_within"] is True
    assert parity["model"]["tokens"] == 68
    assert [lane["units"] for lane in decode["lanes"]] == [132, 132, 16, 64]
    assert all(lane["step_ms_median"] > 0 for lane in decode["lanes"])
    constants = (tmp_path / "constants.yaml").read_text()
    assert constants.startswith("# Of a dry run of gpu_check: no figure means anything.")


def test_what_is_built_before_the_stages_attends() -> None:
    assert build_attention(torch.device("cpu"), torch.float32) == "torch"


def test_a_parity_that_is_off_is_not_within(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from muxk.models.cuda_kernels import TorchKernels
    from muxk.profiles import gpu_check_parity

    class Wrong(TorchKernels):
        def silu_mul(self, gate_up: Any, out: Any) -> None:
            super().silu_mul(gate_up, out)
            out.mul_(1.1)

    monkeypatch.setattr(gpu_check_parity, "kernels_for", lambda device: Wrong())
    monkeypatch.setattr(gpu_check_parity, "_model", lambda rig: {"within": True})
    assert main(["--dry-run", "--stages", "3", "--out", str(tmp_path)]) == 0
    found = report(tmp_path, 3)
    assert found["silu_mul"]["within"] is False
    assert found["add_rms_norm"]["within"] is True
    assert found["all_within"] is False


@pytest.mark.slow
def test_a_server_in_a_process_of_its_own_is_loaded_under_policies_and_simulated_beside(
    tmp_path: Path,
) -> None:
    assert main(["--dry-run", "--stages", "5", "--out", str(tmp_path)]) == 0
    found = report(tmp_path, 5)
    assert [run["policy"] for run in found["runs"]] == ["muxwise", "static_split decode_share=12.12%"]
    for run in found["runs"]:
        assert run["figures"]["completed"] == run["sent"] > 0
        assert run["errors"] == {}
        assert run["figures"]["p99_itl_ms"] > 0
        assert run["counts"]["decode steps"] > 0
        assert run["device_state"]["graphs"]["captured"]
    assert found["runs"][1]["split_residency_ms"]["16+116"] > 0
    splits = found["runs"][0]["simulated"]["split_residency_ms"]
    assert set(splits) <= {"0+132", "132+0", "132+132", "16+116", "64+68", "64+0", "16+0", "0+116", "0+68"}
    assert found["runs"][0]["simulated"]["figures"]["completed"] == found["runs"][0]["sent"]


def test_a_stage_that_fails_is_told_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(rig: object, box: object) -> dict[str, Any]:
        raise RuntimeError("CUDA error: misaligned address\nand more")

    monkeypatch.setattr(gpu_check_operators, "check_operators", broken)
    assert main(["--dry-run", "--stages", "2,1", "--out", str(tmp_path)]) == 1
    assert report(tmp_path, 2)["failed"] == "RuntimeError: CUDA error: misaligned address"
    assert "failed" not in report(tmp_path, 1)
    assert "stage 2, operators" in capsys.readouterr().out


def test_a_stage_whose_process_dies_or_hangs_leaves_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a card each stage is a process, since an error there sticks."""
    monkeypatch.setenv("MUXK_FLASHINFER", "1")  # put back afterwards
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["--stages", "1", "--out", str(tmp_path)]) == 1
    assert report(tmp_path, 1)["failed"].startswith("its process ended with code 1")

    assert "attention is Triton's: the build of FlashInfer's ended with 1" in capsys.readouterr().out
    assert os.environ["MUXK_FLASHINFER"] == "0"


@pytest.mark.usefixtures("no_build")
def test_a_stage_that_hangs_is_ended_with_all_it_started_and_what_it_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    child = tmp_path / "child"
    report_path = tmp_path / "stage-2.json"
    program.write_text(
        f'#!/bin/sh\necho \'{{"attention": "triton"}}\' > {report_path}\nsleep 90 & echo $! > {child}\nwait\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setitem(gpu_check.BOXES_S, 2, 0.5)  # type: ignore[arg-type]
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)
    assert main(["--stages", "2", "--out", str(tmp_path)]) == 1
    assert report(tmp_path, 2) == {"attention": "triton", "failed": "it was ended after 1 s"}
    assert ends(int(child.read_text()))


def test_what_a_stage_found_before_it_failed_is_in_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def half(rig: object, box: TimeBox) -> dict[str, Any]:
        box.found["attention"] = "triton"
        box.check()
        seen.append(report(tmp_path, 2))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_check_operators, "check_operators", half)
    assert main(["--dry-run", "--stages", "2", "--out", str(tmp_path)]) == 1
    assert seen[0]["attention"] == "triton", "written before the stage has ended"
    assert report(tmp_path, 2)["attention"] == "triton"
    assert "illegal memory access" in report(tmp_path, 2)["failed"]


def test_an_unknown_stage_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--stages", "6"])
    assert "--stages '6': stages are 1, 2, 3, 4, 5" in capsys.readouterr().err
    later = sum(gpu_check.BOXES_S[stage] for stage in (2, 3, 4, 5))
    assert max(gpu_check.BUILD_S, gpu_check.BOXES_S[1]) + later < 600
    assert gpu_check.TOTAL_S < 600


def test_what_was_measured_becomes_constants_in_the_form_of_a_profile() -> None:
    def row(units: int, copy: float, attention: float, beside: str | None = None) -> dict[str, Any]:
        return {
            "lane": "decode",
            "units": units,
            "beside": beside,
            "ns": {"decode_attention": attention},
            **({} if beside else {"copy_bytes_per_ns": copy}),
        }

    reports = {
        1: {"card": "NVIDIA H200", "date": "2026-11-30", "switch": {"switch_and_kernel_us": 7.5}},
        2: {"rows": [row(16, 1000.0, 400.0), row(16, 0, 500.0, "products"), row(64, 4000.0, 100.0)]},
        4: {"lanes": [{"graph": False}, {"graph": True, "launch_ms_median": 0.21}]},
    }
    text = suggested(reports)
    assert text is not None
    assert text.startswith("# gpu_check on NVIDIA H200, 2026-11-30")
    found = yaml.safe_load(text)
    partition = msgspec.convert(found["partition"], Partition)
    assert partition.saturating_units == 61  # 95 % of 4,000 between 16 and 64 SMs
    assert not partition.assumed
    assert found["host"]["decode_launch_ns"] == 210_000
    assert found["host"]["switch_ns"] == 7500
    assert found["co_run"]["slowdown_max"] == 0.25
    assert set(found["host"]) <= set(HostConstants.__struct_fields__)
    assert set(found["co_run"]) <= set(CoRunConstants.__struct_fields__)
    assert suggested({1: {"failed": "no card"}}) is None


def test_the_load_is_the_same_each_time_and_has_long_prompts_among_chats() -> None:
    first, again = (list(islice(FULL_LOAD.requests(), 200)) for _ in range(2))
    assert first == again
    moved = list(islice(replace(FULL_LOAD, texts_from=10**6).requests(), 200))
    assert [(one.arrival_ns, one.prompt_tokens, one.output_tokens) for one in moved] == [
        (one.arrival_ns, one.prompt_tokens, one.output_tokens) for one in first
    ]
    assert not any(
        np.array_equal(token_ids(one.prompt[:1], 1000)[:64], token_ids(two.prompt[:1], 1000)[:64])
        for one, two in zip(first, moved, strict=True)
    ), "no prompt of a run is in the prefix cache from the run before"
    arrivals = [request.arrival_ns for request in first]
    assert arrivals == sorted(arrivals)
    lengths = [request.prompt_tokens for request in first]
    assert sum(length >= 6000 for length in lengths) in range(10, 25)
    assert max(length + 384 for length in lengths) < 32_768
