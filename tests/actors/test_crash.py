"""A crash of an actor fails the live requests with the reason, and the server goes on."""

from __future__ import annotations

from typing import Any

import pytest
from muxk.actors import protocol as wire
from muxk.actors.messages import JoinDecode, PagesGrown, PagesReserved
from muxk.kernel.actor import Ref
from muxk.kernel.messages import PrefillDone
from virtual_server import MS, S, VirtualServer, expected_tokens

# Each of them breaks an invariant of its receiver: nobody was asked for what it answers.
POISON: dict[str, Any] = {
    "prefill": PrefillDone(999, b"", 0, False),
    "decode": JoinDecode((), b"\0\0\0\0", False),
    "admission": PagesReserved((77,), (), (5,)),
}


@pytest.mark.parametrize("actor", POISON)
@pytest.mark.parametrize("after_ms", [5, 60])
def test_a_crash_fails_the_live_requests_and_the_next_ones_are_served(actor: str, after_ms: int) -> None:
    server = VirtualServer(kv_tokens=4096)
    for index in range(3):
        server.submit(
            2 * S, f"lost{index}", prompt_token_ids=[65 + index] * 300, max_tokens=100, ignore_eos=True
        )
    server.runtime.inject(Ref(actor), POISON[actor], 2 * S + after_ms * MS)
    server.submit(6 * S, "next", prompt_token_ids=[70] * 40, max_tokens=20, temperature=0.0, ignore_eos=True)
    server.run_until(20 * S)
    for index in range(3):
        [failed] = server.outcome(f"lost{index}").terminal
        assert isinstance(failed, wire.Failed)
        assert failed.code == "engine_failed"
        assert actor in failed.message
    assert server.outcome("next").tokens == expected_tokens([70] * 40, 20)
    server.check_whole()


def test_a_growth_for_a_request_that_ended_is_no_crash() -> None:
    server = VirtualServer()
    server.runtime.inject(Ref("decode"), PagesGrown((12345,), (1,), (54321,)), 2 * S)
    server.submit(3 * S, "it", prompt_token_ids=[70] * 40, max_tokens=5, temperature=0.0, ignore_eos=True)
    server.run_until(6 * S)
    assert server.outcome("it").tokens == expected_tokens([70] * 40, 5)
    assert server.describe("decode")["late_events"] == 1
