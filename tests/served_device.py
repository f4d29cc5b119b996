"""A whole server in real time, in this process, over a device that a test gives, and clients of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
from muxk.actors.backends import Backend
from muxk.actors.system import build_specs
from muxk.client.aio import AsyncClient
from muxk.kernel.device import Device
from muxk.kernel.ingress import SEND_BOUND, Ingress
from muxk.kernel.realtime import RealtimeRuntime
from muxk.kernel.trace import Trace
from muxk.models.tokenizer import ByteTokenizer
from muxk.policies.engine import load_policy

Scenario = Callable[[AsyncClient], Awaitable[None]]


def serve_device(
    device: Device,
    folder: Path,
    scenario: Scenario,
    *,
    policy: str = "muxwise",
    context: int = 512,
    calibrate: bool = False,
    send_bound: int = SEND_BOUND,
) -> str:
    """Run the scenario against a server over the device; why the server stopped. Closes the device.

    `send_bound` is how many frames ZeroMQ takes for a client that does not read.
    """
    backend = Backend(device, ByteTokenizer(), "made up", context)

    async def run() -> str:
        ready = anyio.Event()
        specs = build_specs(backend, load_policy(policy, {}), seed=1, on_ready=ready.set, calibrate=calibrate)
        endpoint = f"ipc://{folder}/socket"
        ingress = Ingress(endpoint, send_bound=send_bound)
        runtime = RealtimeRuntime(specs, trace=Trace(), ingress=ingress, report_directory=folder)
        device.start(runtime.port("arbiter"))
        reasons: list[str] = []

        async def serve() -> None:
            reasons.append(await runtime.run())

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                await ready.wait()
                async with AsyncClient(endpoint) as client:
                    await scenario(client)
                runtime.request_stop("the scenario is over")
        return reasons[0]

    with _closing(device):
        return anyio.run(run)


@contextmanager
def _closing(device: Device) -> Iterator[None]:
    try:
        yield
    finally:
        device.close()


async def generate(
    client: AsyncClient, prompts: dict[str, list[int]], tokens: int, **sampling: object
) -> dict[str, list[int]]:
    """The tokens of each prompt, all asked for at once."""
    got: dict[str, list[int]] = {}

    async def one(name: str, prompt: list[int]) -> None:
        stream = await client.submit(
            token_ids=prompt, request_id=name, max_tokens=tokens, ignore_eos=True, **sampling
        )
        got[name] = list((await stream.result()).token_ids)

    async with anyio.create_task_group() as tasks:
        for name, prompt in prompts.items():
            tasks.start_soon(one, name, prompt)
    return got
