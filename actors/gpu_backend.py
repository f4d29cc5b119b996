"""From `sim:h200,tp=2` and a model's name or `config.json` to a simulated GPU that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from muxk.actors.backends import Backend, StartupError
from muxk.kernel.devices.sim_gpu import SimGpu
from muxk.kernel.work import PAGE_SIZE
from muxk.models.tokenizer import ByteTokenizer
from muxk.policies.problems import did_you_mean
from muxk.profiles.cost import DoesNotFit, open_gpu
from muxk.profiles.gpu import GpuError, known_gpus, load_gpu
from muxk.profiles.operators import TP_SIZES, ModelShape, ShapeError, known_models, load_shape

PREFIX = "sim:"
TP_OPTIONS: Mapping[str, int] = {f"tp={size}": size for size in TP_SIZES}


@dataclass(frozen=True)
class GpuBackend:
    """A simulated GPU with a model on it."""

    device: SimGpu
    shape: ModelShape
    tp: int

    @property
    def kv_tokens(self) -> int:
        """What the KV pool holds; page 0 is nobody's."""
        return (self.device.pages - 1) * PAGE_SIZE

    @property
    def backend(self) -> Backend:
        """What serving needs. Contexts are limited by the KV pool alone, as with scaled positions: a step
        costs the same with and without them."""
        return Backend(self.device, ByteTokenizer(), self.shape.name, self.kv_tokens)


def parse_gpu(device: str) -> tuple[str, int]:
    """`sim:h200,tp=2` as (name, tp). Raises StartupError."""
    name, *options = (part.strip() for part in device.removeprefix(PREFIX).lower().split(","))
    if not device.startswith(PREFIX) or name not in known_gpus():
        names = [PREFIX + known for known in known_gpus()]
        hint = did_you_mean(device.partition(",")[0], names)
        raise StartupError(
            f"unknown simulated GPU {device!r}{': ' + hint if hint else ''}; there are {', '.join(names)}, "
            "each with ,tp=2, 4 or 8"
        )
    if len(options) > 1 or not all(option in TP_OPTIONS for option in options):
        raise StartupError(f"device {device!r}: after the card comes {', '.join(TP_OPTIONS)} or nothing")
    return name, TP_OPTIONS[options[0]] if options else 1


def open_gpu_backend(device: str, model: str, kv_tokens: int | None = None, seed: int = 0) -> GpuBackend:
    """Raises StartupError: with the bytes, for a model that does not fit.

    Args:
        kv_tokens: of the KV pool, if less than what fits beside the weights.
        seed: of the noise of its times.
    """
    name, tp = parse_gpu(device)
    if kv_tokens is not None and kv_tokens < PAGE_SIZE:
        raise StartupError(f"--kv-tokens {kv_tokens} is less than one page of {PAGE_SIZE} tokens")
    pages = None if kv_tokens is None else kv_tokens // PAGE_SIZE + 1
    try:
        shape = load_shape(model)
        return GpuBackend(open_gpu(load_gpu(name), shape, tp, pages, seed), shape, tp)
    except ShapeError as error:
        hint = did_you_mean(model, known_models()) if str(error).startswith("no model") else ""
        raise StartupError(f"{error}; {hint}" if hint else str(error)) from error
    except (GpuError, DoesNotFit, OSError) as error:
        raise StartupError(str(error)) from error
