"""From `sim:h200,tp=2` and a model's name or `config.json` to a simulated GPU that serves it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from muxk.actors.backends import Backend, Cluster, Identity, StartupError
from muxk.kernel.devices.sim_gpu import SimGpu
from muxk.kernel.estimates import Estimates
from muxk.kernel.work import PAGE_SIZE
from muxk.models.tokenizer import ByteTokenizer
from muxk.policies.problems import did_you_mean
from muxk.profiles.cluster import DEVICES_MAX, open_cluster
from muxk.profiles.cost import DoesNotFit, kv_pages, open_gpu
from muxk.profiles.gpu import GpuError, known_gpus, load_gpu
from muxk.profiles.operators import TP_SIZES, ModelShape, ShapeError, known_models, load_shape
from muxk.profiles.perturbation import WORST, perturbed
from muxk.profiles.profile_file import digest
from muxk.profiles.scaling import NoSuchConstant, scaled

PREFIX = "sim:"
DTYPE = "bfloat16"
"""Of weights and KV in all cost models."""


@dataclass(frozen=True)
class GpuBackend:
    """A simulated GPU with a model on it."""

    device: SimGpu
    shape: ModelShape
    tp: int
    cluster: Cluster | None = None
    """All devices, if there are several; `device` is the first."""
    identity: Identity = field(default_factory=Identity)
    profile: Estimates | None = None
    """See `Backend`."""

    @property
    def kv_tokens(self) -> int:
        """What the KV pool of one device holds; page 0 is nobody's."""
        return (self.device.pages - 1) * PAGE_SIZE

    @property
    def backend(self) -> Backend:
        """What serving needs. Contexts are limited by the KV pool alone, as with scaled positions: a step
        costs the same with and without them."""
        return Backend(
            self.device,
            ByteTokenizer(),
            self.shape.name,
            self.kv_tokens,
            self.cluster,
            self.identity,
            self.profile,
        )


class GpuChoice(NamedTuple):
    """What `--device` says of simulated GPUs."""

    name: str
    tp: int
    devices: int
    off: float = 0.0
    """Share by which its constants are off, see `muxk.profiles.perturbation`."""
    off_seed: int | str = 0
    moved: tuple[tuple[str, float], ...] = ()
    """Constants and the factors that they are taken times."""


def parse_gpu(device: str) -> GpuChoice:
    """`sim:h200,tp=2,devices=4`. Raises StartupError."""
    name, *options = (part.strip() for part in device.removeprefix(PREFIX).lower().split(","))
    if not device.startswith(PREFIX) or name not in known_gpus():
        names = [PREFIX + known for known in known_gpus()]
        hint = did_you_mean(device.partition(",")[0], names)
        raise StartupError(
            f"unknown simulated GPU {device!r}{': ' + hint if hint else ''}; there are {', '.join(names)}, "
            "each with ,tp=2, 4 or 8 and ,devices=N"
        )
    moved = tuple(_moved(device, option) for option in options if "*" in option)
    options = [option for option in options if "*" not in option]
    given = dict(option.partition("=")[::2] for option in options)
    twice = len(given) < len(options)
    off, off_seed = _off(device, given.pop("off", "0%"))
    sizes = [given.pop("tp", "1"), given.pop("devices", "1")]
    tp, devices = (int(size) if size.isdecimal() and len(size) < 4 else 0 for size in sizes)
    if given or twice or tp not in TP_SIZES or not 1 <= devices <= DEVICES_MAX:
        raise StartupError(
            f"device {device!r}: after the card comes tp={', '.join(map(str, TP_SIZES))} (GPUs that work as "
            f"one device), devices=1 to {DEVICES_MAX}, off=15% (constants wrong by that much), "
            "host.wakeup_ns*1.3 (one constant times a factor), or nothing"
        )
    return GpuChoice(name, tp, devices, off, off_seed, moved)


def _moved(device: str, option: str) -> tuple[str, float]:
    """`host.wakeup_ns*1.3`. Raises StartupError."""
    constant, _, factor = option.partition("*")
    try:
        found = float(factor)
    except ValueError:
        found = 0.0
    if not 0.01 <= found <= 100:
        raise StartupError(f"device {device!r}: after * comes a factor from 0.01 to 100")
    return constant, found


def _off(device: str, text: str) -> tuple[float, int | str]:
    """`15%`, `15%:7` or `15%:worst` as a share and a seed. Raises StartupError."""
    percent, _, seed = text.partition(":")
    number = percent.removesuffix("%")
    known_seed = seed in ("", WORST) or (seed.isdecimal() and len(seed) < 10)
    if not (percent.endswith("%") and number.isdecimal() and len(number) < 3 and known_seed):
        raise StartupError(
            f"device {device!r}: after off= comes a percentage below 100, and if you like a seed or {WORST}: "
            "off=15%:7"
        )
    return int(number) / 100, WORST if seed == WORST else int(seed or "0")


def open_gpu_backend(device: str, model: str, kv_tokens: int | None = None, seed: int = 0) -> GpuBackend:
    """Raises StartupError: with the bytes, for a model that does not fit.

    Args:
        kv_tokens: of the KV pool of each device, if less than what fits beside the weights.
        seed: of the noise of its times.
    """
    choice = parse_gpu(device)
    if kv_tokens is not None and kv_tokens < PAGE_SIZE:
        raise StartupError(f"--kv-tokens {kv_tokens} is less than one page of {PAGE_SIZE} tokens")
    pages = None if kv_tokens is None else kv_tokens // PAGE_SIZE + 1
    try:
        shape = load_shape(model)
        try:
            return _open(choice, shape, pages, seed)
        except DoesNotFit as error:
            raise StartupError(f"{error}{_where_it_fits(choice, shape)}") from error
    except ShapeError as error:
        hint = did_you_mean(model, known_models()) if str(error).startswith("no model") else ""
        raise StartupError(f"{error}; {hint}" if hint else str(error)) from error
    except (GpuError, NoSuchConstant, OSError) as error:
        raise StartupError(str(error)) from error


def _where_it_fits(choice: GpuChoice, shape: ModelShape) -> str:
    """What to ask for when the weights leave no room; empty where only the KV pool asked for is too large."""
    if _fits(choice.name, shape, choice.tp):
        return ""
    enough = next((tp for tp in TP_SIZES if tp > choice.tp and _fits(choice.name, shape, tp)), None)
    if enough is None:
        return f". No {PREFIX}{choice.name} of up to tp={TP_SIZES[-1]} holds it"
    return f". It fits with --device {PREFIX}{choice.name},tp={enough}"


def _fits(gpu: str, shape: ModelShape, tp: int) -> bool:
    try:
        kv_pages(load_gpu(gpu), shape, tp)
    except (DoesNotFit, ShapeError):
        return False
    return True


def _open(choice: GpuChoice, shape: ModelShape, pages: int | None, seed: int) -> GpuBackend:
    profile = load_gpu(choice.name)
    if choice.off:
        profile = perturbed(profile, choice.off, choice.off_seed)
    for constant, factor in choice.moved:
        profile = scaled(profile, constant, factor)
    # How well it fits is no constant: what is said of it must make no profile of `muxk profile` stale.
    constants = msgspec.structs.replace(profile, held_out=())
    identity = Identity(msgspec.to_builtins(shape), DTYPE, digest((constants, choice.tp)))
    if choice.devices == 1:
        return GpuBackend(open_gpu(profile, shape, choice.tp, pages, seed), shape, choice.tp, None, identity)
    found = open_cluster(profile, shape, choice.tp, choice.devices, pages, seed)
    cluster = Cluster(found.devices, found.pages, found.link, found.devices)
    return GpuBackend(found.devices[0], shape, choice.tp, cluster, identity)
