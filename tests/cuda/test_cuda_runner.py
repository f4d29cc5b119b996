"""The runner of cards, run on torch's CPU device: the tokens of the CPU's runner, whatever the schedule."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

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
from muxk.kernel.cuda_runner import CudaRunner
from muxk.kernel.work import DecodeWork, Phase, PrefillWork, ProbeWork, RowExtras, StepOutput, int32_bytes
from muxk.models.carried import CarriedTokensMissingError
from muxk.models.cuda_carried import CarriedOnDevice
from muxk.models.cuda_kernels import AttentionShape, TorchAttentionKind, TorchKernels, distinct_windows
from muxk.models.cuda_layers import CudaOperators
from muxk.models.cuda_runner import CudaModelRunner
from muxk.models.errors import ModelError
from muxk.models.llama import load_decoder
from muxk.models.rope_scaling import YarnScaling
from muxk.models.weights import Weights

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [np.random.default_rng(size).integers(0, 101, size).tolist() for size in (5, 16, 40, 90)]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def cuda_runner(weights: Weights, dtype: torch.dtype = torch.float32) -> CudaModelRunner:
    device = torch.device("cpu")
    decoder = load_decoder(weights, CudaOperators(TorchKernels(), dtype, device))
    windows = distinct_windows([decoder.window(index) for index in range(decoder.config.layers)])
    shape = AttentionShape(decoder.heads, windows, dtype, device, device_units=8)
    return CudaModelRunner(decoder, TorchAttentionKind(shape), pages=200, chunk_tokens_max=256, rows_max=8)


class OneLane:
    """A `Runner` as drivers want it, over two lanes of a card's runner."""

    def __init__(self, runner: CudaModelRunner) -> None:
        self.cuda: CudaRunner = runner
        self.decode_lane = self.cuda.open_lane(Phase.DECODE, 2)
        self.prefill_lane = self.cuda.open_lane(Phase.PREFILL, 6)
        self.layers, self.pages = runner.layers, runner.pages

    def prefill(self, work: PrefillWork, tokens: range, layers: range) -> StepOutput:
        return self.cuda.prefill(self.prefill_lane, work, tokens, layers, item_id=1).read()

    def decode(self, work: DecodeWork) -> StepOutput:
        return self.cuda.decode(self.decode_lane, work, item_id=1).read()

    def fused(self, decode: DecodeWork, work: PrefillWork, tokens: range) -> tuple[StepOutput, StepOutput]:
        decoded, prefilled = self.cuda.fused(self.prefill_lane, decode, work, tokens, item_id=1)
        return decoded.read(), prefilled.read()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [None, 37])
def test_every_family_gives_the_tokens_of_the_cpu(family: str, chunk: int | None) -> None:
    window = {"windows": (None, 24, None)} if family in ("mistral", "qwen2") else {}
    weights = RandomWeights(tiny_config(family, **window))
    wanted = Driver(tiny_runner(weights, 200)).generate(PROMPTS, 6)
    runner = OneLane(cuda_runner(weights))
    assert Driver(runner).generate(PROMPTS, 6, cuts=[1, 2], chunk=chunk) == wanted


@pytest.fixture(scope="module")
def weights() -> RandomWeights:
    return RandomWeights(tiny_config())


@pytest.fixture(scope="module")
def wanted(weights: RandomWeights) -> list[list[int]]:
    """The CPU's greedy outputs of all prompts."""
    return Driver(tiny_runner(weights, 200)).generate(PROMPTS, 9)


def prefilled(driver: Driver, steps: int = 9) -> list[Generation]:
    requests = [driver.request(prompt, steps) for prompt in PROMPTS]
    driver.prefill(requests)
    return requests


def outputs(requests: Sequence[Generation]) -> list[list[int]]:
    return [request.output for request in requests]


def test_scaled_rotations_and_biases_everywhere_give_the_tokens_of_the_cpu() -> None:
    config = tiny_config(
        rope_scaling=YarnScaling(4.0, 128, attention_factor=1.2),
        output_bias=True,
        mlp_bias=True,
        qkv_bias=True,
    )
    weights = RandomWeights(config)
    wanted = Driver(tiny_runner(weights, 200)).generate(PROMPTS, 4)
    assert Driver(OneLane(cuda_runner(weights))).generate(PROMPTS, 4) == wanted


def test_a_prefix_that_is_in_the_pool_is_not_computed_again(
    weights: RandomWeights, wanted: list[list[int]]
) -> None:
    driver = Driver(OneLane(cuda_runner(weights)))
    first = driver.request(PROMPTS[3], 9)
    driver.prefill([first])
    second = Generation(PROMPTS[3], first.pages[:4] + [driver._free.pop() for _ in range(3)])
    third = driver.request(PROMPTS[2], 9)
    driver.prefill([second, third], reused=[64, 0], chunk=21)
    for _ in range(8):
        driver.decode([third, second])
    assert outputs([second, third]) == [wanted[3], wanted[2]]


def test_steps_queued_behind_each_other_take_their_tokens_on_the_device(
    weights: RandomWeights, wanted: list[list[int]]
) -> None:
    runner = OneLane(cuda_runner(weights))
    driver = Driver(runner)
    requests = prefilled(driver)
    steps = [driver.decode_work(requests)]
    for ahead in range(1, 8):
        steps.append(driver.decode_work(requests, ahead=ahead))
    pending = [runner.cuda.decode(runner.decode_lane, work, item_id=1) for work in steps]
    for each in pending:
        take(requests, each.read().tokens)
    assert outputs(requests) == wanted


def test_a_step_that_wants_tokens_of_a_step_that_is_gone_fails_before_anything_is_enqueued(
    weights: RandomWeights,
) -> None:
    runner = OneLane(cuda_runner(weights))
    driver = Driver(runner)
    requests = prefilled(driver)
    first, second = driver.decode_work(requests), driver.decode_work(requests, ahead=1)
    with pytest.raises(CarriedTokensMissingError, match=f"tokens of step {first.step_id}"):
        runner.decode(second)
    runner.decode(first)
    short = msgspec.structs.replace(second, carried_from=int32_bytes([0, 1, 2, 9]))
    with pytest.raises(CarriedTokensMissingError, match="row 9 of step"):
        runner.decode(short)
    runner.cuda.reset()
    with pytest.raises(CarriedTokensMissingError):
        runner.decode(second)


def test_the_tokens_of_the_last_two_steps_are_kept_apart() -> None:
    carried = CarriedOnDevice(rows_max=2, device=torch.device("cpu"))
    driver = Driver(tiny_runner(RandomWeights(tiny_config())))
    requests = [Generation([1, 2], [row + 1], [5]) for row in range(3)]
    for step in range(1, 6):
        carried.keep(step, torch.tensor([step, 10 * step, 100 * step], dtype=torch.int32))
        for before in (step - 1, step)[step == 1 :]:
            work = msgspec.structs.replace(
                driver.decode_work(requests, ahead=1),
                after_step=before,
                carried_rows=int32_bytes([0, 2]),
                carried_from=int32_bytes([2, 1]),
            )
            tokens = torch.tensor([7, 8, 9], dtype=torch.int32)
            carried.check(work)
            carried.fill(work, tokens)
            assert tokens.tolist() == [100 * before, 8, 10 * before]


def test_a_fused_step_gives_what_its_step_and_its_chunk_give_alone(
    weights: RandomWeights, wanted: list[list[int]]
) -> None:
    runner = OneLane(cuda_runner(weights))
    driver = Driver(runner)
    requests = [driver.request(prompt, 9) for prompt in PROMPTS]
    driver.prefill(requests[:2])
    work = driver.prefill_work(requests[2:])
    total = sum(work.new_tokens)
    chunks = [range(start, min(start + 25, total)) for start in range(0, total, 25)]
    for chunk in chunks:
        decoded, prefilled = runner.fused(driver.decode_work(requests[:2]), work, chunk)
        take(requests[:2], decoded.tokens)
        ended = [r for r, end in zip(requests[2:], (40, 130), strict=True) if chunk.start < end <= chunk.stop]
        take(ended, prefilled.tokens)
    assert outputs(requests) == [tokens[: 1 + len(chunks)] for tokens in wanted[:2]] + [
        tokens[:1] for tokens in wanted[2:]
    ]


def test_two_lanes_take_turns_layer_by_layer_and_disturb_neither(
    weights: RandomWeights, wanted: list[list[int]]
) -> None:
    """Two parked prefills on two lanes, one of which goes on in the other's, between decode steps."""
    runner = OneLane(cuda_runner(weights))
    other = runner.cuda.open_lane(Phase.PREFILL, 4)
    driver = Driver(runner)
    decoding = [driver.request(prompt, 9) for prompt in PROMPTS[:2]]
    driver.prefill(decoding)
    late = [driver.request(prompt, 9) for prompt in PROMPTS[2:]]
    works = [driver.prefill_work([request]) for request in late]
    for layer in range(3):
        for place, (work, request) in enumerate(zip(works, late, strict=True)):
            lane = other if (layer + place) % 2 else runner.prefill_lane
            tokens = range(len(request.prompt))
            output = runner.cuda.prefill(lane, work, tokens, range(layer, layer + 1), item_id=1).read()
            driver.decode(decoding)
            if layer == 2:
                take([request], output.tokens)
    assert outputs(decoding) == [tokens[:7] for tokens in wanted[:2]]
    assert outputs(late) == [tokens[:1] for tokens in wanted[2:]]


def test_captured_steps_of_more_rows_give_the_same_tokens_and_leave_page_0_to_their_padding(
    weights: RandomWeights, wanted: list[list[int]]
) -> None:
    runner = OneLane(cuda_runner(weights))
    for rows in (3, 8):
        runner.cuda.capture(runner.decode_lane, rows)
    driver = Driver(runner)
    requests = prefilled(driver)
    pool = runner.cuda.kv  # type: ignore[attr-defined]
    for some in ((0, 1, 2, 3), (3, 1), (2, 0)) * 4:
        used = {page for row in some for page in requests[row].pages}
        others = [page for page in range(1, runner.pages) if page not in used]
        before = [layer.keys[others].clone() for layer in pool]
        driver.decode([requests[row] for row in some])
        assert all(torch.equal(layer.keys[others], old) for layer, old in zip(pool, before, strict=True))
    assert outputs(requests) == [tokens[: 1 + 8] for tokens in wanted]


def test_a_step_of_more_rows_than_any_lane_was_opened_for_still_runs(weights: RandomWeights) -> None:
    runner = OneLane(cuda_runner(weights))
    prompts = [[row + 1, 2, 3] for row in range(11)]
    wanted = Driver(tiny_runner(weights, 200)).generate(prompts, 4)
    assert Driver(runner).generate(prompts, 4) == wanted


def test_a_token_without_an_embedding_is_refused_before_the_card_sees_it(weights: RandomWeights) -> None:
    driver = Driver(OneLane(cuda_runner(weights)))
    past = weights.config.vocabulary
    with pytest.raises(ModelError, match=f"token {past} is none of the model, which has 0 to {past - 1}"):
        driver.prefill([driver.request([1, past, 2], 3)])


def test_probes_write_page_0_only_and_keep_nothing(weights: RandomWeights) -> None:
    runner = OneLane(cuda_runner(weights))
    pool = runner.cuda.kv  # type: ignore[attr-defined]
    for layer in pool:
        layer.keys.normal_()
    before = [(layer.keys[1:].clone(), layer.values[1:].clone()) for layer in pool]
    runner.cuda.capture(runner.decode_lane, 8)
    for phase, rows, new, context in (
        (Phase.DECODE, 5, 1, 90),
        (Phase.PREFILL, 3, 20, 40),
        (Phase.PREFILL, 1, 7, 0),
    ):
        probe = ProbeWork(probe_id=1, phase=phase, units=1, rows=rows, new_tokens=new, context_tokens=context)
        lane = runner.decode_lane if phase is Phase.DECODE else runner.prefill_lane
        runner.cuda.probe(lane, probe, range(3))
    for layer, (keys, values) in zip(pool, before, strict=True):
        assert torch.equal(layer.keys[1:], keys)
        assert torch.equal(layer.values[1:], values)


def test_a_discarded_prefill_is_gone_and_an_unknown_one_is_ignored(weights: RandomWeights) -> None:
    runner = OneLane(cuda_runner(weights))
    driver = Driver(runner)
    work = driver.prefill_work([driver.request(PROMPTS[2], 1)])
    tokens = range(40)
    runner.prefill(work, tokens, range(1))
    hidden = runner.cuda._parked[work.batch_id].hidden  # type: ignore[attr-defined]
    assert hidden.nbytes == 40 * runner.cuda.parked_bytes_per_token
    runner.cuda.discard(work.batch_id)
    runner.cuda.discard(12345)
    with pytest.raises(KeyError):
        runner.prefill(work, tokens, range(1, 3))


def test_drawn_tokens_and_reports_of_a_whole_run_are_those_of_the_cpu(weights: RandomWeights) -> None:
    runs = []
    for runner in (tiny_runner(weights, 200), OneLane(cuda_runner(weights))):
        driver = Driver(runner)
        requests = [driver.request(prompt, 6) for prompt in PROMPTS]
        draw = {
            "temperature": [1.0, 0.0, 1.5, 0.7],
            "seed": [7, 0, 2**63 + 5, 9],
            "top_p": [1.0, 1.0, 0.8, 0.9],
        }
        sampling = columns(4, (RowExtras(row=1, logprobs=2), RowExtras(row=2, logprobs=0)), **draw)
        work = driver.prefill_work(requests, None, sampling, prompt_logprobs=((0, 1), (3, 2)))
        reports = []
        parts = run_chunks(runner, work, chunk=64)
        take(requests, b"".join(part.tokens for part in parts))
        for _ in range(5):
            output = runner.decode(driver.decode_work(requests, sampling))
            take(requests, output.tokens)
            parts.append(output)
        for part in parts:
            reports += [*part.prompt_logprobs, *part.logprobs]
        runs.append((outputs(requests), reports))
    (tokens, reports), (found, found_reports) = runs
    assert found == tokens
    assert len(reports) == 4 + 89 + 2 * 6
    for report, other in zip(reports, found_reports, strict=True):
        assert (report.row, report.position, report.token) == (other.row, other.position, other.token)
        assert (report.rank, report.top_ids) == (other.rank, other.top_ids)
        assert report.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_log_probabilities_near_those_of_float32(dtype: torch.dtype) -> None:
    weights = RandomWeights(tiny_config("qwen3", qkv_bias=True))
    reports = []
    for runner in (OneLane(cuda_runner(weights)), OneLane(cuda_runner(weights, dtype))):
        driver = Driver(runner)
        work = driver.prefill_work([driver.request(PROMPTS[3], 1)], prompt_logprobs=((0, 0),))
        (output,) = run_chunks(runner, work, cuts=(1,))
        reports.append(np.array([report.logprob for report in output.prompt_logprobs]))
    assert len(reports[0]) == 89
    assert np.abs(reports[1] - reports[0]).max() < 0.25
    assert 0 < np.abs(reports[1] - reports[0]).mean() < 0.05


def test_calls_of_torch_cuda_fit_its_signatures() -> None:
    """Made only on a card: of the capture, of the allocator and of events."""
    for function, arguments, options in (
        (torch.cuda.graph, (None,), {"pool": None, "stream": None, "capture_error_mode": "thread_local"}),
        (torch.cuda.CUDAGraph, (), {}),
        (torch.cuda.graph_pool_handle, (), {}),
        (torch.cuda.current_stream, (), {}),
        (torch.cuda.empty_cache, (), {}),
        (torch.cuda.synchronize, (None,), {}),
        (torch.cuda.get_device_capability, (None,), {}),
        (torch.cuda.Event, (), {}),
        (torch.cuda.Event.record, (None,), {}),
        (torch.cuda.Event.query, (None,), {}),
    ):
        inspect.signature(function).bind(*arguments, **options)
    assert callable(torch.Tensor.record_stream)
    assert callable(torch.cuda.CUDAGraph.replay)
