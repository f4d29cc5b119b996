"""The whole server over the CUDA device: the tokens of the CPU device, and a card that is lost under it."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from fake_streams import FakePartitions, FakeRunner, FakeStreams, fake_device
from model_driver import RandomWeights, tiny_config, tiny_runner
from muxk.client.aio import AsyncClient
from muxk.client.errors import RequestError
from muxk.kernel.device import Device
from muxk.kernel.devices.cpu import CpuDevice
from muxk.kernel.devices.cuda import CudaDevice, Opened
from muxk.models.cuda_load import load_cuda_runner
from muxk.models.tokenizer import ByteTokenizer
from served_device import generate, serve_device

pytestmark = pytest.mark.usefixtures("one_thread")

PAGES = 200
PROMPTS = {
    f"r{size}": np.random.default_rng(size).integers(0, 250, size).tolist() for size in (3, 17, 60, 150, 280)
}


def weights() -> RandomWeights:
    return RandomWeights(tiny_config(vocabulary=ByteTokenizer().vocabulary_size))


def card(streams: FakeStreams) -> CudaDevice:
    """Eight SMs, three splits, the real runner on torch's CPU device."""
    runner = load_cuda_runner(
        weights(), "cpu", torch.float32, device_units=8, pages=PAGES, chunk_tokens_max=128, rows_max=8
    )
    opened = Opened(streams, FakePartitions(8, (2, 4, 6)), runner, 0, (), {})

    def reopen() -> Opened:
        raise AssertionError("nothing was lost")

    return CudaDevice("cuda:0", opened, reopen)


def tokens_of(device: Device, folder: Path, policy: str) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}

    async def scenario(client: AsyncClient) -> None:
        got.update(await generate(client, PROMPTS, 12, temperature=0.8, seed=5))

    assert serve_device(device, folder, scenario, policy=policy) == "the scenario is over"
    return got


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    device = CpuDevice(tiny_runner(weights(), PAGES), cores=[0, 0])
    return tokens_of(device, tmp_path_factory.mktemp("cpu"), "muxwise")


@pytest.mark.parametrize("policy", ["muxwise", "chunked"])
def test_clients_get_the_tokens_of_the_cpu_device(
    wanted: dict[str, list[int]], tmp_path: Path, policy: str
) -> None:
    streams = FakeStreams()
    assert tokens_of(card(streams), tmp_path, policy) == wanted
    assert all(len(tokens) == 12 for tokens in wanted.values())
    streams.close()


def test_the_device_can_be_measured_at_start_and_tells_its_memory_in_the_state(tmp_path: Path) -> None:
    streams = FakeStreams()
    states: list[dict[str, object]] = []

    async def scenario(client: AsyncClient) -> None:
        await generate(client, {"r": [1, 2, 3]}, 4)
        states.append(await client.state())

    device = fake_device(streams, FakeRunner(streams, pages=PAGES), units=4, decode_units=(1, 2))
    serve_device(device, tmp_path, scenario, calibrate=True)
    streams.close()
    shown = states[0]["arbiter"]["device_state"]  # type: ignore[index]
    assert shown["memory"] == {"kv_pages": PAGES}
    assert shown["graphs"]["bytes"] > 0
    assert set(shown["lanes"]) == {"whole", "decode@1", "prefill@3", "decode@2", "prefill@2"}


def test_no_page_is_written_while_another_lane_uses_it(tmp_path: Path) -> None:
    """Shared prefixes, evictions and aborts on a pool that is too small, on kernels that take their time: the
    streams fail the card when a page that one of them works on is written by another."""
    streams = FakeStreams()
    runner = FakeRunner(streams, pages=40, item_s=0.001)
    device = fake_device(streams, runner, units=4, decode_units=(1, 2))
    prefix = list(range(32))
    got: dict[str, list[int]] = {}

    async def one(client: AsyncClient, number: int) -> None:
        prompt = [*prefix, *range(number, number + 40 + 11 * (number % 7))]
        stream = await client.submit(
            token_ids=prompt, request_id=f"r{number}", max_tokens=30, ignore_eos=True, temperature=0.0
        )
        if number % 5 == 4:
            await stream.deltas()
            await client.abort(stream.request_id)
        result = await stream.result()
        got[f"r{number}"] = list(result.token_ids)

    async def scenario(client: AsyncClient) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(24):
                tasks.start_soon(one, client, number)

    assert serve_device(device, tmp_path, scenario) == "the scenario is over"
    assert len(got) == 24
    assert all(len(got[f"r{number}"]) == 30 for number in range(24) if number % 5 != 4)
    assert device.describe()["rebuilds"] == 0
    streams.close()


def test_a_lost_card_fails_its_requests_with_the_reason_and_serves_later_ones(tmp_path: Path) -> None:
    streams = FakeStreams()
    runner = FakeRunner(streams, pages=PAGES)
    device = fake_device(streams, runner, units=4, decode_units=(2,))
    reasons: list[str] = []
    later: dict[str, list[int]] = {}

    async def one(client: AsyncClient, name: str) -> None:
        stream = await client.submit(token_ids=PROMPTS["r60"], request_id=name, max_tokens=400)
        with pytest.raises(RequestError) as failed:
            await stream.result()
        reasons.append(str(failed.value))

    async def scenario(client: AsyncClient) -> None:
        async with anyio.create_task_group() as tasks:
            for name in ("a", "b"):
                tasks.start_soon(one, client, name)
            while sum(call == "decode" for call, _ in runner.ran) < 10:
                await anyio.sleep(0.001)
            streams.lose()
        later.update(await generate(client, {"c": PROMPTS["r17"], "d": PROMPTS["r17"]}, 8, temperature=0.0))

    assert serve_device(device, tmp_path, scenario) == "the scenario is over"
    assert len(reasons) == 2
    assert all("illegal memory access" in reason for reason in reasons), reasons
    assert later["c"] == later["d"]
    assert len(later["c"]) == 8
    streams.close()


def test_a_server_whose_card_does_not_come_back_ends_with_the_reason(tmp_path: Path) -> None:
    streams = FakeStreams()

    def reopen() -> Opened:
        raise RuntimeError("CUDA error: unknown error")

    device = fake_device(streams, FakeRunner(streams, pages=PAGES), units=4, decode_units=(2,), reopen=reopen)

    async def scenario(client: AsyncClient) -> None:
        streams.lose()
        stream = await client.submit(token_ids=[1, 2, 3], request_id="a", max_tokens=4)
        with pytest.raises(RequestError):
            await stream.result()
        while client.connected:
            await anyio.sleep(0.001)

    reason = serve_device(device, tmp_path, scenario)
    assert "start a new one" in reason
    assert "gave up after 3 restarts" in reason
    streams.close()
