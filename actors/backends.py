"""From `--device` and `--model` to a device, its tokenizer and their limits.

torch is imported here only when a device needs it: the base install has none, and simulates.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from muxk.actors.tokenizer import Tokenizer
from muxk.kernel.device import Device, ElasticDevice
from muxk.kernel.devices.cpu import CpuDevice, available_cores, prepare_process
from muxk.kernel.devices.sim import SimDevice
from muxk.kernel.estimates import Estimates
from muxk.kernel.link import Link
from muxk.kernel.work import PAGE_SIZE
from muxk.models.errors import ModelError
from muxk.models.tokenizer import ByteTokenizer
from muxk.profiles.gpu import known_gpus

KV_TOKENS_DEFAULT = 32_768
"""KV pool of the CPU device when nothing is said; 1.5 GB for SmolLM2."""
SIM_KV_TOKENS_DEFAULT = 65_536
SIM_UNITS_DEFAULT = 8
SIM_LAYERS = 8

Progress = Callable[[str, float], None]


class StartupError(Exception):
    """The server can not start; the text is for the user."""


@dataclass(frozen=True)
class Cluster:
    """Several devices of one server, all alike."""

    devices: tuple[Device, ...]
    pages: Mapping[int, range]
    """Of the KV pool of each device; disjoint where devices may work together."""
    link: Link
    elastic: tuple[ElasticDevice, ...] = ()
    """The devices again, where they may work together."""


@dataclass(frozen=True)
class Identity:
    """What times depend on beside the device and the model by name: part of a profile's key."""

    dims: Mapping[str, Any] = field(default_factory=dict)
    """Of the model, by their names in `config.json`; plain data."""
    dtype: str = ""
    fingerprint: str = ""
    """Digest of the rest."""


@dataclass(frozen=True)
class Backend:
    """A device that runs a model, and what serving has to know of both."""

    device: Device
    """The first one, if there are several."""
    tokenizer: Tokenizer
    model: str
    max_context_tokens: int
    cluster: Cluster | None = None
    identity: Identity = Identity()
    profile: Estimates | None = None
    """What was measured before, in place of the measurement at start."""

    def close(self) -> None:
        """End threads and free memory."""
        if self.cluster is None:
            self.device.close()
            return
        self.cluster.link.close()
        for device in self.cluster.devices:
            device.close()


def open_backend(device: str, model: str, dtype: str, kv_tokens: int | None, progress: Progress) -> Backend:
    """Load what `--device` and `--model` name. Raises StartupError."""
    kind, _, count = device.partition(":")
    if kind == "sim" and count.partition(",")[0] in known_gpus():
        return _open_sim_gpu(device, model, kv_tokens)
    units = _unit_count(device, count) if count else None
    if kind == "sim":
        return _open_sim(
            units or SIM_UNITS_DEFAULT, SIM_KV_TOKENS_DEFAULT if kv_tokens is None else kv_tokens
        )
    if kind in ("auto", "cpu"):
        return _open_cpu(model, dtype, units, KV_TOKENS_DEFAULT if kv_tokens is None else kv_tokens, progress)
    raise StartupError(f"unknown device {device!r}: use auto, cpu, cpu:N, sim:N (N units) or sim:h200")


def _open_sim_gpu(device: str, model: str, kv_tokens: int | None) -> Backend:
    """A model by its dimensions on a modelled card, with the contexts that it was trained for."""
    from muxk.actors.gpu_backend import open_gpu_backend

    gpu = open_gpu_backend(device, model, kv_tokens)
    return replace(gpu.backend, max_context_tokens=min(gpu.shape.context_max, gpu.kv_tokens))


def _unit_count(device: str, count: str) -> int:
    if not count.isdecimal() or int(count) < 1:
        cards = f", nor one of {', '.join(known_gpus())}" if device.startswith("sim") else ""
        raise StartupError(f"device {device!r}: {count!r} is not a number of units{cards}")
    return int(count)


def _open_sim(units: int, kv_tokens: int) -> Backend:
    pages = _pages(kv_tokens)
    sim = SimDevice(units=units, layers=SIM_LAYERS, pages=pages)
    return Backend(sim, ByteTokenizer(), "sim", (pages - 1) * PAGE_SIZE)


def _pages(kv_tokens: int) -> int:
    """Pages for so many tokens, and page 0."""
    if kv_tokens < PAGE_SIZE:
        raise StartupError(f"--kv-tokens {kv_tokens} is less than one page of {PAGE_SIZE} tokens")
    return kv_tokens // PAGE_SIZE + 1


def _open_cpu(model: str, dtype: str, units: int | None, kv_tokens: int, progress: Progress) -> Backend:
    missing = [name for name in ("torch", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        raise StartupError(
            f"the cpu device needs {' and '.join(missing)}: pip install 'muxk[cpu]', or use --device sim"
        )
    cores = available_cores()
    if units is not None and units > len(cores):
        raise StartupError(f"--device cpu:{units} asks for more cores than the {len(cores)} there are")
    prepare_process()
    from muxk.models.load import load_runner, open_weights
    from muxk.models.resolve import resolve_model
    from muxk.models.tokenizer import load_tokenizer

    try:
        source = resolve_model(model)
        tokenizer = load_tokenizer(source)
        context = open_weights(source).config.max_context_tokens
        pages = _pages(kv_tokens)

        def loaded(done: int, total: int, what: str) -> None:
            progress(f"loading {what}", done / max(1, total))

        runner = load_runner(source, pages, dtype, loaded)
    except ModelError as error:
        raise StartupError(str(error)) from error
    limit = min(context, (pages - 1) * PAGE_SIZE)
    identity = _cpu_identity(runner, dtype)
    return Backend(
        CpuDevice(runner, cores[: units or len(cores)]), tokenizer, model, limit, identity=identity
    )


def _cpu_identity(runner: Any, dtype: str) -> Identity:
    """The model's sizes; the processor, and whether the native operators are built."""
    import msgspec
    from muxk.models.native_library import load_native

    config = msgspec.to_builtins(runner.config)
    fingerprint = digest((processor_name(), load_native() is not None))
    return Identity(config, dtype, fingerprint)
