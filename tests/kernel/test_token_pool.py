"""The simulated KV pool: tokens depend on the whole context and on nothing else, and a wrong page shows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from muxk.kernel import token_pool
from muxk.kernel.token_pool import END_TOKEN, TokenPool
from muxk.kernel.work import (
    PAGE_SIZE,
    DecodeWork,
    PrefillWork,
    RowExtras,
    SamplingColumns,
    int32_array,
    int32_bytes,
)

PROMPT = [(7 * index) % 101 for index in range(45)]


def sampling(
    rows: int, temperature: float = 0.0, seed: int = 0, extras: tuple[RowExtras, ...] = ()
) -> SamplingColumns:
    return SamplingColumns(
        np.full(rows, temperature, "<f4").tobytes(),
        np.ones(rows, "<f4").tobytes(),
        bytes(4 * rows),
        np.full(rows, seed, "<u8").tobytes(),
        bytes(4 * rows),
        temperature == 0 and not extras,
        extras=extras,
    )


def prefill(
    pool: TokenPool,
    prompt: list[int],
    pages: list[int],
    reused: int = 0,
    columns: SamplingColumns | None = None,
    chunks: tuple[int, ...] = (),
) -> int:
    """Compute the prompt after its reused tokens, in chunks; the sampled token."""
    new = prompt[reused:]
    work = PrefillWork(
        1,
        (1,),
        int32_bytes(new),
        (len(new),),
        (reused,),
        int32_bytes(pages),
        len(pages),
        columns or sampling(1),
    )
    cuts = (0, *chunks, len(new))
    output = b""
    for first, last in itertools.pairwise(cuts):
        output = pool.prefill(work, range(first, last)).tokens
    return int(int32_array(output)[0])


def decode(pool: TokenPool, token: int, position: int, pages: list[int], step: int = 1) -> int:
    work = DecodeWork(
        step,
        1,
        (1,),
        int32_bytes([token]),
        int32_bytes([position]),
        int32_bytes(pages),
        len(pages),
        1,
        sampling(1),
    )
    return int(int32_array(pool.decode(work).tokens)[0])


def continued(pool: TokenPool, token: int, length: int, pages: list[int], steps: int) -> list[int]:
    tokens = [token]
    for step in range(steps):
        tokens.append(decode(pool, tokens[-1], length + step, pages, step + 1))
    return tokens


def test_chunks_reused_prefixes_and_recomputation_give_the_tokens_of_one_pass() -> None:
    pages = [1, 2, 3, 4, 5]
    pool = TokenPool(64, None)
    whole = continued(pool, prefill(pool, PROMPT, pages), len(PROMPT), pages, 12)
    chunked = TokenPool(64, None)
    assert (
        continued(chunked, prefill(chunked, PROMPT, pages, chunks=(5, 16, 33)), len(PROMPT), pages, 12)
        == whole
    )
    others = [1, 2, 10, 11, 12]
    assert continued(pool, prefill(pool, PROMPT, others, 2 * PAGE_SIZE), len(PROMPT), others, 12) == whole
    evicted = [20, 21, 22, 23, 24]
    again = PROMPT + whole[:7]
    assert prefill(pool, again, evicted) == whole[7]


@pytest.mark.parametrize("place", [0, 31, 44])
def test_every_token_of_the_prompt_matters(place: int) -> None:
    """One other token gives other outputs; single ones may agree, since there are 27 letters."""
    changed = [*PROMPT]
    changed[place] += 1
    pages = [1, 2, 3, 4, 5]
    one, other = TokenPool(64, None), TokenPool(64, None)
    assert continued(one, prefill(one, PROMPT, pages), 45, pages, 8) != continued(
        other, prefill(other, changed, pages), 45, pages, 8
    )


def test_a_page_that_somebody_else_wrote_changes_what_follows() -> None:
    pages = [1, 2, 3, 4]
    pool = TokenPool(64, None)
    token = prefill(pool, PROMPT, pages)
    expected = continued(pool, token, len(PROMPT), pages, 8)
    pool = TokenPool(64, None)
    prefill(pool, PROMPT, pages)
    prefill(pool, [5] * 20, [3, 9])  # page 3 holds the end of the prompt
    assert continued(pool, token, len(PROMPT), pages, 8) != expected


def test_a_page_that_was_never_written_changes_what_follows() -> None:
    pool, good = TokenPool(64, None), TokenPool(64, None)
    token = prefill(good, PROMPT, [1, 2, 3, 4])
    expected = continued(good, token, len(PROMPT), [1, 2, 3, 4], 8)
    prefill(pool, PROMPT, [1, 2, 3, 4])
    assert continued(pool, token, len(PROMPT), [1, 2, 7, 8], 8) != expected


def test_a_carried_token_is_the_one_that_the_step_before_sampled() -> None:
    pool, told = TokenPool(64, None), TokenPool(64, None)
    pages = [1, 2, 3, 4]
    first = prefill(pool, PROMPT, pages)
    prefill(told, PROMPT, pages)
    expected = continued(told, first, len(PROMPT), pages, 2)
    decode(pool, first, len(PROMPT), pages, step=1)
    carried = DecodeWork(
        2,
        1,
        (1,),
        int32_bytes([0]),
        int32_bytes([len(PROMPT) + 1]),
        int32_bytes(pages),
        4,
        1,
        sampling(1),
        after_step=1,
        carried_rows=int32_bytes([0]),
        carried_from=int32_bytes([0]),
    )
    assert int(int32_array(pool.decode(carried).tokens)[0]) == expected[2]


def test_seeds_matter_with_a_temperature_and_not_without() -> None:
    def tokens(temperature: float, seed: int) -> list[int]:
        found = []
        for length in range(10, 30):
            pool = TokenPool(64, None)
            found.append(prefill(pool, PROMPT[:length], [1, 2], columns=sampling(1, temperature, seed)))
        return found

    assert tokens(1.0, 1) == tokens(1.0, 1)
    assert tokens(1.0, 1) != tokens(1.0, 2)
    assert tokens(0.0, 1) == tokens(0.0, 2)


def test_a_banned_token_is_drawn_again_and_log_probabilities_are_reported() -> None:
    pool = TokenPool(64, None)
    token = prefill(pool, PROMPT, [1, 2, 3])
    extras = (RowExtras(0, banned=int32_bytes([token]), logprobs=1),)
    work = PrefillWork(
        1, (1,), int32_bytes(PROMPT), (45,), (0,), int32_bytes([4, 5, 6]), 3, sampling(1, extras=extras)
    )
    output = pool.prefill(work, range(45))
    assert int(int32_array(output.tokens)[0]) != token
    assert [(entry.row, entry.position) for entry in output.logprobs] == [(0, 45)]


def test_sequences_end_by_chance_only_when_the_device_is_told_so() -> None:
    def ends(end_every: int | None) -> int:
        pool, count = TokenPool(64, end_every), 0
        for length in range(1, 31):
            count += prefill(pool, PROMPT[:length], [1, 2]) == END_TOKEN
        return count

    assert ends(None) == 0
    assert 0 < ends(4) < 30


def test_positions_far_past_those_seen_before_have_room() -> None:
    prompt = [1] * 9000
    pages = list(range(1, 565))
    assert prefill(TokenPool(600, None), prompt, pages) == prefill(
        TokenPool(600, None), prompt, pages, chunks=(4500,)
    )


@pytest.mark.parametrize("end_every", [None, 5])
def test_a_step_of_many_rows_gives_what_steps_of_a_few_do(
    end_every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed in two ways. Rows cross page borders, and one reads a page that is not its own."""
    rows, steps, width = 5, 2 * PAGE_SIZE + 3, 8
    tables = [list(range(1 + width * row, 1 + width * (row + 1))) for row in range(rows)]
    outputs = []
    for few in (rows, rows - 1):
        monkeypatch.setattr(token_pool, "FEW_ROWS", few)
        pool = TokenPool(64, end_every)
        firsts = [prefill(pool, PROMPT[: 3 + 5 * row], tables[row]) for row in range(rows)]
        tables_used = [*tables[:-1], [*tables[0][:1], *tables[-1][1:]]]
        outputs.append([])
        for step in range(1, steps):
            work = DecodeWork(
                step,
                1,
                tuple(range(rows)),
                int32_bytes(firsts),
                int32_bytes([3 + 5 * row + step - 1 for row in range(rows)]),
                int32_bytes(np.array(tables_used)),
                width,
                1,
                sampling(rows),
                step - 1,
                int32_bytes(range(1, rows) if step > 1 else []),
                int32_bytes(range(1, rows) if step > 1 else []),
            )
            outputs[-1].append(pool.decode(work).tokens)
            firsts[0] = int(int32_array(outputs[-1][-1])[0])
    assert outputs[0] == outputs[1]
    assert len(dict.fromkeys(outputs[0])) > steps // 2
