"""Shadow policies in virtual time: asked the same, counted where they differ, and never acting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muxk.actors import protocol as wire
from muxk.kernel.decider import Decider
from muxk.kernel.fronts import ADMIN_PREFIX
from muxk.kernel.policy import PolicyBook
from muxk.kernel.shadow import SLOW_ANSWERS_MAX, SLOW_NS, Shadow, ShadowTally
from muxk.kernel.view import RequestView
from muxk.policies.engine import compile_policy, load_policy
from virtual_server import MS, S, VirtualServer, expected_tokens

OPERATOR = ADMIN_PREFIX + b"operator"
HEAD = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: NAME}\nspec:\n"
ALTERNATIVE = HEAD + "  extends: muxwise\n  split: {decode: all, prefill: all}\n  retain: free\n"
FAILING = HEAD + "  extends: muxwise\n  split: {decode: 10 / queue.requests, prefill: rest}\n"
CLASSES = HEAD + (
    "  extends: muxwise\n"
    "  classes:\n"
    "    - {name: vip, when: request.prompt_tokens < 50}\n"
    "    - {name: rest}\n"
    "  admit:\n"
    "    - {name: no-vip, when: request.class == 'vip', then: {shed: no}}\n"
    "    - {name: all, then: accept}\n"
)
STREAM = {"prompt_token_ids": [65] * 30, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}


def shadow(text: str | None, ticket: int = 1) -> wire.SetShadow:
    return wire.SetShadow(None if text is None else text.replace("NAME", "other"), "new.yaml", {}, ticket)


def answers(server: VirtualServer, kind: type) -> list[Any]:
    return [event for _, _, event in server.events if isinstance(event, kind)]


def state(server: VirtualServer) -> dict[str, Any]:
    return server.describe("gateway")


def run(shadow_text: str | None, policy: str = "muxwise") -> VirtualServer:
    """A stream and a long prompt, with a shadow from before the stream on."""
    server = VirtualServer(policy)
    if shadow_text is not None:
        server.send(19 * S, shadow(shadow_text), OPERATOR)
    server.submit(20 * S, "stream", **STREAM)
    server.submit(20 * S + 50 * MS, "long", prompt_token_ids=[66] * 1000, max_tokens=2, temperature=0.0)
    server.run_until(40 * S)
    return server


def test_a_shadow_changes_nothing_that_a_client_sees() -> None:
    plain, shadowed = run(None), run(ALTERNATIVE)
    for name in ("stream", "long"):
        assert shadowed.outcome(name).times_ns == plain.outcome(name).times_ns
        assert shadowed.outcome(name).tokens == plain.outcome(name).tokens
    assert plain.outcome("stream").tokens == expected_tokens([65] * 30, 40)
    shadowed.check_whole()


def test_the_state_tells_the_shares_of_decisions_that_differ() -> None:
    server = run(ALTERNATIVE)
    told = state(server)["shadow"]
    (answer,) = answers(server, wire.ShadowSet)
    assert (answer.accepted, answer.name, answer.sha) == (True, "other", told["sha"])
    assert told["retain"] == "2 of 2 differ (100.0%)"
    assert told["admit"] == "0 of 2 differ (0.0%)"
    assert told["split"].endswith("differ (100.0%)")
    assert told["errors"] == 0


def test_a_shadow_of_the_same_policy_differs_nowhere() -> None:
    server = run(HEAD + "  extends: muxwise\n")
    told = state(server)["shadow"]
    shares = [value for value in told.values() if isinstance(value, str) and "differ" in value]
    assert len(shares) >= 5
    assert all(" 0 of" in f" {share}" and "(0.0%)" in share for share in shares)


def test_the_latest_differences_are_told_with_both_answers() -> None:
    server = run(ALTERNATIVE)
    server.send(41 * S, wire.Explain("differences", count=5), OPERATOR)
    server.run_until(42 * S)
    (told,) = answers(server, wire.Explained)
    assert len(told.decisions) == 5
    last = told.decisions[-1]
    assert (last.question, last.differs) == ("retain", ("retain",))
    assert last.answer == "its pages are kept for reuse"
    assert last.shadow is not None
    assert last.shadow.answer == "its pages are freed"
    assert last.shadow.points[0].rules[-1].place == "new.yaml:7"


def test_rules_of_a_shadow_that_fail_are_counted_and_hurt_nobody() -> None:
    server = run(FAILING)
    told = state(server)["shadow"]
    assert told["errors"] > 10
    assert list(told["latest errors"]) == ["split/always: division by zero"]
    assert server.describe("arbiter")["counts"].get("rule error: split/always: division by zero") is None
    server.check_whole()


def test_a_shadow_with_classes_of_its_own_judges_by_them() -> None:
    told = state(run(CLASSES))["shadow"]
    assert told["classify"] == "2 of 2 differ (100.0%)"
    assert told["admit"] == "1 of 2 differ (50.0%)"
    assert told["errors"] == 0


def test_a_shadow_with_classes_of_its_own_is_explained_by_them() -> None:
    server = run(CLASSES)
    server.send(41 * S, wire.Explain("differences", count=50), OPERATOR)
    server.run_until(42 * S)
    (told,) = answers(server, wire.Explained)
    (shed,) = [one.shadow for one in told.decisions if one.question == "admit"]
    assert shed.answer == "shed: no"
    (rule,) = shed.points[0].rules
    assert (rule.rule, rule.outcome) == ("admit/no-vip", "matched")
    assert [(value.name, value.value) for value in rule.values] == [("request.class", "'vip'")]


def test_a_shadow_that_is_ended_while_it_is_compiled_never_begins() -> None:
    server = VirtualServer(calibrate=False)
    server.send(1 * S, shadow(ALTERNATIVE), OPERATOR)
    server.send(1 * S, shadow(None, 2), OPERATOR)
    server.run_until(2 * S)
    ended, begun = answers(server, wire.ShadowSet)
    assert (ended.ticket, ended.accepted) == (2, True)
    assert (begun.ticket, begun.accepted) == (1, False)
    assert "ended before it was compiled" in begun.report
    assert "shadow" not in state(server)
    assert "policy_last_refused" not in state(server), "the policy in force has nothing to do with it"


def test_the_latest_errors_of_a_shadow_are_those_that_came_last() -> None:
    tally = ShadowTally(load_policy("muxwise"))
    asks = Shadow(tally, lambda: 0)
    for text in ("first", "b", "c", "d", "e", "first"):
        asks._note_error(text)
    assert tally.describe()["latest errors"] == {"c": 1, "d": 1, "e": 1, "first": 2}


def test_a_bad_shadow_is_refused_with_its_place_and_the_old_one_goes_on() -> None:
    server = VirtualServer()
    server.send(1 * S, shadow(ALTERNATIVE), OPERATOR)
    server.send(2 * S, shadow(HEAD + "  splt: {decode: all}\n", 2), OPERATOR)
    server.send(3 * S, shadow(ALTERNATIVE, 3), b"client")
    server.run_until(4 * S)
    _, bad, foreign = answers(server, wire.ShadowSet)
    assert not bad.accepted
    assert "new.yaml:5:3" in bad.report
    assert "did you mean 'split'?" in bad.report
    assert "is an admin command" in foreign.report
    assert state(server)["shadow"]["policy"] == "other"


def test_a_shadow_ends_when_told_and_begins_its_count_anew_with_a_swap() -> None:
    server = run(ALTERNATIVE)
    source = ALTERNATIVE.replace("NAME", "swapped")
    server.send(41 * S, wire.SwapPolicy(source, "swapped.yaml"), OPERATOR)
    server.submit(42 * S, "next", **STREAM)
    server.run_until(50 * S)
    told = state(server)["shadow"]
    assert told["retain"] == "0 of 1 differ (0.0%)"
    server.send(51 * S, shadow(None, 9), OPERATOR)
    server.submit(52 * S, "last", **STREAM)
    server.run_until(60 * S)
    assert answers(server, wire.ShadowSet)[-1] == wire.ShadowSet(9, True, "", "", "")
    assert "shadow" not in state(server)


class Hostile:
    """A policy that breaks its contract."""

    def __init__(self, clock: list[int], costs_ns: int) -> None:
        self.name, self.sha, self.classes = "hostile", "hostile", ("default",)
        self._clock, self._costs_ns = clock, costs_ns
        self.asked = 0

    def retain(self, request: RequestView) -> Any:
        self.asked += 1
        self._clock[0] += self._costs_ns
        raise RuntimeError("no")

    def order(self, requests: list[RequestView], now_ns: int, service: Mapping[str, float]) -> Any:
        return "nonsense"


def hostile_decider(costs_ns: int) -> tuple[Decider, Hostile, ShadowTally]:
    clock = [0]
    book = PolicyBook()
    sha = book.add(load_policy("muxwise"))
    policy = Hostile(clock, costs_ns)
    book.shadow = ShadowTally(policy)  # type: ignore[arg-type]
    return Decider(book, sha, "decode", lambda: clock[0]), policy, book.shadow


REQUEST = RequestView(1, 0, 1, 1, 1, 1, 1, 1, 0)


def test_a_shadow_that_raises_or_answers_nonsense_is_counted() -> None:
    decider, _, tally = hostile_decider(costs_ns=1000)
    for _ in range(50):
        assert decider.retain(REQUEST).keep
        assert decider.order([REQUEST], 0).order == (0,)
    told = tally.describe()
    assert told["errors"] == 100
    assert "retain: RuntimeError('no')" in told["latest errors"]
    assert tally.given_up == ""


def test_a_shadow_that_is_slow_again_and_again_is_asked_no_more() -> None:
    decider, policy, tally = hostile_decider(costs_ns=SLOW_NS + 1)
    for _ in range(50):
        decider.retain(REQUEST)
    assert policy.asked == SLOW_ANSWERS_MAX
    assert "took more than 2 ms" in tally.describe()["given up"]


def test_errors_of_a_shadow_are_kept_by_few_texts() -> None:
    tally = ShadowTally(compile_policy(HEAD.replace("NAME", "x") + "  extends: muxwise\n"))
    shadow = Shadow(tally, lambda: 0)
    for number in range(1000):
        shadow._note_error(f"error {number}" * 100)
    assert len(tally.errors) <= 33
    assert sum(tally.errors.values()) == 1000
    assert max(map(len, tally.errors)) <= 200
