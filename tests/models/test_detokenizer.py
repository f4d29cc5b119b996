"""Text leaves in whole characters, and nothing of a stop string leaves at all."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from muxk.models.detokenizer import Detokenizer, StopMatcher
from muxk.models.tokenizer import ByteTokenizer


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[first:last] for first, last in itertools.pairwise(edges)]


def detokenise(parts: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(lambda token: parts[token])
    pieces = [detokenizer.push([token]) for token in range(len(parts))]
    return [*pieces, detokenizer.finish()]


@given(text=st.text(), places=st.lists(st.integers(0, 1000)))
def test_text_is_the_same_however_its_bytes_are_cut(text: str, places: list[int]) -> None:
    pieces = detokenise(cut(text.encode(), places))
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@given(data=st.binary(max_size=40), places=st.lists(st.integers(0, 1000)))
def test_invalid_bytes_are_replaced_as_python_replaces_them(data: bytes, places: list[int]) -> None:
    assert "".join(detokenise(cut(data, places))) == data.decode("utf-8", "replace")


@given(text=st.text(min_size=1))
def test_at_most_three_bytes_are_held_back(text: str) -> None:
    data = text.encode()
    detokenizer = Detokenizer(ByteTokenizer().token_bytes)
    sent = 0
    for count, byte in enumerate(data, start=1):
        sent += len(detokenizer.push([byte]).encode())
        assert count - sent <= 3


def test_a_character_cut_short_becomes_one_replacement_at_the_end() -> None:
    assert detokenise([b"a\xf0\x9f", b"\x8e"]) == ["a", "", "\ufffd"]


def test_skipped_tokens_add_nothing_even_inside_a_character() -> None:
    first, second = "é".encode()
    tokens = [256, first, 256, second, 256]
    skipping = Detokenizer(ByteTokenizer().token_bytes, ByteTokenizer.special_ids)
    assert (skipping.push(tokens), skipping.finish()) == ("é", "")
    plain = Detokenizer(ByteTokenizer().token_bytes)
    assert plain.push([104, 256]) == "h<end>"


LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


def run_matcher(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher, sent = StopMatcher(stops), ""
    for piece in pieces:
        safe, stop = matcher.push(piece)
        sent += safe
        if stop is not None:
            return sent, stop
    return sent + matcher.finish(), None


@given(text=LETTERS, stops=STOPS, places=st.lists(st.integers(0, 100)))
def test_the_output_ends_before_the_stop_string_that_is_complete_first(
    text: str, stops: list[str], places: list[int]
) -> None:
    pieces = [piece.decode() for piece in cut(text.encode(), places)]
    wanted: tuple[str, str | None] = (text, None)
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            wanted = (text[: end - len(longest)], longest)
            break
    assert run_matcher(pieces, stops) == wanted


@given(text=LETTERS, stops=STOPS, places=st.lists(st.integers(0, 100)))
def test_no_stop_string_is_ever_sent(text: str, stops: list[str], places: list[int]) -> None:
    sent, _ = run_matcher([piece.decode() for piece in cut(text.encode(), places)], stops)
    assert not any(stop in sent for stop in stops)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\nUser:", "END"])
    assert matcher.push("Hello\nUs") == ("Hello", None)
    assert matcher.push("ual") == ("\nUsual", None)
    assert matcher.push(" E") == (" ", None)
    assert matcher.push("ND more") == ("", "END")
    assert matcher.push("x") == ("", None)
    assert matcher.finish() == ""


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopMatcher([""])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.finish() == ""
