"""What of a request fits into a context: told by whoever meets it first, placement or admission."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from muxk.actors.messages import AdmitRequest, Request


def with_room(message: AdmitRequest, limit: int) -> Request:
    """With `max_tokens` set to the room in a context of so many tokens when the client named none."""
    request = message.request
    if message.max_tokens_given:
        return request
    room = max(1, limit - request.prompt_tokens)
    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, max_tokens=room))


def never_fits(message: AdmitRequest, limit: int) -> str | None:
    """Why a request can not be served with contexts of so many tokens, if it can not."""
    prompt, params = message.request.prompt_tokens, message.request.params
    if prompt + 1 > limit:
        return f"the prompt has {prompt} tokens; with one more it exceeds the limit of {limit}"
    if message.max_tokens_given and prompt + params.max_tokens > limit:
        return (
            f"prompt ({prompt} tokens) + max_tokens ({params.max_tokens}) exceeds the limit of "
            f"{limit} tokens; max_tokens may be {limit - prompt} at most"
        )
    return None


def room_for(prompt_tokens: int, limits: Sequence[int]) -> int:
    """The context in which a prompt has room for its answer: that of the fewest devices that hold it.

    `limits` are the longest contexts on one device, on two, and so on. An answer that has no limit of its
    own is promised the pools of no more devices than its prompt needs.
    """
    return next((limit for limit in limits if prompt_tokens < limit), limits[-1])


def outgrew(request: Request, limit: int) -> str | None:
    """Why a request that was accepted can not be served with contexts of so many tokens, if it can not."""
    longest = request.prompt_tokens + request.params.max_tokens
    if longest <= limit:
        return None
    return f"prompt and answer may take {longest} tokens, and the limit is {limit} now"
