"""The runner keeps requests apart: between layers, between lanes, and from probes."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest
import torch
from model_driver import Driver, RandomWeights, columns, tiny_config, tiny_runner
from muxk.kernel.device import Runner
from muxk.kernel.work import Phase, PrefillWork, ProbeWork, int32_array, int32_bytes
from muxk.models.cpu_ops import CpuOperators, packed_fp16_works
from muxk.models.load import cpu_operators
from muxk.models.runner import ModelRunner

PROMPTS = [np.random.default_rng(size).integers(0, 101, size).tolist() for size in (5, 16, 40, 90)]


@pytest.fixture(scope="module")
def runner(float32_operators: CpuOperators) -> ModelRunner:
    return tiny_runner(RandomWeights(tiny_config()), pages=400, operators=float32_operators)


def prefill_work(batch_id: int, page: int) -> PrefillWork:
    return PrefillWork(
        batch_id=batch_id,
        requests=(1,),
        tokens=int32_bytes([3, 4, 5]),
        new_tokens=(3,),
        reused_tokens=(0,),
        page_table=int32_bytes([page]),
        pages_per_row=1,
        sampling=columns(1),
    )


def run(runner: ModelRunner, work: PrefillWork, first_layer: int, last_layer: int) -> bytes:
    return runner.prefill(work, range(sum(work.new_tokens)), range(first_layer, last_layer)).tokens


def test_it_is_a_runner_of_the_device_protocol(runner: ModelRunner) -> None:
    port: Runner = runner
    assert (port.layers, port.pages) == (3, 400)


def test_a_parked_prefill_is_not_disturbed_by_another_that_runs_in_between(runner: ModelRunner) -> None:
    wanted = int32_array(run(runner, prefill_work(1, page=5), 0, 3)).tolist()
    first, second = prefill_work(2, page=6), prefill_work(3, page=7)
    assert run(runner, first, 0, 2) == b""
    assert run(runner, second, 0, 1) == b""
    assert int32_array(run(runner, first, 2, 3)).tolist() == wanted
    assert int32_array(run(runner, second, 1, 3)).tolist() == wanted


def test_a_parked_token_takes_the_bytes_that_limits_count(runner: ModelRunner) -> None:
    work = msgspec.structs.replace(prefill_work(4, page=5), tokens=int32_bytes([3] * 16), new_tokens=(16,))
    run(runner, work, 0, 1)
    hidden = runner._parked[4].hidden
    assert hidden.nbytes == hidden.shape[0] * runner.parked_bytes_per_token
    assert hidden.shape[0] >= 16
    runner.discard(4)


def test_a_discarded_prefill_is_gone_and_an_unknown_one_is_ignored(runner: ModelRunner) -> None:
    work = prefill_work(9, page=5)
    run(runner, work, 0, 1)
    runner.discard(9)
    runner.discard(12345)
    with pytest.raises(KeyError):
        run(runner, work, 1, 3)


def test_probes_write_page_0_only(runner: ModelRunner) -> None:
    before = [(layer.keys[1:].clone(), layer.values[1:].clone()) for layer in runner.kv]
    for phase, rows, new, context in (
        (Phase.DECODE, 5, 1, 90),
        (Phase.PREFILL, 3, 20, 40),
        (Phase.PREFILL, 1, 7, 0),
    ):
        probe = ProbeWork(probe_id=1, phase=phase, units=1, rows=rows, new_tokens=new, context_tokens=context)
        runner.probe(probe, 0, 3)
        runner.probe(probe, 1, 2)
    for layer, (keys, values) in zip(runner.kv, before, strict=True):
        assert torch.equal(layer.keys[1:], keys)
        assert torch.equal(layer.values[1:], values)


def test_a_batch_and_its_rows_alone_give_the_same_tokens(runner: ModelRunner) -> None:
    together = Driver(runner).generate(PROMPTS, 12)
    assert together == [Driver(runner).generate([prompt], 12)[0] for prompt in PROMPTS]


@pytest.mark.skipif(not packed_fp16_works(), reason="FBGEMM's fp16 product needs x86 with AVX2")
def test_logits_of_a_row_do_not_depend_on_its_batch_to_the_last_bit(operators_name: str) -> None:
    weights = RandomWeights(tiny_config(max_context_tokens=2048))
    runner = tiny_runner(weights, 400, cpu_operators("fp16", 8, native=operators_name == "native"))
    table = np.arange(1, 8 * 50 - 7, dtype=np.int32)[:392].reshape(8, 49)
    tokens = np.arange(8, dtype=np.int32) + 3
    positions = np.array([700, 3, 90, 91, 15, 16, 300, 0], dtype=np.int32)
    generator = torch.Generator().manual_seed(1)
    for layer in runner.kv:
        layer.keys.copy_(torch.randn(layer.keys.shape, generator=generator))
        layer.values.copy_(torch.randn(layer.values.shape, generator=generator))
    logits, order = runner.decode_logits(tokens, positions, table)
    for place, row in enumerate(order):
        rows = slice(row, row + 1)
        alone, _ = runner.decode_logits(tokens[rows], positions[rows], table[rows])
        assert torch.equal(alone[0], logits[place]), row


def test_rows_may_join_and_leave_a_decode_batch_in_any_order(runner: ModelRunner) -> None:
    wanted = Driver(runner).generate(PROMPTS, 9)
    driver = Driver(runner)
    requests = [driver.request(prompt, 9) for prompt in PROMPTS]
    for request in requests:
        driver.prefill([request])
    rounds = ((0, 1, 2, 3), (3, 0), (2, 1), (1, 3, 0, 2), (0,), (3, 2, 1))
    for order in rounds * 2:
        driver.decode([requests[row] for row in order])
    for request, tokens in zip(requests, wanted, strict=True):
        assert request.output[:9] == tokens


def test_a_seeded_request_gives_the_same_tokens_alone_and_beside_greedy_ones(runner: ModelRunner) -> None:
    outputs = []
    for others in (0, 2):
        driver = Driver(runner)
        requests = [driver.request(prompt, 10) for prompt in [PROMPTS[2], *PROMPTS[:others]]]
        zeros = [0.0] * others
        sampling = columns(others + 1, temperature=[1.0, *zeros], seed=[77, *zeros], top_p=[0.9, *zeros])
        driver.prefill(requests, sampling=sampling)
        for _ in range(9):
            driver.decode(requests, sampling)
        outputs.append(requests[0].output)
    assert outputs[0] == outputs[1]
    assert outputs[0] != Driver(runner).generate([PROMPTS[2]], 10)[0]


def test_two_lanes_may_run_at_once(runner: ModelRunner) -> None:
    wanted = Driver(runner).generate(PROMPTS, 30)
    decoding = Driver(runner)
    requests = [decoding.request(prompt, 30) for prompt in PROMPTS]
    decoding.prefill(requests)
    prefilling = Driver(runner)
    prefilling._free = decoding._free
    found: list[int] = []

    def prefill_lane() -> None:
        torch.set_num_threads(1)
        for _ in range(15):
            request = prefilling.request(PROMPTS[3], 1)
            prefilling.prefill([request], cuts=(1, 2))
            found.append(request.output[0])

    lane = threading.Thread(target=prefill_lane)
    lane.start()
    for _ in range(29):
        decoding.decode(requests)
    lane.join()
    assert [request.output for request in requests] == wanted
    assert found == [wanted[3][0]] * 15
