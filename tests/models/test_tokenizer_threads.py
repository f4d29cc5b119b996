"""A long prompt on the tokenizer's thread: the server's loop goes on."""

from __future__ import annotations

import random
import threading
import time

import pytest
from muxk.models.tokenizer import load_tokenizer

CHARACTERS = 300_000


@pytest.mark.model
def test_other_threads_run_while_a_long_prompt_is_encoded() -> None:
    tokenizer = load_tokenizer("smollm2-135m-instruct")
    choose = random.Random(1)
    text = " ".join(choose.choice("abcdefgh") * choose.randrange(2, 9) for _ in range(CHARACTERS // 6))
    started, ended = threading.Event(), threading.Event()
    took_s = []

    def encode() -> None:
        started.wait()
        began = time.perf_counter()
        tokenizer.encode(text)
        took_s.append(time.perf_counter() - began)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    longest_s, last = 0.0, time.perf_counter()
    started.set()
    while not ended.wait(0.001):
        now = time.perf_counter()
        longest_s, last = max(longest_s, now - last), now
    thread.join()
    longest_s = max(longest_s, time.perf_counter() - last)
    # An encoder that keeps the interpreter to itself makes the one pause as long as the encoding.
    assert longest_s < took_s[0] / 2
