"""Tokens that reach decode in another order than they were sampled in, or that it holds back."""

from __future__ import annotations

from by_hand import decode_by_hand, joining, request
from muxk.actors.messages import JoinDecode, PagesGrown, ReleasePages, TokensEmitted
from muxk.kernel.messages import DecodeStepDone, StepLaunched, SubmitDecode
from muxk.kernel.work import int32_bytes


def test_a_held_token_goes_before_the_last_one_of_a_request_that_was_evicted_and_came_back() -> None:
    sent, decode = decode_by_hand()
    decode.on_join_decode(joining(request(1, max_tokens=50, prompt_tokens=14), (1,), 97))
    for step_id in (1, 2):
        decode.on_step_launched(StepLaunched(step_id, version=1))
    decode.on_join_decode(joining(request(2, max_tokens=2, prompt_tokens=10), (2,), 98))
    # Two steps run without request 2. The first request has no page for a third one: the second is evicted.
    decode.on_pages_grown(PagesGrown((), (), denied=(1,)))
    [released] = sent.of(ReleasePages)
    decode.on_join_decode(joining(released.recompute, (2,), 99))
    rows = [row for message in sent.of(TokensEmitted) for row in message.rows if row.request_id == 2]
    assert [(row.tokens, row.finish_reason) for row in rows] == [((98,), None), ((99,), "length")]


def test_a_fused_step_that_decode_hears_of_before_the_end_of_the_step_before_it_waits_for_that() -> None:
    sent, decode = decode_by_hand()
    decode.on_join_decode(joining(request(1, max_tokens=50, prompt_tokens=14), (1, 2), 97))
    decode.on_step_launched(StepLaunched(1, version=1))
    # The second step ran fused, after a policy swap: its end comes by way of prefill.
    second = DecodeStepDone(2, 1, int32_bytes([99]), ended_ns=2)
    decode.on_join_decode(JoinDecode((), b"", decode_running=False, step=second))
    decode.on_decode_step_done(DecodeStepDone(1, 1, int32_bytes([98]), ended_ns=1))
    rows = [row for message in sent.of(TokensEmitted) for row in message.rows]
    assert [row.tokens for row in rows] == [(97,), (98,), (99,)]
    assert sent.of(SubmitDecode)[-1].work.step_id == 3
