"""Actors whose messages a test brings them one by one."""

from __future__ import annotations

from typing import Any

from muxk.actors.decode import Decode
from muxk.actors.messages import JoinDecode, Request, ReservedRequest, SamplingParams
from muxk.actors.refs import Refs
from muxk.kernel.actor import Ref
from muxk.kernel.policy import PolicyBook
from muxk.kernel.work import int32_bytes
from muxk.policies.engine import load_policy


class Sent:
    """The context of an actor that is driven by hand."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def now_ns(self) -> int:
        return 0

    def send(self, ref: Ref[Any], message: Any) -> None:
        self.messages.append(message)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


def request(request_id: int, max_tokens: int, prompt_tokens: int) -> Request:
    params = SamplingParams(max_tokens, 0.0, 1.0, 0, seed=0, choice=0, stop=(), ignore_eos=True)
    return Request(request_id, request_id, 0, int32_bytes([65] * prompt_tokens), b"", params, 0, 0)


def joining(request: Request, pages: tuple[int, ...], token: int) -> JoinDecode:
    return JoinDecode((ReservedRequest(request, pages, 0),), int32_bytes([token]), decode_running=True)


def decode_by_hand() -> tuple[Sent, Decode]:
    sent, book = Sent(), PolicyBook()
    decode = Decode(Refs(), book, book.add(load_policy("muxwise", {})), frozenset())
    decode.context = sent  # type: ignore[assignment]
    return sent, decode
