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
Notice = Callable[[str], None]
"""Takes a line for the user."""


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
    """Of a request that one device serves."""
    cluster: Cluster | None = None
    identity: Identity = field(default_factory=Identity)
    profile: Estimates | None = None
    """What was measured before, in place of the measurement at start."""
    model_context_tokens: int | None = None
    """Longest context of the model; None: as long as pools hold."""

    def context_tokens(self, devices: int) -> int:
        """Longest context of a request that so many devices serve as one group: what the model takes and
        their KV pools hold together. Devices that form no groups hold one each."""
        if self.cluster is None or not self.cluster.elastic:
            return self.max_context_tokens
        pools = devices * (self.device.pages - 1) * PAGE_SIZE
        return pools if self.model_context_tokens is None else min(pools, self.model_context_tokens)

    @property
    def group_context_tokens(self) -> tuple[int, ...]:
        """`context_tokens` of groups of one device, of two, and so on up to all."""
        count = 1 if self.cluster is None else len(self.cluster.devices)
        return tuple(self.context_tokens(devices) for devices in range(1, count + 1))

    @property
    def name(self) -> str:
        """Of the device, or of all of them, as `--device` says it."""
        name = self.device.name.partition("#")[0]
        if self.cluster is None:
            return name
        kind, devices = name.partition(":")[0], self.cluster.devices
        if name == f"{kind}:{self.device.units}":
            name = f"{kind}:{sum(device.units for device in devices)}"
        return f"{name},devices={len(devices)}"

    def close(self) -> None:
        """End threads and free memory."""
        if self.cluster is None:
            self.device.close()
            return
        self.cluster.link.close()
        for device in self.cluster.devices:
            device.close()


def open_backend(
    device: str,
    model: str,
    dtype: str,
    kv_tokens: int | None,
    progress: Progress,
    notice: Notice = lambda text: None,
) -> Backend:
    """Load what `--device` and `--model` name; `notice` is told what `auto` chose, and why.

    Raises StartupError.
    """
    if device == "auto":
        device = _choose_device(dtype, notice)
    kind, _, count = device.partition(":")
    if kind == "sim" and count.partition(",")[0] in known_gpus():
        return _open_sim_gpu(device, model, kv_tokens)
    if kind.partition(",")[0] == "cuda":
        from muxk.actors.cuda_backend import open_cuda_backend

        return open_cuda_backend(device, model, dtype, kv_tokens, progress)
    device, devices = _device_count(device)
    kind, _, count = device.partition(":")
    units = _unit_count(device, count) if count else None
    if kind == "sim" and devices == 1:
        return _open_sim(
            units or SIM_UNITS_DEFAULT, SIM_KV_TOKENS_DEFAULT if kv_tokens is None else kv_tokens
        )
    if kind in ("auto", "cpu"):
        tokens = KV_TOKENS_DEFAULT if kv_tokens is None else kv_tokens
        return _open_cpu(model, dtype, units, devices, tokens, progress)
    if kind == "sim":
        raise StartupError("devices of `sim` are single: use sim:h200,devices=N, which are modelled cards")
    known = "auto, cpu, cpu:N, cuda, cuda:N, sim:N (N units) or sim:h200"
    raise StartupError(f"unknown device {device!r}: use {known}")


def _choose_device(dtype: str, notice: Notice) -> str:
    """A card where one can be used, else the cores."""
    from muxk.actors.cuda_backend import choose_card

    chosen = choose_card(dtype)
    notice(chosen.reason)
    return chosen.device


def _open_sim_gpu(device: str, model: str, kv_tokens: int | None) -> Backend:
    """A model by its dimensions on a modelled card, with the contexts that it was trained for."""
    from muxk.actors.gpu_backend import open_gpu_backend

    gpu = open_gpu_backend(device, model, kv_tokens)
    longest = gpu.shape.context_max
    return replace(gpu.backend, max_context_tokens=min(longest, gpu.kv_tokens), model_context_tokens=longest)


def _device_count(device: str) -> tuple[str, int]:
    """`cpu:2,devices=2` as (`cpu:2`, 2)."""
    kind, comma, option = device.partition(",")
    name, _, count = option.partition("=")
    if not comma:
        return device, 1
    if name.strip() != "devices" or not count.isdecimal() or int(count) < 1:
        raise StartupError(f"device {device!r}: after the comma comes devices=N, the cores dealt out to N")
    return kind, int(count)


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


def _open_cpu(
    model: str, dtype: str, units: int | None, devices: int, kv_tokens: int, progress: Progress
) -> Backend:
    missing = [name for name in ("torch", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        raise StartupError(
            f"the cpu device needs {' and '.join(missing)}: pip install 'muxk[cpu]', or use --device sim"
        )
    cores = available_cores()
    if units is not None and units > len(cores):
        raise StartupError(f"--device cpu:{units} asks for more cores than the {len(cores)} there are")
    cores = cores[: units or len(cores)]
    if devices > len(cores):
        raise StartupError(f"devices={devices}: each needs a core, and there are {len(cores)}")
    prepare_process()
    from muxk.actors.cpu_identity import cpu_facts
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
    sizes, fingerprint = cpu_facts(open_weights(source).config)
    identity = Identity(sizes, dtype, fingerprint)
    if devices == 1:
        return Backend(CpuDevice(runner, cores), tokenizer, model, limit, identity=identity)
    from muxk.actors.cpu_cluster import share_cores

    cluster = share_cores(runner, cores, devices)
    return Backend(cluster.devices[0], tokenizer, model, limit, cluster, identity)


def device_for(device: str, policy: str, devices_min: int) -> str:
    """`--device`, with as many devices as the policy needs where nothing else was said.

    Raises StartupError for one device where the policy needs several.
    """
    if devices_min == 1 or "devices=" in device:
        count = _devices_of(device)
        if count < devices_min:
            raise StartupError(
                f"the policy {policy} needs {devices_min} devices or more, and {device} is {count}"
            )
        return device
    if device in ("auto", "cpu"):
        return f"cpu,devices={devices_min}"
    several = f"{device},devices={devices_min}"
    kind, _, card = device.partition(":")
    if kind.partition(",")[0] == "cuda":
        several = f"cpu,devices={devices_min} or sim:h200,devices={devices_min}, for a server has one card"
    elif kind == "sim" and card.partition(",")[0] not in known_gpus():
        several = f"sim:h200,devices={devices_min}"
    raise StartupError(
        f"the policy {policy} needs {devices_min} devices or more, and {device} is one: "
        f"use --device {several}"
    )


def _devices_of(device: str) -> int:
    """What `devices=` says in it; whoever opens the device complains about anything else."""
    for option in device.split(",")[1:]:
        name, _, count = option.partition("=")
        if name.strip() == "devices" and count.isdecimal():
            return int(count)
    return 1
