"""Conversations whose turns wait for their answers, and requests judged by the SLOs of their class."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from muxk.actors.gpu_backend import open_gpu_backend
from muxk.actors.policy_files import open_with_text
from muxk.client.cli import build_app
from muxk.client.closed_loop import ClosedLoop
from muxk.client.sim_run import SimPlan, simulate
from muxk.client.traffic import Span, TrafficRequest
from muxk.client.turns import Turns
from muxk.client.workload_names import Traffic, find_workload
from typer.testing import CliRunner

S = 1_000_000_000
CLASSED = """
apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: classed}
spec:
  extends: muxwise
  classes:
    - {name: strict, when: request.class == 'sharegpt', slo: {tbt: 1ms, ttft: 1ms}}
    - {name: relaxed, slo: {tbt: 10s, ttft: 100s}}
"""


class Chats:
    """Two sessions, each of two turns; the second comes five seconds after the answer to the first."""

    name = "chats"

    def __init__(self) -> None:
        self.ended_ns: dict[int, int] = {}
        self.sent: list[TrafficRequest] = []

    def requests(self) -> Iterator[TrafficRequest]:
        raise AssertionError("the open loop was not asked for")

    def openings(self) -> Iterator[TrafficRequest]:
        for session in range(2):
            yield TrafficRequest(session * S, (Span(session, 0, 64),), 8, session, 0, 10 + session)

    def next_turn(self, request: TrafficRequest, ended_ns: int) -> TrafficRequest | None:
        self.ended_ns[request.session] = ended_ns
        if request.turn:
            return None
        prompt = (*request.prompt, Span(request.answer_stream, 0, 8), Span(20 + request.session, 0, 16))
        return TrafficRequest(ended_ns + 5 * S, prompt, 8, request.session, 1, 30 + request.session)


def test_a_later_turn_comes_a_think_time_after_its_answer_ended() -> None:
    chats = Chats()
    gpu = open_gpu_backend("sim:h200", "qwen3-8b")
    run = simulate(SimPlan(open_with_text("muxwise", {}), gpu, chats, None, None, turns=Turns.CLOSED))
    assert run.measures.totals.completed == 4
    # An answer takes some 0.1 s: the second ones end that much after 0 s + 5 s and 1 s + 5 s.
    assert 5 < chats.ended_ns[0] / S < 5.5
    assert 6 < chats.ended_ns[1] / S < 6.5


def test_turns_and_openings_are_sent_in_the_order_of_time_and_none_comes_twice() -> None:
    workload = find_workload("conversation+sharegpt", Traffic(8.0, seed=3))
    loop = ClosedLoop(workload)
    now_ns, sent = 0, []

    def wait(at_ns: int) -> int:
        nonlocal now_ns
        now_ns = max(now_ns, min(at_ns, now_ns + S // 10))
        return now_ns

    for request in loop.requests(wait):
        sent.append(request)
        loop.answered(request, now_ns)
        if len(sent) == 200:
            break
    arrivals = [request.arrival_ns for request in sent]
    assert arrivals == sorted(arrivals)
    names = [(request.session, request.turn) for request in sent]
    assert len(dict.fromkeys(names)) == 200
    assert {request.request_class for request in sent if request.turn} == {"conversation"}
    for request in sent:
        assert not request.turn or (request.session, request.turn - 1) in names


def test_a_trace_can_not_wait_for_answers(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n100,2\n")
    arguments = ["sim", "muxwise", "--workload", str(path), "--rate", "1", "--turns", "closed"]
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 1
    assert "generated workloads" in done.output


def test_each_class_is_judged_by_its_own_slos_and_the_run_by_all_of_them(tmp_path: Path) -> None:
    policy, out = tmp_path / "classed.yaml", tmp_path / "out.json"
    policy.write_text(CLASSED)
    arguments = ["sim", str(policy), "--workload", "sharegpt+loogle", "--rate", "10", "--requests", "8"]
    done = CliRunner().invoke(build_app(), [*arguments, "--json", str(out)], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    made = json.loads(out.read_bytes())
    strict, relaxed = made["classes"]["strict"], made["classes"]["relaxed"]
    assert strict["num_prompts"] + relaxed["num_prompts"] == made["num_prompts"] == 8
    assert (strict["slo"]["tbt_ms"], relaxed["slo"]["tbt_ms"]) == (1.0, 10_000.0)
    assert strict["verdicts"]["good_share"] == 0
    assert relaxed["verdicts"]["good_share"] == 1
    assert made["verdicts"]["strict"] is made["verdicts"]["joint"] is False
    assert made["verdicts"]["good_share"] == relaxed["num_prompts"] / 8
    assert "class strict" in done.output
    assert "class relaxed" in done.output
