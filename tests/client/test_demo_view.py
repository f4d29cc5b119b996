"""What the demo draws fits a small terminal and says what is known."""

from __future__ import annotations

import io
from typing import Any

from muxk.client import protocol
from muxk.client.demo_load import DemoFacts, long_report
from muxk.client.demo_view import live_view, plain_line, residency
from rich.console import Console

SERVER = protocol.Welcome(1, "smollm2-135m-instruct", "cpu:2", "muxwise", 2048, 49152)


def state(lanes: list[dict[str, Any]], spent: dict[str, int]) -> dict[str, Any]:
    split = {"decode": 1, "prefill": 1}
    return {
        "server": {"policy": "muxwise"},
        "arbiter": {"units": 2, "split": split, "lanes": lanes, "split_residency_ms": spent},
        "kv_pool": {"pages_used": 141, "pages_total": 2048},
        "admission": {"waiting": 1},
    }


def facts() -> DemoFacts:
    seen = DemoFacts()
    seen.gaps, seen.ttft_short, seen.ttft_long = [20.0, 25.0, 400.0], [120.0], [12_100.0]
    seen.longs_sent, seen.longs_answered = 2, 1
    for chat in seen.chats:
        chat.question, chat.text = "Why do cats purr?", "one word after the other and " * 40 + "THE END"
    return seen


def drawn(view: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=80, height=24)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_live_view_fits_a_small_terminal_and_shows_the_newest_words() -> None:
    lanes = [{"phase": "decode", "rows": 4}, {"phase": "prefill", "tokens": 1512, "layers_left": 23}]
    lines = drawn(live_view(facts(), state(lanes, {}), SERVER, 35.0, 80))
    text = "\n".join(lines)
    assert len(lines) <= 24
    assert text.count("THE END") == 4
    for shown in ("decode 1 + prefill 1 of 2 units", "prefill of 1,512 tokens", "P99 392 ms", "12.1 s"):
        assert shown in text


def test_a_view_before_the_first_state_and_token_is_no_error() -> None:
    assert "max -" in "\n".join(drawn(live_view(DemoFacts(), {}, SERVER, 35.0, 80)))
    assert "split 0+0" in plain_line(DemoFacts(), {})


def test_of_several_devices_each_has_a_line_and_pages_and_queues_are_added_up() -> None:
    lanes = [[{"phase": "prefill", "tokens": 1512, "layers_left": 23}], [{"phase": "decode", "rows": 4}]]
    several: dict[str, Any] = {"server": {"policy": "splitwise"}, "placement": {"waiting": 2}}
    for number, running in enumerate(lanes):
        one = state(running, {"1+1": 500 + number * 1000})
        several |= {f"{actor}@{number}": one[actor] for actor in ("arbiter", "kv_pool", "admission")}
    lines = drawn(live_view(facts(), several, SERVER, 35.0, 80))
    text = "\n".join(lines)
    assert len(lines) <= 24
    for shown in ("device 0  no decode step", "device 1  decode step of 4", "4 waiting", "282 of 4096"):
        assert shown in text
    assert "split 1+1 | 1+1  waiting 4  pages 282/4096" in plain_line(facts(), several)
    assert residency({}, several) == [("decode 1 + prefill 1 units", 1.0)]


def test_time_by_split_counts_only_the_demo() -> None:
    before, after = state([], {"2+2": 9000}), state([], {"2+2": 10_000, "1+1": 3000})
    assert residency(before, after) == [
        ("decode 1 + prefill 1 units", 0.75),
        ("the whole device for both in turn", 0.25),
    ]


def test_every_long_report_is_another_one_from_the_start() -> None:
    assert long_report(1)[:10] != long_report(2)[:10]
