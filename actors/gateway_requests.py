"""Between the wire and the actors: what a `Submit` becomes, and what is left of frames that were lost."""

from __future__ import annotations

from collections.abc import Sequence

from muxk.actors import protocol as wire
from muxk.actors.messages import ChatTurn, EncodeRequest, SamplingParams
from muxk.kernel.work import int32_bytes

SLOW_READER = "the client did not read its events in time, so that some were lost"


def encode_request(
    submit: wire.Submit, params: SamplingParams, request_id: int, now_ns: int
) -> EncodeRequest:
    """A validated request, as the actors know it from now on."""
    turns = submit.messages and tuple(ChatTurn(turn.role, turn.content) for turn in submit.messages)
    deadline_ns = None if submit.deadline is None else round(submit.deadline * 1e9)
    return EncodeRequest(
        request_id=request_id,
        arrival_ns=now_ns,
        text=submit.prompt,
        turns=turns or None,
        token_ids=None if submit.prompt_token_ids is None else int32_bytes(submit.prompt_token_ids),
        params=params,
        max_tokens_given=submit.max_tokens is not None,
        priority=submit.priority,
        choices=submit.n,
        generate=submit.max_tokens != 0,
        echo=submit.echo,
        truncate_prompt_tokens=submit.truncate_prompt_tokens,
        request_class=submit.request_class,
        deadline_given_ns=deadline_ns,
    )


def lost_ends(lost: Sequence[wire.Event]) -> list[wire.Finished | wire.Failed]:
    """Terminal events of frames that a peer did not take; one whose output is lost too did not end well."""
    output = (wire.Prompt, wire.Tokens, wire.ChoiceFinished)
    cut_short = {event.request_id for event in lost if isinstance(event, output)}
    for event in lost:
        if isinstance(event, wire.TokenIds):
            cut_short.update(event.request_ids)
    ends: list[wire.Finished | wire.Failed] = []
    for event in lost:
        if isinstance(event, wire.Finished) and event.request_id in cut_short:
            ends.append(slow_reader(event.request_id))
        elif isinstance(event, wire.Finished | wire.Failed):
            ends.append(event)
    return ends


def slow_reader(name: str) -> wire.Failed:
    """The end of a request whose events its client did not read."""
    return wire.Failed(name, "slow_reader", SLOW_READER)
