"""Token ids of prompts that nobody stores: what shares text matches in the real KV pool, page by page."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from muxk.actors.page_pool import PagePool
from muxk.client.arrivals import Arrivals
from muxk.client.reuse import PrefixReuse
from muxk.client.synthetic import synthetic
from muxk.client.traffic import (
    FIRST_ORDINARY_ID,
    GOLDEN,
    MASK,
    Span,
    WorkloadError,
    answer_ids,
    stream_ids,
    token_ids,
)

VOCABULARY = 32_000


def test_a_prompt_that_extends_another_begins_with_its_token_ids() -> None:
    first = (Span(7, 0, 100), Span(9, 0, 30))
    longer = (*first, Span(11, 0, 5))
    assert token_ids(longer, VOCABULARY)[:130].tolist() == token_ids(first, VOCABULARY).tolist()


def test_a_span_is_a_part_of_its_stream_wherever_it_stands_in_a_prompt() -> None:
    whole = stream_ids(Span(7, 0, 100), VOCABULARY)
    moved = token_ids((Span(3, 0, 17), Span(7, 40, 20)), VOCABULARY)
    assert moved[17:].tolist() == whole[40:60].tolist()


def test_ids_are_ordinary_tokens_of_the_vocabulary_and_differ_between_streams() -> None:
    ids = stream_ids(Span(1, 0, 50_000), 1000)
    assert ids.min() == FIRST_ORDINARY_ID
    assert ids.max() == 999
    assert np.bincount(ids)[FIRST_ORDINARY_ID:].min() > 20
    same = (stream_ids(Span(1, 0, 1000), VOCABULARY) == stream_ids(Span(2, 0, 1000), VOCABULARY)).sum()
    assert same < 5


def test_streams_with_close_numbers_are_no_shifted_copies_of_each_other() -> None:
    first = stream_ids(Span(5, 0, 500), VOCABULARY).tolist()
    for step in (1, GOLDEN):
        other = stream_ids(Span(5 + step & MASK, 0, 500), VOCABULARY).tolist()
        assert first[:50] not in [other[at : at + 50] for at in range(450)]
        assert other[:50] not in [first[at : at + 50] for at in range(450)]


def test_what_a_model_said_stands_in_place_of_the_planned_answer() -> None:
    prompt = (Span(1, 0, 3), Span(50, 0, 4), Span(2, 0, 3))
    planned = token_ids(prompt, VOCABULARY).tolist()
    assert token_ids(prompt, VOCABULARY, {50: [5, 6]}).tolist() == [*planned[:3], 5, 6, *planned[5:]]


def test_a_vocabulary_without_ordinary_tokens_is_refused_with_its_size() -> None:
    with pytest.raises(WorkloadError, match="a vocabulary of 32 tokens has no ordinary ones"):
        token_ids((Span(1, 0, 3),), 32)


@pytest.mark.parametrize("name", ["toolagent", "conversation", "openthoughts"])
def test_the_kv_pool_finds_exactly_the_prefixes_that_the_measure_counts(name: str) -> None:
    pool = PagePool(range(1, 400_000))
    measured = PrefixReuse(VOCABULARY)
    found_in_all = 0
    for number, request in enumerate(islice(synthetic(name, Arrivals(1.0, seed=3)).requests(), 150)):
        prompt = token_ids(request.prompt, VOCABULARY)
        found = pool.reserve(number, prompt.tobytes(), 0)
        assert found is not None
        assert found == measured.add(request)
        written = np.concatenate((prompt, answer_ids(request, VOCABULARY)))[:-1]
        while 16 * len(pool.pages_of(number)) < len(written):
            assert pool.grow(number) is not None
        pool.publish(number, written.tobytes())
        pool.release(number)
        found_in_all += found
    assert found_in_all > 150 * 200
