"""What the device calls of torch.cuda, bound against the torch that is installed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (torch.cuda.ExternalStream.__new__, (torch.cuda.ExternalStream, 1), {"device": 0}),
    (torch.cuda.Event.__new__, (torch.cuda.Event,), {"enable_timing": True}),
    (torch.cuda.Event.record, (None, None), {}),
    (torch.cuda.Event.query, (None,), {}),
    (torch.cuda.Event.elapsed_time, (None, None), {}),
    (torch.cuda.Stream.wait_event, (None, None), {}),
    (torch.cuda.Stream.query, (None,), {}),
    (torch.cuda.stream, (None,), {}),
    (torch.cuda.set_device, (0,), {}),
    (torch.cuda.mem_get_info, (0,), {}),
    (torch.cuda.default_stream, (0,), {}),
    (torch.cuda.synchronize, (0,), {}),
    (torch.cuda.graph.__init__, (None, None), {"stream": None, "capture_error_mode": "thread_local"}),
    (torch.cuda.CUDAGraph.replay, (None,), {}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: getattr(call[0], "__qualname__", ""))
def test_a_call_of_the_device_fits_torchs_signature(
    call: tuple[Any, tuple[Any, ...], dict[str, Any]],
) -> None:
    function, arguments, keywords = call
    inspect.signature(function).bind(*arguments, **keywords)


def test_the_stream_and_event_classes_have_what_the_protocols_promise() -> None:
    from muxk.kernel.devices.cuda_streams import (
        CudaEvent,
        CudaStream,
        CudaStreams,
        TorchEvent,
        TorchStream,
        TorchStreams,
    )

    for protocol, own in ((CudaEvent, TorchEvent), (CudaStream, TorchStream), (CudaStreams, TorchStreams)):
        for name, function in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                wanted, found = inspect.signature(function), inspect.signature(getattr(own, name))
                assert list(wanted.parameters) == list(found.parameters), (own, name)
