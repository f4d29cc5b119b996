"""An answer is never as long as the question, and a long list is refused before it is looked through."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from muxk.actors import protocol as wire
from muxk.actors.gateway_policy import FILENAME_CHARS_MAX, REPORT_CHARS_MAX
from muxk.actors.gateway_state import ERROR_CHARS_MAX
from muxk.actors.validation import REQUEST_ID_CHARS_MAX
from muxk.kernel.fronts import ADMIN_PREFIX
from muxk.kernel.messages import SendFrame
from virtual_server import S, VirtualServer

LONG = 1_000_000
ADMIN = ADMIN_PREFIX + b"operator"
BOUND_BYTES = 4 * (ERROR_CHARS_MAX + REQUEST_ID_CHARS_MAX)


class MeasuringServer(VirtualServer):
    """Keeps the length of every frame that carries events."""

    def __init__(self) -> None:
        self.frame_bytes: list[int] = []
        super().__init__(calibrate=False)

    def _receive(self, frame: SendFrame) -> None:
        self.frame_bytes.append(len(frame.payload))
        super()._receive(frame)


def answers(frame: Any, peer: bytes = b"client") -> tuple[list[Any], int]:
    """What the server says to a frame, and the bytes of its longest frame."""
    server = MeasuringServer()
    server.send_raw(1 * S, msgspec.msgpack.encode(frame), peer)
    server.run_until(5 * S)
    return [event for _, _, event in server.events], max(server.frame_bytes)


BROKEN = {
    "long id, wrong type": {"type": "Submit", "request_id": "x" * LONG, "temperature": "hot"},
    "long id, unknown field": {"type": "Submit", "request_id": "x" * LONG, "nope": 1, "max_tokens": []},
    "long id, no prompt": {"type": "Submit", "request_id": "x" * LONG},
    "long id, empty prompt": {"type": "Submit", "request_id": "x" * LONG, "prompt": ""},
    "long field name": {"type": "Hello", "y" * LONG: 1},
    "long command": {"type": "z" * LONG},
    "long string for a number": {"type": "Submit", "request_id": "a", "max_tokens": "1" * LONG},
    "long role": {
        "type": "Submit",
        "request_id": "a",
        "messages": [{"role": "r" * LONG, "content": ["c" * LONG]}],
    },
}


@pytest.mark.parametrize("frame", BROKEN.values(), ids=BROKEN.keys())
def test_the_answer_to_a_long_broken_frame_is_short(frame: dict[str, Any]) -> None:
    events, longest = answers(frame)
    assert [type(event) for event in events] in ([wire.Failed], [wire.ProtocolError])
    assert longest <= BOUND_BYTES


def test_a_request_with_a_long_id_fails_by_the_start_of_it() -> None:
    [failed], _ = answers({"type": "Submit", "request_id": "x" * LONG, "prompt": "hello"})
    assert failed.request_id == "x" * REQUEST_ID_CHARS_MAX
    assert f"not {LONG}" in failed.message


def test_a_policy_with_a_long_file_name_is_refused_with_the_bound() -> None:
    [answer], longest = answers(wire.SwapPolicy("spec: {}", filename="f" * LONG, ticket=7), ADMIN)
    assert not answer.accepted
    assert answer.ticket == 7
    assert str(FILENAME_CHARS_MAX) in answer.report
    assert longest <= BOUND_BYTES


def test_the_report_on_a_policy_with_an_error_on_each_of_many_lines_is_cut() -> None:
    lines = "".join(f"  key{index}: {'v' * 100}\n" for index in range(2000))
    header = "apiVersion: muxk/v1alpha1\nkind: SchedulingPolicy\nmetadata: {name: x}\nspec:\n"
    swap = wire.SwapPolicy(header + lines, filename="f" * FILENAME_CHARS_MAX)
    [answer], longest = answers(swap, ADMIN)
    assert not answer.accepted
    assert "key0" in answer.report
    assert longest <= REPORT_CHARS_MAX + 1000


def test_a_million_token_ids_are_refused_by_their_number_whatever_they_are() -> None:
    # One of them is outside the vocabulary: whoever says so has looked through all of them.
    [failed], _ = answers(wire.Submit("big", prompt_token_ids=[65] * (LONG - 1) + [1 << 30]))
    assert failed.code == "invalid"
    assert f"prompt_token_ids has {LONG} tokens" in failed.message
