"""`Explain` over the wire, in virtual time: where requests are, and what the policy decided about them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from muxk.actors import gateway_explain
from muxk.actors import protocol as wire
from muxk.actors.gateway_explain import EXPLAINS_MAX
from muxk.kernel.devices.sim import SimCosts
from muxk.kernel.fronts import ADMIN_PREFIX
from virtual_server import MS, S, VirtualServer

OPERATOR = ADMIN_PREFIX + b"operator"
# One layer of the long prompt takes about 90 ms on all units, so that everybody behind it waits.
SLOW = SimCosts(prefill_token_ns=25_000)


def busy_server() -> VirtualServer:
    """A stream, a long prompt that prefills, and two clients' requests behind it."""
    server = VirtualServer("inflight", layers=8, kv_tokens=8192, costs=SLOW)
    server.submit(20 * S, "stream", prompt_token_ids=[65] * 30, max_tokens=60, ignore_eos=True)
    server.submit(20 * S + 100 * MS, "long", prompt_token_ids=[66] * 3000, max_tokens=2)
    server.submit(20 * S + 200 * MS, "behind", prompt_token_ids=[67] * 50, max_tokens=2, n=2)
    server.submit(20 * S + 210 * MS, "theirs", b"other", prompt_token_ids=[68] * 70, max_tokens=2)
    return server


def ask(server: VirtualServer, at_ns: int, peer: bytes = OPERATOR, **question: Any) -> wire.Explained:
    server.send(at_ns, wire.Explain(**question), peer)
    server.run_until(at_ns + 50 * MS)
    answers = [event for _, _, event in server.events if isinstance(event, wire.Explained)]
    return answers[-1]


def test_every_live_request_is_told_with_its_reason() -> None:
    told = ask(busy_server(), 20 * S + 300 * MS, ticket=5)
    by_name = {(one.request_id, one.choice): one for one in told.requests}
    assert list(by_name) == [("stream", 0), ("long", 0), ("behind", 0), ("behind", 1), ("theirs", 0)]
    assert by_name["stream", 0].tokens > 0
    assert by_name["long", 0].code == "prefilling"
    assert by_name["behind", 1].where in ("admission", "arbiter")
    assert by_name["theirs", 0].code in ("queued", "lane_busy")
    assert by_name["theirs", 0].waited == pytest.approx(0.09, abs=0.01)
    assert (told.ticket, told.live, told.error) == (5, 5, "")
    assert told.now == pytest.approx(20.3, abs=0.01)


def test_one_request_is_told_with_every_decision_that_touched_it() -> None:
    server = busy_server()
    told = ask(server, 20 * S + 300 * MS, about="request", request_id="long")
    assert [one.code for one in told.requests] == ["prefilling"]
    questions = [decision.question for decision in told.decisions]
    assert questions[:2] == ["classify", "admit"]
    assert told.decisions[1].points[0].rules[-1].rule == "admit/welcome"
    assert "decide" in questions
    # Its batch was formed from the queue as it was ordered just before.
    formed = questions.index("form")
    assert questions[formed - 1] == "order"
    assert told.decisions[formed - 1].sorted[0].request == "long"
    times = [decision.at_ns for decision in told.decisions]
    assert times == sorted(times)
    assert times[0] == 20 * S + 100 * MS


def test_a_request_that_has_ended_can_still_be_asked_about() -> None:
    server = busy_server()
    server.run_until(40 * S)
    told = ask(server, 41 * S, about="request", request_id="theirs")
    assert [one.code for one in told.requests] == ["ended"]
    assert [decision.question for decision in told.decisions][:2] == ["classify", "admit"]
    assert told.decisions[-1].question == "retain"


def test_decisions_around_a_moment_and_the_last_ones() -> None:
    server = busy_server()
    server.run_until(40 * S)
    around = ask(server, 41 * S, about="moment", at=20.1, count=6)
    assert len(around.decisions) == 6
    assert all(abs(one.at_ns - 20.1 * S) < 1 * S for one in around.decisions)
    assert any(one.question == "admit" for one in around.decisions)
    last = ask(server, 42 * S, about="latest", count=3)
    ends = [one.last_at_ns for one in last.decisions]
    assert len(ends) == 3
    assert min(ends) > 20.2 * S


def test_a_client_learns_of_its_own_requests_only() -> None:
    server = busy_server()
    mine = ask(server, 20 * S + 300 * MS, b"other")
    assert [one.request_id for one in mine.requests] == ["theirs"]
    assert mine.live == 1
    foreign = ask(server, 20 * S + 360 * MS, b"other", about="request", request_id="long")
    assert "no request 'long'" in foreign.error
    assert (foreign.requests, foreign.decisions) == ((), ())
    own = ask(server, 20 * S + 420 * MS, b"other", about="request", request_id="theirs")
    assert [one.question for one in own.decisions] == ["classify", "admit"]


@pytest.mark.parametrize("about", ["moment", "latest", "differences"])
def test_decisions_of_all_are_for_the_admin_socket(about: Any) -> None:
    told = ask(busy_server(), 20 * S + 300 * MS, b"client", about=about)
    assert "ask on the server's admin socket" in told.error
    assert told.decisions == ()


def test_two_clients_with_one_name_are_both_told_and_told_apart() -> None:
    server = VirtualServer("inflight", layers=8, kv_tokens=8192, costs=SLOW)
    for peer in (b"\x00one", b"\x00two"):
        server.submit(20 * S, "same", peer, prompt_token_ids=[66] * 1500, max_tokens=2)
    told = ask(server, 20 * S + 50 * MS, about="request", request_id="same")
    assert len({one.client for one in told.requests}) == 2


@pytest.mark.parametrize(
    "question",
    [
        {"about": "moment", "at": float("nan")},
        {"about": "moment", "at": float("inf")},
        {"about": "moment", "at": -1e308},
        {"about": "latest", "count": -5},
        {"about": "latest", "count": 1 << 60},
        {"about": "request", "request_id": "x" * 100_000},
    ],
    ids=str,
)
def test_questions_without_sense_are_answered_and_hurt_nobody(question: dict[str, Any]) -> None:
    server = busy_server()
    told = ask(server, 20 * S + 300 * MS, **question)
    assert len(told.error) < 200
    assert len(told.decisions) <= 200
    server.run_until(60 * S)
    server.check_whole()


def test_decisions_about_a_batch_are_told_to_each_request_in_it() -> None:
    server = busy_server()
    server.submit(20 * S + 205 * MS, "leads", prompt_token_ids=[69] * 60, max_tokens=2)
    server.run_until(40 * S)
    # `theirs` is in the batch of `leads`, by whose arrival views name it.
    told = ask(server, 41 * S, about="request", request_id="theirs", count=200)
    (formed,) = [one.at_ns for one in told.decisions if one.question == "form"]
    assert any(one.question == "decide" and one.last_at_ns >= formed for one in told.decisions)


def test_an_answer_stays_within_a_frame_and_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_explain, "ANSWER_BYTES_MAX", 6000)
    server = busy_server()
    server.run_until(40 * S)
    told = ask(server, 41 * S, about="latest", count=30)
    assert told.decisions
    assert len(told.decisions) + told.left_out == 30
    assert sum(len(msgspec.msgpack.encode(one)) for one in told.decisions) <= 6000
    whole = ask(server, 42 * S, about="latest", count=1)
    assert told.decisions[-1] == whole.decisions[-1]  # the latest are kept


def test_more_questions_than_the_bound_are_refused_and_a_crash_answers_those_that_wait() -> None:
    server = busy_server()
    for _ in range(EXPLAINS_MAX + 3):
        server.send(20 * S + 300 * MS, wire.Explain(), OPERATOR)
    server.run_until(20 * S + 400 * MS)
    answers = [event for _, _, event in server.events if isinstance(event, wire.Explained)]
    assert len(answers) == EXPLAINS_MAX + 3
    assert sum("wait already" in one.error for one in answers) <= 3
