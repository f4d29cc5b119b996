"""Text as a client reads it piece by piece: whole characters, nothing of a stop string, nothing piles up."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import virtual_server
from muxk.actors import protocol as wire
from muxk.kernel.devices.sim import SimDevice
from muxk.kernel.work import SamplingColumns
from virtual_server import S, VirtualServer

PROMPT = [65] * 10


class ScriptedDevice(SimDevice):
    """Says the same bytes to everybody, whatever the prompt."""

    def __init__(self, *, script: bytes, **fields: Any) -> None:
        super().__init__(**fields)
        self._script = script

    def _sample(
        self,
        table: npt.NDArray[np.int32],
        rows: list[int],
        lengths: list[int],
        sampling: SamplingColumns,
    ) -> list[int]:
        return [self._script[length - len(PROMPT)] for length in lengths]


def stream(script: bytes, **fields: Any) -> tuple[VirtualServer, list[str]]:
    """A server that says this, and the pieces of text that a client got of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_server, "SimDevice", partial(ScriptedDevice, script=script + b"??"))
        server = VirtualServer(calibrate=False)
    wanted = {"prompt_token_ids": PROMPT, "max_tokens": len(script), "temperature": 0.0, "ignore_eos": True}
    server.submit(2 * S, "it", **(wanted | fields))
    server.run_until(60 * S)
    server.check_whole()
    return server, [event.text for _, _, event in server.events if isinstance(event, wire.Tokens)]


SCRIPTS = {
    "plain": b"abc",
    "two bytes": "é ü".encode(),
    "three bytes": "日本 語".encode(),
    "four bytes": "🎈🎈 x".encode(),
    "a part, then a space": b"a\xf0\x9f \xe6\x97 b",
    "a part, then another character": b"\xf0\x9f\x8e" + "é".encode(),
    "continuations without a beginning": b"\x80\x80a\xbf",
    "a part at the end": b"ab\xe6\x97",
    "overlong and surrogates": b"\xc0\xafa\xed\xa0\x80b",
    "joined faces": "👩‍👩‍👧 ok".encode(),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_pieces_are_whole_characters_and_only_what_is_invalid_is_replaced(script: bytes) -> None:
    server, pieces = stream(script)
    assert "".join(pieces) == script.decode("utf-8", "replace")
    assert server.outcome("it").tokens == list(script)
    held = 0
    for piece, byte in zip(pieces, script, strict=True):
        held = 0 if piece else held + 1
        assert held <= 3, f"held back before {byte}"


def test_a_stream_that_stays_invalid_is_replaced_byte_by_byte_and_ends() -> None:
    server, pieces = stream(b"\xff" * 300)
    assert pieces == ["\ufffd"] * 300
    assert server.outcome("it").terminal[0].completion_tokens == 300


STOPS = {
    "over four tokens": (b"abcDEFGHIJxyz", ["DEFGHIJ"], "abc"),
    "begun in vain": (b"abDEFabDEFGHIJ", ["DEFGHIJ"], "abDEFab"),
    "one inside another": (b"xxaabbb", ["aabb", "ab"], "xxa"),
    "at the first token": (b"abc", ["a"], ""),
    "in the middle of characters": ("日本語です".encode(), ["語で"], "日本"),
    "after a broken character": (b"a\xe6\x97STOP", ["STOP"], "a\ufffd"),
    "as the replacement itself": (b"ab\xff\xffcd", ["\ufffd\ufffd"], "ab"),
}


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize(("script", "stop", "text"), STOPS.values(), ids=STOPS.keys())
def test_nothing_of_a_stop_string_is_in_any_piece(
    script: bytes, stop: list[str], text: str, included: bool
) -> None:
    server, pieces = stream(script, stop=stop, include_stop_str_in_output=included)
    [finished] = server.outcome("it").terminal
    assert (finished.finish_reason, finished.stop_reason in stop) == ("stop", True)
    assert "".join(pieces) == text + (finished.stop_reason if included else "")


def test_a_stop_string_that_is_cut_by_the_end_is_text_after_all() -> None:
    server, pieces = stream(b"abcDEFGHI", stop=["DEFGHIJ"])
    assert "".join(pieces) == "abcDEFGHI"
    assert server.outcome("it").terminal[0].finish_reason == "length"


def test_a_client_of_tokens_alone_has_its_stop_strings_honoured() -> None:
    server, _ = stream(b"abcDEFGHIJxyz", stop=["DEF"])
    outcome = server.outcome("it")
    assert bytes(outcome.tokens) == b"abcDEF"
    assert outcome.terminal[0].completion_tokens == 6


@pytest.mark.parametrize("stop", [None, ["never"]])
def test_the_reported_tokens_of_a_stream_spell_its_bytes_even_where_its_text_can_not(
    stop: list[str] | None,
) -> None:
    script = SCRIPTS["a part, then a space"]
    server, _ = stream(script, logprobs=1, stop=stop)
    assert b"".join(entry.token for entry in server.outcome("it").logprobs) == script
