"""What a choice's client reads of its tokens: text, ends, log-probabilities, the prompt."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from muxk.actors.messages import EmittedRow, SamplingParams, TextRow
from muxk.actors.text_output import TextOutput, WantedPrompt
from muxk.kernel.work import RowLogprobs, int32_bytes
from muxk.models.detokenizer import StopMatcher
from muxk.models.tokenizer import ByteTokenizer

PLAIN = SamplingParams(
    max_tokens=100, temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0, stop=(), ignore_eos=False
)
TOKENIZER = ByteTokenizer()


def output(prompt: WantedPrompt | None = None, **fields: Any) -> TextOutput:
    params = msgspec.structs.replace(PLAIN, **fields)
    return TextOutput(params, TOKENIZER.token_bytes, TOKENIZER.special_ids, True, prompt)


def emitted(data: bytes, reason: str | None = None, **fields: Any) -> EmittedRow:
    return EmittedRow(1, tuple(data), reason, 0, **fields)


def texts(given: TextOutput, *parts: bytes) -> list[TextRow]:
    """Rows of one token each but for what is given together, until one ends the choice."""
    rows = []
    for number, part in enumerate(parts):
        rows.append(given.row(emitted(part, "length" if number == len(parts) - 1 else None)))
        if rows[-1].finish_reason is not None:
            break
    return rows


def test_a_character_that_is_cut_by_the_end_is_one_replacement() -> None:
    rows = texts(output(), b"a", b"\xf0", b"\x9f", b"\x8e")
    assert [row.text for row in rows] == ["a", "", "", "\ufffd"]


def test_bytes_that_stay_invalid_are_replaced_at_once_and_nothing_piles_up() -> None:
    given = output()
    lengths = [len(given.row(emitted(b"\xff")).text) for _ in range(1000)]
    assert set(lengths) == {1}


def test_min_tokens_counts_tokens_when_a_row_has_several() -> None:
    rows = texts(output(stop=("b",), min_tokens=3), b"ab", b"bb", b"b")
    assert [row.text for row in rows] == ["ab", "b"]
    assert rows[-1].stop_reason == "b"


def test_a_stop_string_that_begins_before_min_tokens_ends_after_it() -> None:
    rows = texts(output(stop=("abc",), min_tokens=2), b"a", b"b", b"c")
    assert "".join(row.text for row in rows) == ""
    assert rows[-1].stop_reason == "abc"


def test_what_is_held_back_before_min_tokens_is_not_lost_at_the_end() -> None:
    rows = texts(output(stop=("abc",), min_tokens=50), b"x", b"a", b"b")
    assert "".join(row.text for row in rows) == "xab"


@given(
    text=st.text("ab", max_size=14), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    early=st.integers(0, 14), cut=st.integers(1, 5),
)  # fmt: skip
def test_the_first_stop_that_ends_behind_the_early_tokens_counts(
    text: str, stops: list[str], early: int, cut: int
) -> None:
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(max(early + 1, len(stop)), len(text) + 1)
        if text[end - len(stop) : end] == stop
    ]
    wanted = (text, None) if not ends else (text[: min(ends)[0] + min(ends)[1]], min(ends)[2])
    parts = [text[at : at + cut].encode() for at in range(0, len(text), cut)] + [b""]
    rows = texts(output(stop=tuple(stops), min_tokens=early), *parts)
    assert ("".join(row.text for row in rows), rows[-1].stop_reason) == wanted


def test_a_matcher_that_passes_everything_over_finds_nothing() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.pass_over("xaba") + matcher.finish() == "xaba"


def test_the_prompt_comes_once_with_its_log_probabilities() -> None:
    reported = RowLogprobs(0, 1, 98, -0.5, 2, (97, 98), (-0.1, -0.5))
    wanted = WantedPrompt(int32_bytes([97, 98, 256]), None, echo=True)
    given = output(wanted, prompt_logprobs=2)
    first = given.row(emitted(b"c", prompt_logprobs=(reported,)))
    assert first.prompt is not None
    assert (first.prompt.text, first.prompt.tokens) == ("ab", (97, 98, 256))
    [entry] = first.prompt.logprobs
    assert (entry.token_id, entry.token, entry.logprob, entry.rank) == (98, b"b", -0.5, 2)
    assert (entry.top_ids, entry.top_tokens, entry.top_logprobs) == ((97, 98), (b"a", b"b"), (-0.1, -0.5))
    assert given.row(emitted(b"d")).prompt is None


def test_a_report_without_echo_shows_the_tokens_and_no_text() -> None:
    wanted = WantedPrompt(int32_bytes([97]), "a", echo=False)
    prompt = output(wanted, prompt_logprobs=0).row(emitted(b"c")).prompt
    assert prompt is not None
    assert (prompt.text, prompt.tokens) == ("", (97,))


def test_the_end_token_is_spelled_out_when_both_fields_ask_for_it() -> None:
    for include, skip, text in ((True, False, "<end>"), (True, True, ""), (False, False, "")):
        given = output(include_stop_str_in_output=include, skip_special_tokens=skip)
        assert given.row(EmittedRow(1, (256,), "stop", 0)).text == text
