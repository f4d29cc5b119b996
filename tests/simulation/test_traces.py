"""Trace files as workloads, the published ones where they are, and small ones of the same formats."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from collections import Counter
from itertools import islice, pairwise, takewhile
from pathlib import Path

import numpy as np
import pytest
from muxk.client.reuse import PrefixReuse
from muxk.client.trace_rows import TraceError, detect, read_rows
from muxk.client.traces import Replay, TraceWorkload, open_trace
from muxk.client.traffic import TrafficRequest, WorkloadError, token_ids
from trace_data import AZURE, MOONCAKE, NANOFLOW, VIDUR, mooncake_line, mooncake_sessions, trace_file

AZURE_TEXT = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)
PAIRS_TEXT = "TIMESTAMP,ContextTokens,GeneratedTokens\nXXX,42,285\nXXX,19,82\n"
VIDUR_TEXT = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n10.0,156,166,1\n"
)
BURST_TEXT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,7,1.2,ChatGPT,472,18,490,Conversation log\n"
    "45.5,8,1.2,GPT-4,1087,230,1317,Conversation log\n"
    "50,7,1.2,GPT-4,99,0,99,Conversation log\n"
    "118,7,1.2,GPT-4,417,276,693,Conversation log\n"
)


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "a.trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lengths(workload: TraceWorkload) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in workload.requests()]


def test_the_published_mooncake_trace_has_the_rows_and_reuse_that_others_counted() -> None:
    workload = open_trace(trace_file(MOONCAKE))
    made = list(workload.requests())
    assert len(made) == 12_031
    assert np.mean([request.prompt_tokens for request in made]) == pytest.approx(12_035, abs=1)
    assert np.mean([request.output_tokens for request in made]) == pytest.approx(343, abs=0.5)
    assert workload.survey.bin_ns == pytest.approx(3e9, rel=0.01)
    assert workload.recorded_rate == pytest.approx(3.40, abs=0.01)
    # Blocks in front that an earlier prompt had, over all prompt tokens: others counted 37.4 %.
    found = sum(found_by_request(made).values())
    assert found / sum(request.prompt_tokens for request in made) == pytest.approx(0.374, abs=0.001)


def test_rows_of_a_published_bin_are_spread_over_it_in_their_order() -> None:
    path = trace_file(MOONCAKE)
    recorded = [row.time_ns or 0 for row in read_rows(path)]
    made = [request.arrival_ns for request in open_trace(path, Replay(seed=1)).requests()]
    late = np.array(made) - np.array(recorded)
    assert made == sorted(made)
    assert late.min() >= 0
    assert late.max() < 3.02e9
    assert late.mean() == pytest.approx(1.5e9, rel=0.05)
    assert len(Counter(made)) > 12_000
    assert made == [request.arrival_ns for request in open_trace(path, Replay(seed=1)).requests()]
    assert made != [request.arrival_ns for request in open_trace(path, Replay(seed=2)).requests()]


def found_by_request(made: list[TrafficRequest]) -> dict[int, int]:
    """Of each request, known by its answer: tokens of blocks in front that earlier requests had."""
    seen: dict[int, None] = {}
    found = {}
    for request in made:
        known = [*takewhile(lambda span: span.stream in seen, request.prompt)]
        found[request.answer_stream] = sum(span.tokens for span in known)
        seen.update((span.stream, None) for span in request.prompt)
    return found


def test_in_a_sample_of_a_published_trace_every_request_finds_what_it_found_in_the_whole() -> None:
    path = trace_file(MOONCAKE)
    whole = found_by_request(list(open_trace(path, Replay(seed=5)).requests()))
    sampled = open_trace(path, Replay(rate=1.0, seed=5))
    found = found_by_request(list(sampled.requests()))
    first = next(iter(found))
    # The first block, which all rows share, is there from the sample's first request on.
    assert found[first] == 0
    assert all(tokens == whole[answer] for answer, tokens in found.items() if answer != first)
    assert len(found) / (sampled.survey.seconds * sampled.stretch) == pytest.approx(1.0)
    assert 0.8 < sampled.stretch < 1.25


def test_the_published_azure_trace_is_replayed_as_recorded() -> None:
    workload = open_trace(trace_file(AZURE))
    made = list(workload.requests())
    assert len(made) == 19_366
    assert workload.recorded_rate == pytest.approx(5.53, abs=0.01)
    assert np.mean([request.prompt_tokens for request in made]) == pytest.approx(1155, abs=1)
    assert made[1].arrival_ns - made[0].arrival_ns == 4_314_579_000
    faster = list(open_trace(trace_file(AZURE), Replay(rate=11.06)).requests())
    assert len(faster) == 19_366
    assert faster[-1].arrival_ns == pytest.approx(made[-1].arrival_ns / 2, rel=0.001)


@pytest.mark.parametrize(("name", "rows"), [(NANOFLOW, 58_787), (VIDUR, 28_257)])
def test_published_pairs_of_lengths_come_at_the_rate_asked_for(name: str, rows: int) -> None:
    made = list(open_trace(trace_file(name), Replay(rate=4.0)).requests())
    assert len(made) == rows
    assert made[-1].arrival_ns / 1e9 == pytest.approx(rows / 4.0, rel=0.03)


@pytest.mark.parametrize(
    ("text", "name", "pairs"),
    [
        (AZURE_TEXT, "azure", [(374, 44), (396, 109)]),
        (AZURE_TEXT.strip(), "azure", [(374, 44), (396, 109)]),
        ("\ufeff" + AZURE_TEXT.replace("\r\n", "\n\n"), "azure", [(374, 44), (396, 109)]),
        (PAIRS_TEXT, "length pairs", [(42, 285), (19, 82)]),
        (VIDUR_TEXT, "length pairs", [(3772, 54), (10, 156)]),
        (BURST_TEXT, "burstgpt", [(472, 18), (1087, 230), (417, 276)]),
        (mooncake_line(0, 600, 5, [0, 1]) + "\n", "mooncake", [(600, 5)]),
    ],
)
def test_a_format_is_known_by_its_content_whatever_the_file_is_called(
    tmp_path: Path, text: str, name: str, pairs: list[tuple[int, int]]
) -> None:
    path = written(tmp_path, text)
    assert detect(path).name == name
    rate = 1.0 if name == "length pairs" else None
    assert lengths(open_trace(path, Replay(rate))) == pairs


def test_times_are_kept_to_the_nanosecond(tmp_path: Path) -> None:
    azure = list(open_trace(written(tmp_path, AZURE_TEXT)).requests())
    assert [request.arrival_ns for request in azure] == [0, 4_314_579_000]
    burst = list(open_trace(written(tmp_path, BURST_TEXT)).requests())
    assert [request.arrival_ns for request in burst] == [0, 40_500_000_000, 113_000_000_000]
    assert burst[0].session == burst[2].session != burst[1].session


GOOD = mooncake_line(0, 600, 5, [0, 1])


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        (f"{GOOD}\n{GOOD[:-20]}", 2, "not a whole JSON object"),
        (
            f"{GOOD}\n{mooncake_line(0, -5, 5, [])}\n",
            2,
            "input_length is -5; it must be a number of tokens",
        ),
        (f"{GOOD}\n{mooncake_line(0, 600, 0, [0, 1])}", 2, "output_length is 0"),
        (f"{GOOD}\n{GOOD.replace('600', 'NaN')}", 2, "JSON"),
        (f"{GOOD}\n{GOOD.replace('600', 'null')}", 2, "Expected `int`, got `null`"),
        (f"{GOOD}\n{mooncake_line(-3, 600, 5, [0, 1])}", 2, "timestamp is -3; it must be 0 or later"),
        (f"{GOOD}\n{mooncake_line(0, 1600, 5, [0, 1])}", 2, "2 hash_ids; 1600 tokens make 4 blocks of 512"),
        (f"{GOOD}\n{mooncake_line(0, 600, 5, [0, -1])}", 2, "hash_ids has -1; an id is a number from 0"),
        (
            f"{GOOD}\n{mooncake_line(0, 600, 5, [1 << 64, 1])}",
            2,
            "hash_ids has 18446744073709551616; an id is",
        ),
        (
            f"{GOOD}\n{mooncake_line(10**4000, 600, 5, [0, 1])}",
            2,
            "timestamp is a number of about 3986 digits",
        ),
        (f"{GOOD}\n{mooncake_line(0, 10**4000, 5, [0, 1])}", 2, "input_length is a number of about 3986 dig"),
        (f'{GOOD}\n{{"timestamp": 1}}\n', 2, "a row has timestamp, input_length, output_length and hash_ids"),
        (f"{mooncake_line(9, 600, 5, [0, 1])}\n\n{GOOD}\n", 3, "sort the file by time"),
        (AZURE_TEXT + "2023-11-16 18:15:51.22,87", 4, "no GeneratedTokens, column 3"),
        (AZURE_TEXT + "2023-11-16 18:15:51.22,87,\n", 4, "the line is cut, or lacks a value"),
        (
            AZURE_TEXT + "2023-11-16 18:61:51.22,87,5\n",
            4,
            "TIMESTAMP is '2023-11-16 18:61:51.22'; it must be like",
        ),
        (
            AZURE_TEXT + "2023-11-16 18:15:51.22,nan,5\n",
            4,
            "ContextTokens is nan; it must be a finite",
        ),
        (AZURE_TEXT + "2023-11-16 18:15:51.22,-4,5\n", 4, "ContextTokens is -4"),
        (AZURE_TEXT + "2023-11-16 18:15:51.22,4.5,5\n", 4, "must be a whole number of tokens"),
        (AZURE_TEXT + "2023-11-16 18:15:51.22,1e300,5\n", 4, "from 1 to 16,777,216"),
        (AZURE_TEXT + '2023-11-16 18:15:51.22,"4,5\n', 4, "not a line of CSV"),
        (AZURE_TEXT.replace("2023-11-16 18:15:46.6805900", '"2023'), 2, "not a line of CSV"),
        (AZURE_TEXT.replace("ContextTokens", '"ContextTokens'), 1, "not a line of CSV"),
        (AZURE_TEXT.replace("2023-11-16 18:15:46.6805900", ""), 2, "no TIMESTAMP, column 1"),
        (AZURE_TEXT + "2020-11-16 18:15:51.22,4,5\n", 4, "sort the file by time"),
        (PAIRS_TEXT + "XXX,abc,5\n", 4, "ContextTokens is 'abc'; it must be a number"),
        (VIDUR_TEXT + "12,", 4, "no num_decode_tokens, column 2"),
        (BURST_TEXT + "inf,7,1.2,GPT-4,417,276,693,x\n", 6, "Timestamp is inf; it must be a finite number"),
        (AZURE_TEXT.encode() + b"\xff\xfe\n", 4, "byte 1 is no UTF-8 text"),
        (AZURE_TEXT.encode() + b"\0\0\0\0", 4, "bytes of value 0"),
        (AZURE_TEXT + "9" * (5 << 20), 4, "a line of more than 4,194,304 bytes"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", 1, "git lfs pull"),
        ("a,b,c\n1,2,3\n", 1, "unknown format, beginning with 'a,b,c'; known are JSON lines"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", 1, "a header and no row below it"),
        (gzip.compress(AZURE_TEXT.encode(), mtime=0), 1, "a gzip file; unpack it first"),
        (AZURE_TEXT + "2023-11-16 18:15:51.22,1000000000,5\n", 4, "from 1 to 16,777,216"),
        (AZURE_TEXT + "9999-12-31 23:59:59,4,5\n", 4, "more than a century after that of the first row"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens,Timestamp\n1,2,3,4\n", 1, "'Timestamp' is there twice"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line_and_what_would_be_right(
    tmp_path: Path, text: str | bytes, line: int, complaint: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as refused:
        open_trace(path, Replay(rate=1.0))
    assert str(refused.value).startswith(f"{path}:{line}: ")
    assert complaint in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("text", ["", "\n\n", "\ufeff"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="the file is empty"):
        open_trace(written(tmp_path, text))


def test_a_file_of_failed_requests_only_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    head, _, _ = BURST_TEXT.partition("\n")
    with pytest.raises(TraceError, match="no request in it"):
        open_trace(written(tmp_path, f"{head}\n50,7,1.2,GPT-4,99,0,99,Conversation log\n"))
    with pytest.raises(TraceError, match="No such file"):
        open_trace(tmp_path / "nothing.csv")
    with pytest.raises(TraceError, match="directory"):
        open_trace(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(TraceError, match="a pipe or a device; a trace is read twice"):
        open_trace(pipe)


def test_lengths_without_times_need_a_rate(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="has lengths and no times of arrival: say at which rate"):
        open_trace(written(tmp_path, PAIRS_TEXT))


@pytest.mark.parametrize("rate", [0.0, -2.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(WorkloadError, match="it must be a finite number above 0"):
        Replay(rate)


def test_a_sample_holds_whole_sessions_and_comes_at_the_rate_asked_for(tmp_path: Path) -> None:
    path = mooncake_sessions(tmp_path / "m.jsonl", sessions=300, turns=4)
    whole = open_trace(path)
    turns = Counter(request.session for request in whole.requests())
    assert len(turns) == 300
    sampled = open_trace(path, Replay(whole.recorded_rate / 3, seed=1))
    made = list(sampled.requests())
    assert 50 < len({request.session for request in made}) < 150
    assert {*Counter(request.session for request in made).values()} == {4}
    span_s = sampled.survey.seconds * sampled.stretch
    assert len(made) / span_s == pytest.approx(whole.recorded_rate / 3)
    others = {
        request.session for request in open_trace(path, Replay(whole.recorded_rate / 3, seed=2)).requests()
    }
    assert others != {request.session for request in made}


def test_the_blocks_of_a_session_match_page_by_page(tmp_path: Path) -> None:
    path = mooncake_sessions(tmp_path / "m.jsonl", sessions=6, turns=3)
    measured = PrefixReuse(32_000)
    by_session: dict[int, list[int]] = {}
    for request in open_trace(path, Replay(seed=3)).requests():
        by_session.setdefault(request.session, []).append(measured.add(request))
    first, *later = by_session.values()
    # The last block of a prompt is a partial one: its whole pages are found by the next turn.
    partial = (512 - 100) // 16 * 16
    assert first == [0, 512 + partial, 1024 + partial]
    assert later == [[512, 512 + partial, 1024 + partial]] * 5


def test_a_prompt_in_part_of_a_block_is_a_prefix_of_one_with_all_of_it(tmp_path: Path) -> None:
    lines = f"{mooncake_line(0, 100, 1, [7])}\n{mooncake_line(1, 512, 1, [7])}\n"
    short, full = (
        token_ids(r.prompt, 32_000).tolist() for r in open_trace(written(tmp_path, lines)).requests()
    )
    assert full[:100] == short


def test_replaying_a_long_file_keeps_no_rows(tmp_path: Path) -> None:
    path = mooncake_sessions(tmp_path / "m.jsonl", sessions=2000, turns=5)
    workload = open_trace(path, Replay(rate=0.5))
    tracemalloc.start()
    count = sum(1 for _ in workload.requests())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count > 500
    assert peak < 1_000_000


def test_a_quiet_time_is_kept_and_a_bin_never_reaches_into_the_next(tmp_path: Path) -> None:
    starts_s = (0, 3, 6, 60, 63)
    stamps_ms = [1000 * start for start in starts_s for _ in range(10)]
    lines = "\n".join(mooncake_line(at, 100, 1, [n]) for n, at in enumerate(stamps_ms))
    made = [r.arrival_ns / 1e9 for r in open_trace(written(tmp_path, lines), Replay(seed=1)).requests()]
    for number, start in enumerate(starts_s):
        within = made[10 * number : 10 * number + 10]
        assert start <= min(within)
        assert max(within) < start + 3.01
    assert all(later >= earlier for earlier, later in pairwise(made))


def test_at_most_so_many_requests_are_made(tmp_path: Path) -> None:
    path = mooncake_sessions(tmp_path / "m.jsonl", sessions=30, turns=2)
    everything: list[TrafficRequest] = list(open_trace(path).requests())
    assert list(open_trace(path, Replay(requests_max=7)).requests()) == list(islice(everything, 7))
    with pytest.raises(WorkloadError, match="at most 0 requests"):
        Replay(requests_max=0)


@pytest.mark.parametrize("seed", range(4))
def test_any_damage_is_a_complaint_that_names_the_file_or_leaves_good_rows(tmp_path: Path, seed: int) -> None:
    mooncake = mooncake_sessions(tmp_path / "m", sessions=9, turns=2).read_text()
    random = np.random.default_rng(seed)
    inserts = (b"-", b'"', b"\n", b",", b"1e999", b"nan", b"\0", b"_", b"{", b"\xef\xbb\xbf", b"9" * 25)
    texts = (mooncake, AZURE_TEXT, PAIRS_TEXT, VIDUR_TEXT, BURST_TEXT)
    complaints = []
    for _ in range(100):
        text = bytearray(texts[random.integers(5)].encode())
        for place in random.integers(0, len(text), 3).tolist():
            match int(random.integers(4)):
                case 0:
                    text[place : place + 1] = bytes([int(random.integers(256))])
                case 1:
                    del text[place : place + 20]
                case 2:
                    text[place:place] = inserts[random.integers(len(inserts))]
                case _:
                    text[place:place] = text[max(0, place - 50) : place]
        path = written(tmp_path, bytes(text))
        try:
            made = list(open_trace(path, Replay(rate=1.0)).requests())
        except WorkloadError as error:
            complaints.append(str(error))
        else:
            assert all(request.prompt_tokens >= 1 and request.output_tokens >= 1 for request in made)
            assert [request.arrival_ns for request in made] == sorted(request.arrival_ns for request in made)
    assert 30 < len(complaints) < 100
    assert all(complaint.startswith(str(path)) for complaint in complaints)
