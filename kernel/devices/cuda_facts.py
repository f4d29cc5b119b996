"""What a machine has for the cuda device, found without importing torch and with nothing installed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
from muxk.kernel.devices.cuda_driver import (
    Card,
    CudaError,
    CudaUnavailable,
    Driver,
    open_driver,
    version_text,
)
from muxk.kernel.devices.cuda_granularity import Granularity, default_menu, green_support

DRIVER_LIBRARY = "libcuda.so.1"
PACKAGES: Mapping[str, str] = {
    "torch": "torch",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "cuda.bindings": "cuda-bindings",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "gguf": "gguf",
}
"""Module -> the package that brings it."""
CAPABILITY_MIN = (8, 0)
"""Ampere: what Triton compiles for, and what has bfloat16."""
TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"](\d+)\.(\d+)", re.MULTILINE)
CARDS_MAX = 64
"""Cards that are looked at."""


class Problem(msgspec.Struct, frozen=True):
    """The first thing that keeps the cuda device from running."""

    reason: str
    """One line, without a stop at its end."""
    remedy: str
    """What the user can do about it, one line."""


class CardFacts(msgspec.Struct, frozen=True):
    """One card, or MIG instance."""

    index: int
    name: str
    capability: tuple[int, int]
    units: int
    """SMs."""
    memory_bytes: int
    memory_free_bytes: int | None
    """None when it could not be asked: the card refused a context."""
    granularity: Granularity | None
    """Of partitions; None where the driver has no green contexts."""
    decode_units: tuple[int, ...]
    """SMs of decode in the splits that muxk makes when it is not told which."""
    why_not_green: str | None
    """Why prefill and decode can not have SMs of their own; None when they can."""


class CudaFacts(msgspec.Struct, frozen=True):
    """What there is."""

    driver_cuda: str | None
    """The CUDA that the driver implements, as `13.0`; None when it can not be asked."""
    driver_release: str | None
    """NVIDIA's number of the driver, as `580.65.06`, from the kernel module."""
    cards: tuple[CardFacts, ...]
    packages: Mapping[str, str | None]
    """Installed versions by package; None for those that are missing."""
    torch_cuda: str | None
    """The CUDA that torch was built for; None for a build without."""
    compiler: str | None
    """nvcc, which FlashInfer compiles its kernels with at first use; None without a CUDA toolkit."""
    mps_limit: str | None
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, under which green contexts may get more SMs than they were given."""
    problem: Problem | None
    """None when the cuda device can be used on some card."""


def gather_facts() -> CudaFacts:
    """Look at everything, and say what is the first thing missing."""
    packages = {package: _version(module, package) for module, package in PACKAGES.items()}
    torch_cuda = _torch_cuda()
    driver = _driver()
    version: int | None = None
    cards: tuple[CardFacts, ...] = ()
    if isinstance(driver, Problem):
        problem: Problem | None = driver
    else:
        try:
            version = driver.version()
            cards = tuple(_card_facts(driver, index) for index in range(min(CARDS_MAX, driver.count())))
            problem = _card_problem(cards)
        except CudaError as error:
            problem = Problem(str(error), "nvidia-smi must list the card")
    return CudaFacts(
        driver_cuda=None if version is None else version_text(version),
        driver_release=_driver_release(),
        cards=cards,
        packages=packages,
        torch_cuda=torch_cuda,
        compiler=find_nvcc(),
        mps_limit=os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
        problem=problem or package_problem(packages, torch_cuda, version),
    )


def find_problem(index: int = 0) -> Card | Problem:
    """The card of an index if the cuda device can use it: what `gather_facts` asks, cheapest first."""
    driver = _driver()
    if isinstance(driver, Problem):
        return driver
    try:
        count, version = driver.count(), driver.version()
        if index >= count:
            return _no_such_card(index, count)
        card = driver.card(index)
    except CudaError as error:
        return Problem(str(error), "nvidia-smi must list the card")
    packages = {package: _version(module, package) for module, package in PACKAGES.items()}
    return too_old(card) or package_problem(packages, _torch_cuda(), version) or card


def _no_such_card(index: int, count: int) -> Problem:
    seen = f"cuda:0 to cuda:{count - 1}" if count > 1 else "only cuda:0" if count else "none"
    return Problem(f"there is no card cuda:{index}: this process sees {seen}", "look at CUDA_VISIBLE_DEVICES")


def too_old(card: Card | CardFacts) -> Problem | None:
    """A card whose capability is below what the kernels need."""
    if card.capability >= CAPABILITY_MIN:
        return None
    major, minor = card.capability
    return Problem(
        f"{card.name} has compute capability {major}.{minor}, and the cuda device needs "
        f"{CAPABILITY_MIN[0]}.{CAPABILITY_MIN[1]} or later (Ampere)",
        "use --device cpu",
    )


def package_problem(
    packages: Mapping[str, str | None], torch_cuda: str | None, driver: int | None
) -> Problem | None:
    """What the cuda device imports and is not there, or was built for something else."""
    install = "pip install 'muxk[cuda]'"
    if packages["torch"] is None:
        return Problem("torch is not installed", install)
    if torch_cuda is None:
        return Problem(f"torch {packages['torch']} is built without CUDA", f"{install}, in a new environment")
    if driver is not None and int(torch_cuda.partition(".")[0]) > driver // 1000:
        return Problem(
            f"torch is built for CUDA {torch_cuda} and the driver implements {version_text(driver)} only",
            "update the NVIDIA driver, or install a torch that is built for the driver's CUDA",
        )
    missing = [name for name in ("triton", "transformers", "safetensors") if packages[name] is None]
    return Problem(f"{' and '.join(missing)} not installed", install) if missing else None


def find_nvcc() -> str | None:
    """CUDA's compiler, looked for as FlashInfer does: CUDA_HOME, then the path, then the usual folder."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [*([f"{home}/bin"] if home else []), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def _driver() -> Driver | Problem:
    """The driver, or why there is none. The library is looked for without the bindings: on a machine without
    a card they are not what is missing."""
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return Problem(
            f"no NVIDIA driver is here ({DRIVER_LIBRARY} is not found)",
            "on a machine with a card, install the NVIDIA driver",
        )
    try:
        driver = open_driver()
        if driver.count() == 0:
            return Problem("the NVIDIA driver sees no card", "look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    except CudaUnavailable as error:
        return Problem(error.reason, error.remedy)
    except CudaError as error:
        return Problem(str(error), "nvidia-smi must list the card")
    return driver


def _card_facts(driver: Driver, index: int) -> CardFacts:
    card = driver.card(index)
    support = green_support(driver, card)
    menu: tuple[int, ...] = ()
    if support.granularity is not None and support.why_not is None:
        menu = default_menu(card.units, support.granularity)
    return CardFacts(
        index=index,
        name=card.name,
        capability=card.capability,
        units=card.units,
        memory_bytes=card.memory_bytes,
        memory_free_bytes=_memory_free(driver, index),
        granularity=support.granularity,
        decode_units=menu,
        why_not_green=support.why_not,
    )


def _memory_free(driver: Driver, index: int) -> int | None:
    """Beside the context that has to be made to ask for it."""
    try:
        context = driver.retain_primary(index)
    except CudaError:
        return None
    try:
        with driver.current(context):
            return driver.memory_free()
    except CudaError:
        return None
    finally:
        driver.release_primary(index)


def _card_problem(cards: tuple[CardFacts, ...]) -> Problem | None:
    """None when some card can be used."""
    problems = [too_old(card) for card in cards]
    return problems[0] if problems and None not in problems else None


def _version(module: str, package: str) -> str | None:
    """Of an installed package, without importing it."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
    except (ImportError, ValueError):  # of the package above it
        return None


def _torch_cuda() -> str | None:
    """From torch/version.py, which is read and not run: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text("utf-8")
    except (OSError, ValueError):
        return None
    found = TORCH_CUDA.search(text)
    return f"{found[1]}.{found[2]}" if found else None


def _driver_release() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text("utf-8")
    except (OSError, ValueError):
        return None
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None
