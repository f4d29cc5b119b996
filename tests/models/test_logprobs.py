"""Log-probabilities of sampled and prompt tokens are those of transformers, however the work is cut."""

from __future__ import annotations

from typing import Any

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
from muxk.kernel.work import RowExtras, RowLogprobs, SamplingColumns, int32_bytes
from muxk.models.cpu_ops import CpuOperators, packed_fp16_works
from muxk.models.load import cpu_operators
from muxk.models.runner import ModelRunner
from muxk.models.sampling_logprobs import HEAD_ROWS, Asked, logprobs_of
from transformers_reference import reference_model

PROMPTS = [np.random.default_rng(size).integers(0, 101, size).tolist() for size in (70, 3, 150, 20)]
WEIGHTS = RandomWeights(tiny_config())


@pytest.fixture(scope="module")
def runner(float32_operators: CpuOperators) -> ModelRunner:
    return tiny_runner(WEIGHTS, pages=500, operators=float32_operators)


@pytest.fixture(scope="module")
def exact_runner(operators_name: str) -> ModelRunner:
    """A runner whose results for a row are the same bits whatever its batch."""
    if not packed_fp16_works():
        pytest.skip("FBGEMM's fp16 product needs x86 with AVX2")
    return tiny_runner(WEIGHTS, 500, cpu_operators("fp16", 8, native=operators_name == "native"))


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model(WEIGHTS)


def reference_logprobs(reference: Any, tokens: list[int]) -> torch.Tensor:
    """float32[tokens, vocabulary]: of the token after each."""
    with torch.inference_mode():
        logprobs: torch.Tensor = torch.log_softmax(reference(torch.tensor([tokens])).logits[0], dim=-1)
    return logprobs


def check(report: RowLogprobs, wanted: torch.Tensor, top: int) -> None:
    """`wanted` float32[vocabulary] is transformers' answer for the position."""
    assert report.logprob == pytest.approx(float(wanted[report.token]), abs=2e-4)
    # Tokens that are as likely to 2e-4 may be in either order.
    rank = int((wanted > wanted[report.token]).sum()) + 1
    near = int(((wanted - wanted[report.token]).abs() < 4e-4).sum()) - 1
    assert abs(report.rank - rank) <= near
    assert len(report.top_ids) == len(report.top_logprobs) == top
    largest = wanted.sort(descending=True).values[:top]
    np.testing.assert_allclose(report.top_logprobs, largest.numpy(), atol=4e-4)
    np.testing.assert_allclose(report.top_logprobs, wanted[list(report.top_ids)].numpy(), atol=4e-4)


@pytest.mark.parametrize("chunk", [None, 7, 16])
def test_prompt_logprobs_are_those_of_transformers(
    runner: ModelRunner, reference: Any, chunk: int | None
) -> None:
    assert len(PROMPTS[2]) > 2 * HEAD_ROWS
    driver = Driver(runner)
    work = driver.prefill_work(
        [driver.request(prompt, 1) for prompt in PROMPTS], prompt_logprobs=((2, 0), (1, 5), (0, 3))
    )
    outputs = run_chunks(runner, work, chunk, cuts=(2,))
    for output in outputs:
        places = [(report.row, report.position) for report in output.prompt_logprobs]
        assert places == sorted(places)
    reports = [report for output in outputs for report in output.prompt_logprobs]
    for row, top in ((0, 3), (1, 5), (2, 0)):
        of_row = [report for report in reports if report.row == row]
        prompt = PROMPTS[row]
        assert [(report.position, report.token) for report in of_row] == list(enumerate(prompt))[1:]
        wanted = reference_logprobs(reference, prompt)
        for report in of_row:
            check(report, wanted[report.position - 1], top)
    assert not [report for report in reports if report.row == 3]


def test_prompt_logprobs_do_not_depend_on_chunks_or_fusion_to_the_last_bit(
    exact_runner: ModelRunner,
) -> None:
    if exact_runner.operators_name != "native":
        pytest.skip("torch's attention rounds differently for a row that reuses tokens")
    wanted = None
    for chunk in (None, 11, 100):
        driver = Driver(exact_runner)
        asked = ((0, 4), (2, 4))
        work = driver.prefill_work([driver.request(prompt, 1) for prompt in PROMPTS], prompt_logprobs=asked)
        reports = {r for output in run_chunks(exact_runner, work, chunk) for r in output.prompt_logprobs}
        wanted = wanted or reports
        assert reports == wanted
    driver = Driver(exact_runner)
    decoding = driver.request([1, 2, 3], 9)
    driver.prefill([decoding])
    work = driver.prefill_work([driver.request(prompt, 1) for prompt in PROMPTS], prompt_logprobs=asked)
    _, output = exact_runner.fused(driver.decode_work([decoding]), work, range(243))
    assert set(output.prompt_logprobs) == wanted


def test_a_prompt_of_which_a_part_is_in_the_pool_reports_on_the_rest(runner: ModelRunner) -> None:
    driver = Driver(runner)
    cold = driver.request(PROMPTS[0], 1)
    (whole,) = run_chunks(runner, driver.prefill_work([cold], prompt_logprobs=((0, 2),)))
    warm = driver.request(PROMPTS[0], 1)
    warm.pages[:2] = cold.pages[:2]
    (rest,) = run_chunks(runner, driver.prefill_work([warm], reused=[32], prompt_logprobs=((0, 2),)))
    assert [report.position for report in rest.prompt_logprobs] == list(range(33, 70))
    for found, wanted in zip(rest.prompt_logprobs, whole.prompt_logprobs[32:], strict=True):
        assert (found.token, found.top_ids, found.rank) == (wanted.token, wanted.top_ids, wanted.rank)
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def reported(rows: int, *extras: RowExtras) -> SamplingColumns:
    return columns(rows, extras, temperature=[1.2] * rows, seed=range(rows), top_k=[20] * rows)


def test_logprobs_of_sampled_tokens_are_of_the_models_own_logits(runner: ModelRunner, reference: Any) -> None:
    """Neither temperature nor top-k nor the bias that a row asks for shows in them."""
    driver = Driver(runner)
    requests = [driver.request(prompt, 9) for prompt in PROMPTS]
    bias = np.array([4.0, -3.0], dtype="<f4").tobytes()
    sampling = reported(
        4,
        RowExtras(row=0, logprobs=0, bias_ids=int32_bytes([5, 6]), bias_values=bias),
        RowExtras(row=1, bias_ids=int32_bytes([5, 6]), bias_values=bias),
        RowExtras(row=3, logprobs=6),
    )
    work = driver.prefill_work(requests, sampling=sampling)
    outputs = [runner.prefill(work, range(243), range(3))]
    take(requests, outputs[0].tokens)
    for _ in range(4):
        # Rows are run in the order of their contexts: 1, 3, 0, 2.
        outputs.append(runner.decode(driver.decode_work(requests, sampling)))
        take(requests, outputs[-1].tokens)
    for row, top in ((0, 0), (3, 6)):
        request = requests[row]
        wanted = reference_logprobs(reference, request.prompt + request.output)
        for step, output in enumerate(outputs):
            assert [report.row for report in output.logprobs] == [0, 3]
            report = output.logprobs[0 if row == 0 else 1]
            assert report.token == request.output[step]
            assert report.position == len(request.prompt) + step
            check(report, wanted[report.position - 1], top)


def test_a_greedy_token_is_the_most_likely_one(runner: ModelRunner) -> None:
    driver = Driver(runner)
    sampling = columns(1, (RowExtras(row=0, logprobs=3),))
    output = runner.prefill(
        driver.prefill_work([driver.request(PROMPTS[1], 1)], sampling=sampling), range(3), range(3)
    )
    (report,) = output.logprobs
    assert (report.rank, report.top_ids[0], report.top_logprobs[0]) == (1, report.token, report.logprob)


def test_ties_rank_by_token_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.0, 0.0]])
    reports = [logprobs_of(logits, [Asked(0, 9, token, 4)])[0] for token in range(7)]
    assert [report.rank for report in reports] == [6, 1, 4, 2, 5, 3, 7]
    assert reports[0].top_ids == (1, 3, 5, 2)
    (all_of_them,) = logprobs_of(logits, [Asked(0, 9, 6, 100)])
    assert all_of_them.top_ids == (1, 3, 5, 2, 4, 0, 6)
    assert np.exp(all_of_them.top_logprobs).sum() == pytest.approx(1.0)


def mixed_extras(row: int, request: Generation) -> RowExtras | None:
    """Every third row has nothing, the others one thing or several."""
    if row % 3 == 0:
        return None
    penalised = {"prompt": int32_bytes(request.prompt), "generated": int32_bytes(request.output)}
    return RowExtras(
        row=row,
        presence_penalty=0.5 * (row % 4),
        repetition_penalty=1.0 + row % 2 / 3,
        **(penalised if row % 4 or row % 2 else {}),
        bias_ids=int32_bytes([row]),
        bias_values=np.array([row / 8], dtype="<f4").tobytes(),
        banned=int32_bytes([row + 1, row + 2]),
        logprobs=row % 5 if row % 7 else None,
    )


def mixed_columns(requests: list[Generation], rows: list[int]) -> SamplingColumns:
    """Parameters that differ in every row; `rows` names the row that each request is in the whole batch."""
    extras = [mixed_extras(row, request) for row, request in zip(rows, requests, strict=True)]
    return columns(
        len(rows),
        tuple(msgspec.structs.replace(extra, row=at) for at, extra in enumerate(extras) if extra),
        temperature=[row % 4 / 2 for row in rows],
        top_k=[row % 6 * 10 for row in rows],
        top_p=[1.0 - row % 5 / 10 for row in rows],
        min_p=[row % 2 / 50 for row in rows],
        seed=[row * 7 for row in rows],
    )


def mixed_run(runner: ModelRunner, rows: list[int], chunk: int | None) -> list[tuple[list[int], Any]]:
    """Tokens and reports of some rows of a batch of 32 that differ in all they ask for."""
    driver = Driver(runner)
    prompts = [np.random.default_rng(row).integers(0, 101, 1 + row * 3 % 50).tolist() for row in rows]
    requests = [driver.request(prompt, 6) for prompt in prompts]
    wanted = tuple((at, 2) for at, row in enumerate(rows) if row % 8 == 0)
    work = driver.prefill_work(requests, None, mixed_columns(requests, rows), wanted)
    outputs = run_chunks(runner, work, chunk)
    take(requests, b"".join(output.tokens for output in outputs))
    for _ in range(4):
        outputs.append(runner.decode(driver.decode_work(requests, mixed_columns(requests, rows))))
        take(requests, outputs[-1].tokens)
    reports = [report for output in outputs for report in (*output.prompt_logprobs, *output.logprobs)]
    # Without their row, which is another in another batch.
    reports_of = [
        [tuple(msgspec.to_builtins(r))[1:] for r in reports if r.row == at] for at in range(len(rows))
    ]
    return [(request.output, of) for request, of in zip(requests, reports_of, strict=True)]


def test_32_rows_that_differ_in_everything_get_what_each_gets_alone(exact_runner: ModelRunner) -> None:
    together = mixed_run(exact_runner, list(range(32)), None)
    alone = [mixed_run(exact_runner, [row], None)[0] for row in range(32)]
    assert together == alone
    assert sum(len(reports) for _, reports in together) > 100
    if exact_runner.operators_name == "native":
        assert mixed_run(exact_runner, list(range(32)), 41) == alone
