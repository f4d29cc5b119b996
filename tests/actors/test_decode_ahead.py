"""Two decode steps in flight: the second takes its tokens on the device, an end of sequence wastes one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from muxk.actors import protocol as wire
from muxk.kernel.device import Lane
from muxk.kernel.devices.sim import SimCosts
from muxk.kernel.work import DecodeWork, Item, int32_array
from virtual_server import MS, S, VirtualServer, expected_tokens

HOST_BOUND = SimCosts(launch_ns=4 * MS)


def policy(ahead: int) -> wire.SwapPolicy:
    source = f"""
apiVersion: muxk/v1alpha1
kind: SchedulingPolicy
metadata: {{name: ahead-{ahead}}}
spec:
  extends: muxwise
  limits: {{decode_ahead: {ahead}}}
"""
    return wire.SwapPolicy(source, "ahead.yaml")


def watch(server: VirtualServer) -> list[DecodeWork]:
    """The decode steps that are launched from now on."""
    steps: list[DecodeWork] = []
    launch = server.device.launch

    def note(lane: Lane, item: Item, after: Sequence[int]) -> None:
        if isinstance(item.work, DecodeWork):
            steps.append(item.work)
        launch(lane, item, after)

    server.device.launch = note  # type: ignore[method-assign]
    return steps


def test_a_step_queued_behind_another_hides_the_time_of_a_launch() -> None:
    median_ms = {}
    for ahead in (0, 1):
        server = VirtualServer(costs=HOST_BOUND)
        server.send(10 * S, policy(ahead))
        server.submit(20 * S, "it", prompt_token_ids=[65] * 30, max_tokens=60, temperature=0, ignore_eos=True)
        server.run_until(30 * S)
        assert server.outcome("it").tokens == expected_tokens([65] * 30, 60)
        median_ms[ahead] = sorted(server.outcome("it").gaps_ms)[30]
        server.check_whole()
    assert median_ms[1] < median_ms[0] - 3.5


def test_every_token_but_the_first_of_a_lone_stream_is_carried_on_the_device() -> None:
    server = VirtualServer()
    server.submit(20 * S, "it", prompt_token_ids=[65] * 30, max_tokens=40, temperature=0, ignore_eos=True)
    server.run_until(19 * S)
    steps = watch(server)
    server.run_until(30 * S)
    carried = [len(int32_array(step.carried_rows)) for step in steps]
    assert carried == [0] + [1] * 38
    assert server.outcome("it").tokens == expected_tokens([65] * 30, 40)


def test_an_end_of_sequence_wastes_one_row_of_one_step_and_no_more() -> None:
    prompts = ([97 + i % 26, 97 + i // 26 % 26, 97 + i // 676] for i in range(5000))
    prompt = next(one for one in prompts if 3 < len(expected_tokens(one, 20, stop_at_end=True)) < 20)
    tokens = expected_tokens(prompt, 20, stop_at_end=True)
    server = VirtualServer()
    server.submit(20 * S, "ends", prompt_token_ids=prompt, max_tokens=20, temperature=0)
    server.run_until(19 * S)
    steps = watch(server)
    server.run_until(30 * S)
    assert server.outcome("ends").tokens == tokens
    assert len(steps) == len(tokens)  # one for each token after the first, and the wasted one
    server.check_whole()


@pytest.mark.parametrize("seed", range(6))
def test_swaps_between_policies_that_queue_ahead_fuse_or_do_neither_change_no_token(seed: int) -> None:
    server = VirtualServer(kv_tokens=2048, seed=seed, jitter=True)
    for index in range(10):
        prompt = [97 + (i * 3 + index) % 26 for i in range(20 + 37 * index)]
        server.submit(
            20 * S + index * 31 * MS,
            f"r{index}",
            prompt_token_ids=prompt,
            max_tokens=60,
            temperature=0.7,
            seed=index,
            ignore_eos=True,
        )
    chunked = (
        "{apiVersion: muxk/v1alpha1, kind: SchedulingPolicy, metadata: {name: c}, spec: {extends: chunked}}"
    )
    for turn in range(12):
        command = wire.SwapPolicy(chunked, "c.yaml") if turn % 3 == 2 else policy(turn % 3)
        server.send(20 * S + turn * 47 * MS, command)
    server.run_until(60 * S)
    for index in range(10):
        prompt = [97 + (i * 3 + index) % 26 for i in range(20 + 37 * index)]
        expected = expected_tokens(prompt, 60, seed=index, temperature=0.7)
        assert server.outcome(f"r{index}").tokens == expected
    assert server.describe("arbiter")["counts"]["policy swaps"] == 12
    server.check_whole()
