"""Synthetic workloads have the lengths of table 1 of the paper, and reuse that comes of the text itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice

import numpy as np
import pytest
from muxk.client.arrivals import Arrivals
from muxk.client.lengths import STRATUM, Draws, Lengths
from muxk.client.reuse import PrefixReuse
from muxk.client.sessions import Pace, SessionShape, SessionWorkload
from muxk.client.synthetic import NAMES, mixture, synthetic
from muxk.client.traffic import Span, TrafficRequest, WorkloadError, answer_ids, mix, token_ids
from muxk.kernel.work import PAGE_SIZE

REQUESTS = 20_000
TABLE = (
    ("sharegpt", (4, 226, 1024), (4, 195, 1838)),
    ("loogle", (3380, 30_000, 81_000), (2, 15, 326)),
    ("openthoughts", (311, 709, 4633), (684, 8374, 32_000)),
    ("conversation", (891, 7538, 123_000), (1, 342, 2000)),
    ("toolagent", (891, 8596, 123_000), (1, 182, 2000)),
)
REUSED = (("openthoughts", 243, 243), ("conversation", 4496, 120_000), ("toolagent", 4905, 120_000))


@lru_cache
def requests(name: str, seed: int) -> Sequence[TrafficRequest]:
    return tuple(islice(synthetic(name, Arrivals(1.0, seed=seed)).requests(), REQUESTS))


def reused_tokens(made: Iterable[TrafficRequest]) -> list[int]:
    """Of each prompt: the tokens in front that are spans of earlier requests, in whole pages."""
    known: dict[int, int] = {}
    reused = []
    for request in made:
        found, going, chain = 0, True, 0
        for span in (*request.prompt, Span(request.answer_stream, 0, request.output_tokens)):
            key = mix(chain, span.stream, span.start)
            if span.stream == request.answer_stream:
                # The last token of an answer was never computed; the pages before its own were.
                known[key] = span.tokens - 1
                break
            taken = min(known.get(key, 0), span.tokens) if going else 0
            going = going and taken == span.tokens
            found += taken
            known[key] = max(known.get(key, 0), span.tokens)
            chain = mix(chain, span.stream, span.start, span.tokens)
        reused.append(min(found, request.prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE)
    return reused


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "inputs", "outputs"), TABLE)
def test_lengths_keep_the_bounds_of_the_table_and_meet_its_means(
    name: str, inputs: tuple[int, int, int], outputs: tuple[int, int, int], seed: int
) -> None:
    made = requests(name, seed)
    for (least, mean, most), lengths in (
        (inputs, np.array([request.prompt_tokens for request in made])),
        (outputs, np.array([request.output_tokens for request in made])),
    ):
        assert least <= lengths.min() <= max(least * 1.1, least + 10)
        assert most * 0.6 <= lengths.max() <= most
        assert lengths.mean() == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "mean", "most"), REUSED)
def test_the_reused_part_of_prompts_meets_the_table(name: str, mean: int, most: int, seed: int) -> None:
    reused = reused_tokens(requests(name, seed))
    assert min(reused) == 0
    assert max(reused) <= most
    assert np.mean(reused) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("name", [name for name, *_ in REUSED])
def test_the_reused_part_is_what_a_prefix_cache_finds_in_the_token_ids(name: str) -> None:
    made = requests(name, 0)[:400]
    measured = PrefixReuse(vocabulary_size=32_000)
    assert [measured.add(request) for request in made] == reused_tokens(made)


@pytest.mark.parametrize("name", ["sharegpt", "loogle"])
def test_workloads_of_single_questions_share_nothing(name: str) -> None:
    measured = PrefixReuse(vocabulary_size=32_000)
    assert sum(measured.add(request) for request in requests(name, 0)[:300]) == 0


def test_the_next_turn_begins_with_the_whole_former_prompt_and_answer() -> None:
    before: dict[int, list[int]] = {}
    followed = 0
    for request in requests("conversation", 1)[:200]:
        prompt = token_ids(request.prompt, 32_000).tolist()
        if request.turn:
            said = before[request.session]
            assert prompt[: len(said)] == said
            assert len(prompt) > len(said)
            followed += 1
        before[request.session] = prompt + answer_ids(request, 32_000).tolist()
    assert followed > 50


def test_agents_share_system_prompts_and_tools_by_popularity() -> None:
    openings = [request for request in requests("toolagent", 0) if request.turn == 0]
    systems = [request.prompt[0].stream for request in openings if request.prompt[0].tokens == 1000]
    counts = sorted((systems.count(stream) for stream in {*systems}), reverse=True)
    assert len(counts) == 8
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.15)
    tools = {request.prompt[1].stream for request in openings if len(request.prompt) == 3}
    assert len(tools) == 32


def test_every_prefix_of_a_run_represents_the_distribution() -> None:
    drawn = np.array([request.prompt_tokens for request in requests("sharegpt", 1)[: 2 * STRATUM]])
    assert drawn[:STRATUM].mean() == pytest.approx(226, rel=0.02)
    assert drawn[STRATUM:].mean() == pytest.approx(226, rel=0.02)
    assert drawn[:STRATUM].tolist() != drawn[STRATUM:].tolist()


def test_the_same_seed_gives_the_same_requests_in_every_process() -> None:
    code = (
        "from itertools import islice; from muxk.client.arrivals import Arrivals\n"
        "from muxk.client.synthetic import synthetic; from muxk.client.traffic import mix\n"
        "made = list(islice(synthetic('toolagent', Arrivals(3.0, seed=9)).requests(), 300))\n"
        "print(mix(*str(made).encode()))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    here = list(islice(synthetic("toolagent", Arrivals(3.0, seed=9)).requests(), 300))
    assert printed == {f"{mix(*str(here).encode())}\n"}
    assert here != list(islice(synthetic("toolagent", Arrivals(3.0, seed=10)).requests(), 300))


def test_arrivals_are_those_that_were_asked_for_though_sessions_go_on_in_between() -> None:
    made = islice(synthetic("conversation", Arrivals(5.0, seed=2)).requests(), 500)
    assert [request.arrival_ns for request in made] == list(islice(Arrivals(5.0, seed=2).times_ns(), 500))


def test_a_turn_comes_no_sooner_than_the_assumed_end_of_the_one_before() -> None:
    ended: dict[int, int] = {}
    for request in islice(synthetic("conversation", Arrivals(20.0), Pace(2.0, 0.05)).requests(), 2000):
        assert request.arrival_ns >= ended.get(request.session, 0)
        ended[request.session] = request.arrival_ns + request.output_tokens * 50_000_000


def test_in_a_closed_loop_the_next_turn_waits_for_the_answer_and_says_the_same() -> None:
    workload = synthetic("conversation", Arrivals(1.0, seed=1), Pace(think_s=4.0))
    opened = {request.session: request for request in requests("conversation", 1) if request.turn == 0}
    second = {request.session: request for request in requests("conversation", 1) if request.turn == 1}
    thought = []
    for request in islice(workload.openings(), 2000):
        assert request.prompt == opened[request.session].prompt
        late_ns = request.arrival_ns + 3_600_000_000_000
        following = workload.next_turn(request, late_ns)
        assert (following is None) == (request.session not in second)
        if following is not None:
            assert following.prompt == second[request.session].prompt
            thought.append((following.arrival_ns - late_ns) / 1e9)
    assert np.mean(thought) == pytest.approx(4.0, rel=0.1)
    assert np.std(thought) == pytest.approx(4.0, rel=0.15)
    assert min(thought) >= 0


def test_openings_of_a_closed_loop_leave_room_for_the_turns_to_come() -> None:
    workload = synthetic("conversation", Arrivals(10.0))
    last = next(islice(workload.openings(), 5000, None)).arrival_ns / 1e9
    assert 5000 / last * workload.shape.turns_mean == pytest.approx(10.0, rel=0.05)


def test_a_session_ends_before_its_prompt_or_its_reused_part_is_too_long() -> None:
    shape = SessionShape(
        Lengths(10, 50, 100, 0.5), Lengths(1, 30, 100, 0.5), Lengths(1, 20, 100, 0.5), 0.99, 300, 250
    )
    made = list(islice(SessionWorkload("long", shape, Arrivals(1.0)).requests(), 3000))
    assert 250 < max(request.prompt_tokens for request in made) <= 300
    assert max(sum(span.tokens for span in request.prompt[:-1]) for request in made) <= 250


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    made = synthetic("toolagent", Arrivals(2.0)).requests()
    next(islice(made, 2000, None))
    tracemalloc.start()
    next(islice(made, 1000, None))
    kept, _ = tracemalloc.get_traced_memory()
    next(islice(made, 8000, None))
    later, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 4 MiB of draws are kept; 8,000 requests of this workload take 14 MB.
    assert later - kept < 6_000_000


def test_a_mixture_has_both_kinds_at_their_shares_in_order_of_arrival() -> None:
    mixed = mixture({"sharegpt": 3, "loogle": 1}, Arrivals(4.0))
    made = list(islice(mixed.requests(), 4000))
    assert [request.arrival_ns for request in made] == sorted(request.arrival_ns for request in made)
    long = [request for request in made if request.request_class == "loogle"]
    assert len(long) / len(made) == pytest.approx(0.25, rel=0.1)
    assert min(request.prompt_tokens for request in long) >= 3380
    assert made[-1].arrival_ns / 1e9 == pytest.approx(1000, rel=0.1)
    assert len({request.session for request in made}) == 4000


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            lambda: synthetic("sharegtp", Arrivals(1.0)),
            f"no workload 'sharegtp'; there are {', '.join(NAMES)}",
        ),
        (lambda: mixture({}, Arrivals(1.0)), "has no parts"),
        (lambda: mixture({"loogle": -1.0}, Arrivals(1.0)), "share of loogle is -1.0"),
        (lambda: Lengths(10, 5, 100, 1.0), "10 / 5 / 100 tokens"),
        (lambda: Lengths(1, 99.9, 100, 1.0).location, "a smaller sigma reaches means nearer to the ends"),
        (lambda: Pace(float("nan")), "think time is nan"),
    ],
)
def test_what_can_not_be_made_is_refused_with_the_reason(make: object, complaint: str) -> None:
    assert callable(make)
    with pytest.raises(WorkloadError) as refused:
        make()
    assert complaint in str(refused.value)


def test_draws_are_uniform_and_the_same_in_any_order() -> None:
    forward = [Draws(1).at(2, index) for index in range(5 * STRATUM)]
    draws = Draws(1)
    assert [draws.at(2, index) for index in reversed(range(5 * STRATUM))] == forward[::-1]
    assert np.histogram(forward, 16, (0, 1))[0].tolist() == [5 * STRATUM // 16] * 16
    assert abs(np.corrcoef(forward[:-1], forward[1:])[0, 1]) < 0.05
