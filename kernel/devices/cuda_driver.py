"""The CUDA driver calls that muxk makes, through `cuda.bindings.driver`: typed, and each return code checked.

Nothing of CUDA is imported before `open_driver`. What is missing (the bindings, the library, a card) is told
as `CudaUnavailable` with a remedy, a call that this driver is too old for as `CallMissing`, any other failure
as `CudaError`. Handles are the bindings' own objects and opaque here; `stream_handle` gives the raw number
that torch takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NewType

Resource = NewType("Resource", object)
"""A set of SMs, as the driver describes it: valid for the process."""
GreenContext = NewType("GreenContext", object)
PrimaryContext = NewType("PrimaryContext", object)
Stream = NewType("Stream", object)

CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
CONNECTIONS_MAX = 32
"""Hardware queues; with the default of 8, streams of two lanes can share one and wait for each other."""

HINTS: Mapping[str, str] = {
    "CUDA_ERROR_NO_DEVICE": "no card is visible: look at nvidia-smi and at CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_OUT_OF_MEMORY": "the card's memory is full: look at nvidia-smi for other processes on it",
    "CUDA_ERROR_SYSTEM_NOT_READY": "on a machine with NVSwitch, start nvidia-fabricmanager",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "kernel module and libcuda.so.1 differ: restart after an update",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "take the cuda-compat libraries out of LD_LIBRARY_PATH",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the card for itself: look at its compute mode",
    "CUDA_ERROR_STUB_LIBRARY": "a toolkit's stub of libcuda.so.1 was found before the driver's",
    "CUDA_ERROR_UNKNOWN": "nvidia-smi or the kernel log (Xid) may say more",
}


class CudaUnavailable(Exception):
    """CUDA can not be used in this process at all."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


class CudaError(Exception):
    """A driver call failed; `code` is the name of its return code, such as CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, call: str, code: str, explanation: str) -> None:
        hint = f" ({HINTS[code]})" if code in HINTS else ""
        super().__init__(f"{call} failed: {explanation}{hint}, {code}")
        self.call = call
        self.code = code


class CallMissing(CudaError):
    """The installed driver, or the installed bindings, do not have the call."""

    def __init__(self, call: str, holder: str) -> None:
        super().__init__(call, "MISSING", f"it is not in the {holder}")


@dataclass(frozen=True)
class SmResource:
    """SMs of a device or of a part of it."""

    handle: Resource
    units: int
    minimum: int
    """Fewest SMs of a partition; 0 when the driver does not say, before CUDA 13."""
    alignment: int
    """A partition's SMs are a multiple of it; 0 when the driver does not say."""


@dataclass(frozen=True)
class Card:
    """A device as CUDA counts them, after CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    capability: tuple[int, int]
    units: int
    """SMs, of the MIG instance where there is one."""
    memory_bytes: int


def prepare_process() -> None:
    """Settings that CUDA reads at its first call; what the user has set stays."""
    os.environ.setdefault(CONNECTIONS_VARIABLE, str(CONNECTIONS_MAX))


def version_text(version: int) -> str:
    """13010 -> `13.1`, as CUDA encodes its versions."""
    return f"{version // 1000}.{version % 1000 // 10}"


def open_driver() -> Driver:
    """Load the bindings and the driver's library, and initialise it. Raises CudaUnavailable."""
    prepare_process()
    try:
        from cuda.bindings import driver as api
    except ImportError as error:
        raise CudaUnavailable(
            f"the package cuda-bindings is not installed ({error})", "pip install 'muxk[cuda]'"
        ) from error
    driver = Driver(api)
    try:
        driver.call("cuInit", 0)
    except CallMissing as error:
        raise CudaUnavailable(
            "the NVIDIA driver's library libcuda.so.1 can not be loaded", "install the NVIDIA driver"
        ) from error
    except CudaError as error:
        raise CudaUnavailable(str(error), "nvidia-smi must list the card") from error
    return driver


class Driver:
    """Checked calls. Raises CudaError from each of them; safe for use from several threads."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def call(self, name: str, *arguments: object) -> Any:
        """The values behind the return code: none, one, or a tuple of them."""
        function = getattr(self._api, name, None)
        if function is None:
            raise CallMissing(name, "installed cuda-bindings")
        try:
            code, *values = function(*arguments)
        except RuntimeError as error:  # the bindings' way to say that the library lacks the symbol
            raise CallMissing(name, "installed driver") from error
        except ValueError as error:  # a return code that is newer than the bindings
            raise CudaError(name, "an unknown code", str(error)) from error
        if int(code) != 0:
            raise CudaError(name, code.name, self._explain(code))
        return values[0] if len(values) == 1 else tuple(values)

    def _explain(self, code: object) -> str:
        """The driver's own sentence for a return code."""
        try:
            error, text = self._api.cuGetErrorString(code)
        except RuntimeError:
            return "no explanation"
        return text.decode() if int(error) == 0 and text else "no explanation"

    def version(self) -> int:
        """Of the CUDA that the driver implements, as `version_text` reads it."""
        return int(self.call("cuDriverGetVersion"))

    def count(self) -> int:
        """Devices that are visible to this process."""
        return int(self.call("cuDeviceGetCount"))

    def card(self, index: int) -> Card:
        device = self._device(index)
        attributes = self._api.CUdevice_attribute
        major, minor, units = (
            int(self.call("cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device))
            for name in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
        )
        name = bytes(self.call("cuDeviceGetName", 256, device)).split(b"\0")[0].decode(errors="replace")
        return Card(index, name, (major, minor), units, int(self.call("cuDeviceTotalMem", device)))

    def _device(self, index: int) -> object:
        device: object = self.call("cuDeviceGet", index)
        return device

    def retain_primary(self, index: int) -> PrimaryContext:
        """The context that torch uses too; each retain wants a release."""
        return PrimaryContext(self.call("cuDevicePrimaryCtxRetain", self._device(index)))

    def release_primary(self, index: int) -> None:
        self.call("cuDevicePrimaryCtxRelease", self._device(index))

    @contextmanager
    def current(self, context: PrimaryContext) -> Iterator[None]:
        """Make the context current in this thread, and then the one that was."""
        self.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def memory_free(self) -> int:
        """Bytes free on the device of the current context."""
        free, _ = self.call("cuMemGetInfo")
        return int(free)

    def priorities(self) -> tuple[int, int]:
        """(least, greatest) of streams in the current context; a lower number runs first."""
        least, greatest = self.call("cuCtxGetStreamPriorityRange")
        return int(least), int(greatest)

    def sm_resource(self, index: int) -> SmResource:
        """All SMs of a device."""
        return self._sms(self.call("cuDeviceGetDevResource", self._device(index), self._sm_type()))

    def split_by_count(self, whole: SmResource, units: int) -> tuple[SmResource, SmResource]:
        """(at least so many SMs, the others). The driver may round up. Since CUDA 12.4."""
        groups, count, rest = self.call("cuDevSmResourceSplitByCount", 1, whole.handle, 0, units)
        if count != 1:
            raise CudaError("cuDevSmResourceSplitByCount", "no group", f"{count} groups came of {units} SMs")
        return self._sms(groups[0]), self._sms(rest)

    def split_structured(self, whole: SmResource, units: int) -> tuple[SmResource, SmResource]:
        """(exactly so many SMs, the others), both of SMs that can run clusters as far as that goes.

        The first group keeps the device's structure; the second, filled up with what fits none, keeps it for
        all but those. Since CUDA 13.1.
        """
        kind = getattr(self._api, "CU_DEV_SM_RESOURCE_GROUP_PARAMS", None)
        if kind is None:
            raise CallMissing("cuDevSmResourceSplit", "installed cuda-bindings")
        wanted, others = kind(), kind()
        wanted.smCount, others.smCount = units, whole.units - units
        others.flags = int(self._api.CUdevSmResourceGroup_flags.CU_DEV_SM_RESOURCE_GROUP_BACKFILL)
        groups, _ = self.call("cuDevSmResourceSplit", 2, whole.handle, 0, [wanted, others])
        return self._sms(groups[0]), self._sms(groups[1])

    def green_context(self, index: int, sms: SmResource) -> GreenContext:
        """A context whose work runs on these SMs only."""
        description = self.call("cuDevResourceGenerateDesc", [sms.handle], 1)
        flags = int(self._api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        return GreenContext(self.call("cuGreenCtxCreate", description, self._device(index), flags))

    def green_units(self, context: GreenContext) -> int:
        """SMs that the driver says the context has."""
        return self._sms(self.call("cuGreenCtxGetDevResource", context, self._sm_type())).units

    def green_stream(self, context: GreenContext, priority: int) -> Stream:
        return Stream(self.call("cuGreenCtxStreamCreate", context, self._non_blocking(), priority))

    def plain_stream(self, priority: int) -> Stream:
        """On all SMs, in the current context."""
        return Stream(self.call("cuStreamCreateWithPriority", self._non_blocking(), priority))

    def stream_busy(self, stream: Stream) -> bool:
        """Work that was enqueued has not ended. False after work that failed: it has ended."""
        try:
            self.call("cuStreamQuery", stream)
        except CudaError as error:
            return error.code == "CUDA_ERROR_NOT_READY"
        return False

    def destroy_stream(self, stream: Stream) -> None:
        self.call("cuStreamDestroy", stream)

    def destroy_green(self, context: GreenContext) -> None:
        self.call("cuGreenCtxDestroy", context)

    def _sm_type(self) -> object:
        kind: object = self._api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        return kind

    def _non_blocking(self) -> int:
        return int(self._api.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def _sms(self, resource: Any) -> SmResource:
        sm = resource.sm
        minimum, alignment = (
            getattr(sm, name, 0) for name in ("minSmPartitionSize", "smCoscheduledAlignment")
        )
        return SmResource(Resource(resource), int(sm.smCount), int(minimum), int(alignment))


def stream_handle(stream: Stream) -> int:
    """The raw `CUstream`, for torch.cuda.ExternalStream."""
    return int(stream)  # type: ignore[call-overload, no-any-return]
