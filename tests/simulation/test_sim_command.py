"""`muxk sim` as a person meets it: what it prints, the JSON that scripts read, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import pytest
from muxk.actors.gpu_backend import open_gpu_backend
from muxk.actors.policy_files import open_with_text
from muxk.client.arrivals import Arrivals
from muxk.client.cli import build_app
from muxk.client.sim_run import Run, SimPlan, objectives_of, simulate
from muxk.client.synthetic import synthetic
from muxk.client.traffic import Span, TrafficRequest
from typer.testing import CliRunner, Result

VLLM_KEYS = (
    *("duration", "completed", "failed", "num_prompts", "request_rate", "model_id", "backend"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput"),
    *(
        f"{kind}_{name}_ms"
        for kind in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
)
STRICT = """
apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: strict}
spec:
  extends: muxwise
  params: {gap: {type: duration, default: 50ms}}
  slo: {tbt: params.gap, ttft: 300ms + 2ms/token}
"""


def sim(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["sim", *arguments], env={"COLUMNS": "200"})


def small(*arguments: str) -> Result:
    return sim("muxwise", "--workload", "sharegpt", "--rate", "20", "--requests", "4", *arguments)


def figures(folder: Path, *arguments: str) -> dict[str, Any]:
    path = folder / "figures.json"
    done = sim(*arguments, "--json", str(path))
    assert done.exit_code == 0, done.output
    made: dict[str, Any] = json.loads(path.read_bytes())
    return made


class Listed:
    """A workload of given requests."""

    name = "listed"

    def __init__(self, requests: list[TrafficRequest]) -> None:
        self._requests = requests

    def requests(self) -> Iterator[TrafficRequest]:
        return iter(self._requests)


def request(at_ms: int, prompt: tuple[Span, ...], output: int, answer: int = 0) -> TrafficRequest:
    return TrafficRequest(at_ms * 1_000_000, prompt, output, 0, 0, answer)


def run(requests: list[TrafficRequest], kv_tokens: int | None = None, policy: str = "muxwise") -> Run:
    gpu = open_gpu_backend("sim:h200", "qwen3-8b", kv_tokens)
    return simulate(SimPlan(open_with_text(policy, {}), gpu, Listed(requests), None, None))


def test_the_summary_names_what_was_run_and_every_measure() -> None:
    done = small()
    assert done.exit_code == 0, done.output
    assert "muxwise on sim:h200, qwen3-8b: sharegpt, 20 requests/s" in done.output
    for measure in (
        "4 of 4 completed",
        "TTFT",
        "TBT",
        "TPOT",
        "throughput",
        "strict goodput",
        "joint goodput",
    ):
        assert measure in done.output
    for measure in ("preemptions", "recomputes", "split", "times real time"):
        assert measure in done.output


def test_the_json_has_the_keys_that_scripts_for_vllm_read(tmp_path: Path) -> None:
    made = figures(tmp_path, "muxwise", "--workload", "sharegpt", "--rate", "20", "--requests", "4")
    assert [key for key in VLLM_KEYS if key not in made] == []
    assert made["completed"] == made["num_prompts"] == 4
    assert made["slo"]["tbt_ms"] == 100
    assert made["verdicts"]["joint"] is True


def test_every_figure_of_the_json_is_that_of_the_requests_that_it_lists(tmp_path: Path) -> None:
    trace = tmp_path / "three.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n100,3\n300,2\n200000,1\n")
    made = figures(
        tmp_path, "chunked", "--workload", str(trace), "--rate", "5", "--kv-tokens", "100000", "--detailed"
    )
    start_s, ttfts, itls, latencies = (made[key] for key in ("start_times", "ttfts", "itls", "latencies"))
    assert made["input_lens"] == [100, 300, 200_000]
    assert made["output_lens"] == [3, 2, 0]
    assert made["errors"][:2] == ["", ""]
    assert made["errors"][2].startswith("invalid: prompt_token_ids has 200000 tokens")
    assert sum(made["refused"].values()) == made["failed"] == 1
    assert made["completed"] == 2
    assert (made["total_input_tokens"], made["total_output_tokens"]) == (400, 5)
    assert [len(gaps) for gaps in itls] == [2, 1, 0]
    assert latencies[:2] == pytest.approx([ttfts[row] + sum(itls[row]) for row in (0, 1)])
    # Seconds in the lists, milliseconds in the summary; from the first arrival to the last event.
    ends = max(start_s[row] + latencies[row] for row in range(3))
    assert made["duration"] == pytest.approx(ends - start_s[0])
    assert made["request_throughput"] == made["request_goodput"] == pytest.approx(2 / made["duration"])
    assert made["output_throughput"] == pytest.approx(5 / made["duration"])
    assert made["total_token_throughput"] == pytest.approx(405 / made["duration"])
    tpots = [sum(itls[0]) / 2, sum(itls[1])]
    for name, seconds in (
        ("ttft", ttfts[:2]),
        ("itl", [*itls[0], *itls[1]]),
        ("tpot", tpots),
        ("e2el", latencies[:2]),
    ):
        ms = [1000 * one for one in seconds]
        assert made[f"mean_{name}_ms"] == pytest.approx(fmean(ms)), name
        assert made[f"std_{name}_ms"] == pytest.approx(pstdev(ms)), name
        assert made[f"max_{name}_ms"] == pytest.approx(max(ms)), name
        assert made[f"median_{name}_ms"] == pytest.approx(median(ms), rel=0.01), name
        assert made[f"p99_{name}_ms"] == pytest.approx(max(ms) - 0.01 * (max(ms) - median(ms)), rel=0.02), (
            name
        )
    assert sim("chunked", "--detailed").exit_code == 2


def test_one_seed_gives_one_file_but_for_the_wall_clock_and_another_seed_another(tmp_path: Path) -> None:
    made = []
    for seed in ("1", "1", "2"):
        one = figures(
            tmp_path, "muxwise", "--workload", "sharegpt", "--rate", "20", "--requests", "4", "--seed", seed
        )
        assert one.pop("wall")["seconds"] > 0
        del one["seed"]
        made.append(json.dumps(one))
    assert made[0] == made[1] != made[2]


def test_a_setting_reaches_the_policy_and_its_slos_the_verdicts(tmp_path: Path) -> None:
    policy = tmp_path / "strict.yaml"
    policy.write_text(STRICT)
    arguments = (str(policy), "--workload", "sharegpt", "--rate", "20", "--requests", "2")
    made = figures(tmp_path, *arguments, "--set", "gap=1ms")
    assert made["settings"] == {"gap": "1ms"}
    assert made["slo"]["tbt_ms"] == 1
    assert made["verdicts"]["strict"] is False
    assert made["verdicts"]["gaps_over_share"] > 0.9


def test_a_rate_that_the_gpu_can_not_serve_meets_no_goodput(tmp_path: Path) -> None:
    made = figures(tmp_path, "muxwise", "--workload", "loogle", "--rate", "100", "--requests", "20")
    assert made["completed"] == 20
    assert made["verdicts"]["stable"] is False
    assert made["verdicts"]["strict"] is False
    assert made["verdicts"]["waiting_share"] > 0.5


def test_a_run_of_some_seconds_sends_what_arrives_in_them(tmp_path: Path) -> None:
    made = figures(tmp_path, "muxwise", "--workload", "sharegpt", "--rate", "20", "--duration", "0.2")
    due = 0
    for one in synthetic("sharegpt", Arrivals(20.0)).requests():
        if one.arrival_ns >= 200_000_000:
            break
        due += 1
    assert made["num_prompts"] == made["completed"] == due > 0


def test_a_later_turn_finds_its_conversation_in_the_kv_pool_with_what_the_model_said() -> None:
    opening = (Span(7, 0, 320),)
    later = (*opening, Span(9, 0, 64), Span(8, 0, 16))
    ended = run([request(0, opening, 64, answer=9), request(10_000, later, 2)])
    # The last page of the first turn may not be full when its request ends.
    assert ended.cached_tokens >= 320 + 48
    assert ended.prompt_tokens == 320 + 400


def test_a_request_that_can_never_fit_is_counted_and_said() -> None:
    ended = run([request(0, (Span(1, 0, 4000),), 4), request(1, (Span(2, 0, 100),), 4)], kv_tokens=1024)
    totals = ended.measures.totals
    assert (totals.requests, totals.completed) == (2, 1)
    assert sum(ended.refused.values()) == 1
    assert "4,004" in ended.reason or "4004" in ended.reason or "4000" in ended.reason, ended.reason


def test_a_policy_says_its_slos_as_a_line_over_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "strict.yaml"
    path.write_text(STRICT)
    slo = objectives_of(open_with_text(str(path), {}).policy)
    assert slo.tbt_ns == 50_000_000
    assert slo.ttft_ns(0) == 300_000_000
    assert slo.ttft_ns(500) == 1_300_000_000


def test_requests_that_ended_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver of the simulation itself holds does not grow with the requests that it sent."""
    monkeypatch.setattr("muxk.client.measures.FLUSH_TOKENS", 1)
    held: list[int] = []

    class Growing:
        name = "growing"

        def requests(self) -> Iterator[TrafficRequest]:
            for number in range(241):
                if number in (80, 240):
                    here = tracemalloc.Filter(True, "*/client/sim_run.py")
                    found = tracemalloc.take_snapshot().filter_traces([here]).statistics("filename")
                    held.append(sum(one.size for one in found))
                yield request(40 * number, (Span(number, 0, 20),), 2)

    gpu = open_gpu_backend("sim:h200", "qwen3-8b", 4096)
    tracemalloc.start()
    try:
        simulate(SimPlan(open_with_text("muxwise", {}), gpu, Growing(), None, None))
    finally:
        tracemalloc.stop()
    assert held[1] < held[0] + 160 * 100


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--rate", "0"), "rate is 0.0"),
        (("--rate", "-1"), "rate is -1.0"),
        (("--rate", "nan"), "rate is nan"),
        (("--duration", "0"), "--duration 0"),
        (("--requests", "0"), "greater than or equal to 1"),
        (("--workload", "sharegtp"), "did you mean sharegpt?"),
        (("--workload", "none.jsonl"), "none.jsonl: No such file"),
        (("--device", "sim:h20"), "did you mean 'sim:h200'?"),
        (("--device", "h200"), "did you mean 'sim:h200'?"),
        (("--device", "cpu"), "unknown simulated GPU 'cpu'"),
        (("--device", "sim:h200,tp=3"), "after the card comes tp=1, 2, 4, 8"),
        (("--device", "sim:h200,pp=2"), "after the card comes tp=1"),
        (("--model", "qwen3-8"), "did you mean 'qwen3-8b'?"),
        (("--model", "llama-3.1-70b", "--device", "sim:a100"), "does not fit on a100 with tp=1"),
        (("--kv-tokens", "3"), "less than one page"),
        (("--kv-tokens", "99999999"), "do not fit"),
        (("--json", "/nowhere/at/all.json"), "there is no folder /nowhere/at"),
        (("--set", "slo.tbt"), "expected KEY=VALUE"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(arguments: tuple[str, ...], complaint: str) -> None:
    done = sim("muxwise", *arguments)
    assert done.exit_code == 2, done.output
    assert complaint in done.output
    assert "Traceback" not in done.output


def test_a_model_that_does_not_fit_is_refused_with_the_bytes() -> None:
    done = sim("muxwise", "--model", "llama-3.1-70b", "--device", "sim:a100")
    assert "weights take 141,107,396,608" in done.output


def test_an_unknown_policy_is_refused() -> None:
    done = sim("muxwize")
    assert done.exit_code == 2
    assert "muxwise" in done.output


def test_a_damaged_trace_is_refused_with_its_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "damaged.jsonl"
    row = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    path.write_text(row + row + row[:40] + "\n")
    done = sim("muxwise", "--workload", str(path))
    assert done.exit_code == 2
    assert f"{path}:3" in done.output


def test_a_config_of_another_model_is_a_model(tmp_path: Path) -> None:
    config = {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "vocab_size": 32_000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    mine = figures(
        tmp_path,
        *("muxwise", "--model", str(tmp_path / "config.json"), "--workload", "sharegpt"),
        *("--rate", "20", "--requests", "2"),
    )
    assert mine["completed"] == 2
    assert mine["model_id"] == tmp_path.name


def test_the_decisions_can_be_kept_and_explained(tmp_path: Path) -> None:
    path = tmp_path / "run.muxrec"
    assert small("--record", str(path)).exit_code == 0
    told = CliRunner().invoke(build_app(), ["explain", "--record", str(path)])
    assert told.exit_code == 0, told.output
    assert "order/always" in told.output
    assert "r2" in told.output


def test_a_simulation_imports_no_torch() -> None:
    code = (
        "import sys; from muxk.client.cli import main\n"
        "sys.argv = ['muxk', 'sim', 'muxwise', '--workload', 'sharegpt', '--rate', '20', '--requests', '1']\n"
        "try: main()\n"
        "except SystemExit as done: assert not done.code, done.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
