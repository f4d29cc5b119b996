"""Chunks, fused steps and carried tokens change when tokens are computed, never which."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from model_driver import (
    Driver,
    Generation,
    RandomWeights,
    columns,
    run_chunks,
    take,
    tiny_config,
    tiny_runner,
)
from muxk.kernel.work import RowExtras, SamplingColumns, int32_array, int32_bytes
from muxk.models.carried import CarriedTokensMissingError
from muxk.models.chunks import CHUNK_BYTES, CHUNK_TOKENS_LEAST, chunk_of, largest_chunk
from muxk.models.cpu_ops import CpuOperators, packed_fp16_works
from muxk.models.load import cpu_operators
from muxk.models.runner import ModelRunner

PROMPTS = [np.random.default_rng(size).integers(0, 101, size).tolist() for size in (5, 16, 1, 40, 33)]
STEPS = 6


@pytest.fixture(scope="module")
def runner(float32_operators: CpuOperators) -> ModelRunner:
    return tiny_runner(RandomWeights(tiny_config()), pages=500, operators=float32_operators)


@pytest.fixture(scope="module")
def exact_runner(operators_name: str) -> ModelRunner:
    """A runner whose products give a row the same bits whatever its batch."""
    if not packed_fp16_works():
        pytest.skip("FBGEMM's fp16 product needs x86 with AVX2")
    operators = cpu_operators("fp16", 8, native=operators_name == "native")
    return tiny_runner(RandomWeights(tiny_config()), 500, operators)


@pytest.fixture(scope="module")
def wanted(runner: ModelRunner) -> list[list[int]]:
    return [Driver(runner).generate([prompt], STEPS)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [1, 7, 16, 50, None])
@pytest.mark.parametrize("cuts", [(), (1, 2)])
def test_a_batch_gives_the_same_tokens_in_chunks_of_any_size(
    runner: ModelRunner, wanted: list[list[int]], chunk: int | None, cuts: tuple[int, ...]
) -> None:
    assert Driver(runner).generate(PROMPTS, STEPS, cuts=cuts, chunk=chunk) == wanted


def test_a_row_is_sampled_with_the_last_layer_of_the_chunk_that_ends_it(runner: ModelRunner) -> None:
    driver = Driver(runner)
    work = driver.prefill_work([driver.request(prompt, 1) for prompt in PROMPTS])
    sampled = [len(output.tokens) // 4 for output in run_chunks(runner, work, 10)]
    # The rows end after 5, 21, 22, 62 and 95 tokens.
    assert sampled == [1, 0, 2, 0, 0, 0, 1, 0, 0, 1]


def test_chunks_give_the_hidden_states_of_a_whole_prefill_to_the_last_bit(exact_runner: ModelRunner) -> None:
    if exact_runner.operators_name != "native":
        pytest.skip("torch's attention rounds differently for a row that reuses tokens")
    driver = Driver(exact_runner)
    requests = [driver.request(prompt, 1) for prompt in PROMPTS]
    work = driver.prefill_work(requests)
    whole = exact_runner.prefill_hidden(chunk_of(work, range(95)))
    for size in (1, 7, 16):
        again = driver.prefill_work([driver.request(prompt, 1) for prompt in PROMPTS])
        spans = [range(start, min(start + size, 95)) for start in range(0, 95, size)]
        parts = [exact_runner.prefill_hidden(chunk_of(again, span)) for span in spans]
        assert torch.equal(torch.cat(parts), whole), size


@pytest.mark.parametrize("chunk", [None, 16, 24, 9])
@pytest.mark.parametrize("cuts", [(), (1,)])
def test_a_row_may_reuse_pages_that_another_row_of_its_batch_writes(
    runner: ModelRunner, chunk: int | None, cuts: tuple[int, ...]
) -> None:
    """The second prompt begins with the first two pages of the first."""
    first = PROMPTS[3]
    second = [*first[:32], 7, 8, 9]
    alone = [Driver(runner).generate([prompt], 4)[0] for prompt in (first, second)]
    driver = Driver(runner)
    requests = [driver.request(first, 4), driver.request(second, 4)]
    requests[1].pages[:2] = requests[0].pages[:2]
    driver.prefill(requests, reused=[0, 32], cuts=cuts, chunk=chunk)
    for _ in range(3):
        driver.decode(requests)
    assert [request.output for request in requests] == alone


def started(driver: Driver, prompts: list[list[int]]) -> list[Generation]:
    requests = [driver.request(prompt, STEPS + 20) for prompt in prompts]
    driver.prefill(requests)
    return requests


@pytest.mark.parametrize("chunk", [7, 16, 100])
def test_fused_steps_give_the_tokens_of_separate_ones(
    runner: ModelRunner, wanted: list[list[int]], chunk: int
) -> None:
    driver = Driver(runner)
    decoding = started(driver, PROMPTS[:3])
    prompts = [driver.request(prompt, STEPS) for prompt in PROMPTS[3:]]
    work = driver.prefill_work(prompts)
    sampled = []
    for start in range(0, 73, chunk):
        step = driver.decode_work(decoding)
        decoded, prefilled = runner.fused(step, work, range(start, min(start + chunk, 73)))
        take(decoding, decoded.tokens)
        sampled += int32_array(prefilled.tokens).tolist()
    assert sampled == [tokens[0] for tokens in wanted[3:]]
    for request, tokens in zip(decoding, wanted, strict=False):
        assert request.output[:STEPS] == tokens[: len(request.output)]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_fused_step_writes_the_same_bits_as_separate_ones(exact_runner: ModelRunner, rows: int) -> None:
    """Keys and values of the last layer come from all products and attentions before it."""
    pools = []
    for fused in (True, False):
        exact_runner.kv[-1].keys.zero_()
        exact_runner.kv[-1].values.zero_()
        driver = Driver(exact_runner)
        decoding = started(driver, PROMPTS[:rows])
        work = driver.prefill_work([driver.request(prompt, STEPS) for prompt in PROMPTS[3:]])
        for tokens in (range(1), range(1, 30), range(30, 57), range(57, 73)):
            step = driver.decode_work(decoding)
            if fused:
                decoded, prefilled = exact_runner.fused(step, work, tokens)
            else:
                decoded = exact_runner.decode(step)
                prefilled = exact_runner.prefill(work, tokens, range(3))
            take(decoding, decoded.tokens)
        pools.append((exact_runner.kv[-1].keys.clone(), exact_runner.kv[-1].values.clone(), prefilled))
    assert torch.equal(pools[0][0], pools[1][0])
    assert torch.equal(pools[0][1], pools[1][1])
    assert pools[0][2] == pools[1][2]


def test_a_prompt_may_reuse_a_page_whose_last_token_the_fused_step_writes(runner: ModelRunner) -> None:
    """The page holds 15 prompt tokens of the row that decodes, and the token that it is fed."""
    driver = Driver(runner)
    decoding = started(driver, [PROMPTS[1][:15]])
    text = [*PROMPTS[1][:15], decoding[0].output[0], 7, 8, 9]
    wanted = Driver(runner).generate([text], 1)[0]
    other = driver.request(text, 1)
    other.pages[0] = decoding[0].pages[0]
    work = driver.prefill_work([other], reused=[16])
    _, prefilled = runner.fused(driver.decode_work(decoding), work, range(3))
    assert int32_array(prefilled.tokens).tolist() == wanted


def taking_turns(requests: list[Generation]) -> SamplingColumns:
    """A bias to a few tokens of each row's own, and a penalty on each time one was generated.

    So what a row says next depends on every token that it has said, the carried one too.
    """
    extras = tuple(
        RowExtras(
            row=row,
            frequency_penalty=3.0,
            repetition_penalty=1.1,
            prompt=int32_bytes(request.prompt),
            generated=int32_bytes(request.output),
            bias_ids=int32_bytes([row * 4, row * 4 + 1, row * 4 + 2]),
            bias_values=np.array([60.0, 58.0, 56.0], dtype="<f4").tobytes(),
        )
        for row, request in enumerate(requests)
    )
    return columns(len(requests), extras, temperature=[0.0, 0.5] * 2, seed=range(4))


def test_carried_tokens_give_what_known_ones_do(runner: ModelRunner) -> None:
    outputs = []
    for ahead in (0, 1):
        driver = Driver(runner)
        requests = started(driver, PROMPTS[:4])
        pending = driver.decode_work(requests, taking_turns(requests))
        tokens = runner.decode(pending).tokens
        for _ in range(8):
            if not ahead:
                take(requests, tokens)
            step = driver.decode_work(requests, taking_turns(requests), ahead=ahead)
            if ahead:
                take(requests, tokens)
            tokens = runner.decode(step).tokens
        take(requests, tokens)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]
    for row, output in enumerate(outputs[0]):
        assert set(output[1:]) == {row * 4, row * 4 + 1, row * 4 + 2}


def test_some_rows_of_a_step_may_be_carried_from_other_rows_of_a_fused_step(
    runner: ModelRunner, wanted: list[list[int]]
) -> None:
    driver = Driver(runner)
    requests = started(driver, PROMPTS)
    work = driver.prefill_work([driver.request(PROMPTS[0], 1)])
    first = driver.decode_work(requests)
    decoded, _ = runner.fused(first, work, range(5))
    # Rows 4, 0 and 2 go on in this order; the host knows the token of row 0.
    going = [requests[4], requests[0], requests[2]]
    take(requests, decoded.tokens)
    step = msgspec.structs.replace(
        driver.decode_work(going),
        tokens=int32_bytes([99, requests[0].output[-1], 99]),
        after_step=first.step_id,
        carried_rows=int32_bytes([0, 2]),
        carried_from=int32_bytes([4, 2]),
    )
    take(going, runner.decode(step).tokens)
    for row in (4, 0, 2):
        assert requests[row].output == wanted[row][:3]


def test_a_step_whose_carried_tokens_are_not_kept_fails_with_the_reason(runner: ModelRunner) -> None:
    driver = Driver(runner)
    requests = started(driver, PROMPTS[:2])
    first = driver.decode_work(requests)
    take(requests, runner.decode(first).tokens)
    wanting = driver.decode_work(requests, ahead=1)
    with pytest.raises(CarriedTokensMissingError, match=f"step {first.step_id + 7}; kept are those of"):
        runner.decode(msgspec.structs.replace(wanting, after_step=first.step_id + 7))
    with pytest.raises(CarriedTokensMissingError, match=r"row 5 of step .* which had 2 rows"):
        runner.decode(msgspec.structs.replace(wanting, carried_from=int32_bytes([0, 5])))
    runner.decode(wanting)
    runner.reset()
    with pytest.raises(CarriedTokensMissingError):
        runner.decode(wanting)


def test_a_chunk_may_be_as_large_as_scratch_memory_allows(runner: ModelRunner) -> None:
    """All of the longest prompt of SmolLM2, thousands of tokens of a 70B model, never less than the least."""
    assert runner.chunk_tokens_max == largest_chunk(tiny_config())
    assert largest_chunk(tiny_config(hidden=576, heads=9, kv_heads=3, head_dim=64)) >= 8192
    large = tiny_config(hidden=8192, heads=64, kv_heads=8, head_dim=128)
    assert 2048 <= largest_chunk(large) <= CHUNK_BYTES // (4 * large.hidden)
    assert largest_chunk(tiny_config(hidden=1_000_000)) == CHUNK_TOKENS_LEAST
