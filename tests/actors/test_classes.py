"""Classes of requests from their policy to the actors: SLOs, shares, the longest wait, in virtual time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from muxk.actors.admission import Admission
from muxk.actors.messages import Request
from muxk.kernel.arbiter import Arbiter
from muxk.kernel.device import Lane
from muxk.kernel.devices.sim import SimCosts, SimDevice
from muxk.kernel.view import Decision, FormAnswer, FormView, RequestClass, View
from muxk.kernel.work import Item, PrefillWork
from muxk.policies.engine import CompiledPolicy, load_policy
from python_policies import InClasses, Like
from virtual_server import MS, S, VirtualServer, expected_tokens

SLOW_PREFILL = SimCosts(prefill_token_ns=20_000)
STREAM = {"prompt_token_ids": [65] * 30, "temperature": 0.0, "ignore_eos": True}


def policy_of(tmp_path: Path, spec: str) -> CompiledPolicy:
    file = tmp_path / "policy.yaml"
    head = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: tested}\nspec:\n"
    file.write_text(head + spec, encoding="utf-8")
    return load_policy(file)


def waiting(server: VirtualServer) -> dict[str, Request]:
    admission = server.runtime.actor("admission")
    assert isinstance(admission, Admission)
    return {request.request_class: request for request in admission.state.waiting}


class Spied(InClasses):
    """Remembers the tightest SLO of every decision, and the ranks of batches."""

    def __init__(self, *classes: RequestClass, base: str = "temporal", name: str = "spied") -> None:
        super().__init__(classes, base)
        self.sha = self.name = name
        self.slos: list[tuple[int, int | None]] = []
        self.ranks: Counter[tuple[str, int]] = Counter()

    def decide(self, view: View) -> Decision:
        self.slos.append((view.now_ns, view.decode.tbt_slo_ns))
        for place in ("running", "parked", "candidate"):
            batch = getattr(view, place)
            if batch is not None:
                self.ranks[place, batch.class_rank] += 1
        return super().decide(view)


class SpiedForms(Like):
    """Remembers what waits of the head's class whenever a batch is formed."""

    def __init__(self, base: CompiledPolicy) -> None:
        super().__init__(name="spied")
        self.base = base
        self.classes, self.known_classes = base.classes, base.known_classes
        self.asked: list[tuple[str, int, int]] = []

    def form(self, view: FormView) -> FormAnswer:
        self.asked.append((view.head.class_name, view.class_queue.requests, view.class_queue.tokens))
        return self.base.form(view)


FAST = RequestClass("fast", 0, 20 * MS, 300 * MS)
SLOW = RequestClass("slow", 1, 200 * MS, 5 * S)


def test_a_request_gets_the_slos_of_its_class_and_its_client_hears_which_one() -> None:
    server = VirtualServer(InClasses([FAST, SLOW]), calibrate=False, kv_tokens=512)
    for token, name in enumerate(("slow", "fast", "gold")):
        long = STREAM | {"prompt_token_ids": [65 + token] * 400, "max_tokens": 50}
        server.submit(S, name, **long, request_class=name)
    server.run_until(S + MS)
    found = waiting(server)
    assert found["fast"].deadline_ns == S + 300 * MS
    assert found["gold"].in_class == FAST
    server.run_until(20 * S)
    accepted = {event.request_id: event for _, _, event in server.events if hasattr(event, "request_class")}
    assert {name: event.request_class for name, event in accepted.items()} == {
        "slow": "slow",
        "fast": "fast",
        "gold": "fast",
    }
    [note] = server.outcome("gold").notes
    assert note.startswith("class 'gold' has no effect")
    assert "fast, slow" in note
    assert server.outcome("slow").notes == ()


def test_decisions_see_the_tightest_slo_of_the_rows_that_decode_and_ranks_of_batches() -> None:
    policy = Spied(FAST, SLOW)
    server = VirtualServer(policy, calibrate=False, costs=SLOW_PREFILL)
    server.submit(S, "slow", **STREAM, max_tokens=100, request_class="slow")
    server.submit(S + 200 * MS, "fast", **STREAM, max_tokens=10, request_class="fast")
    server.run_until(5 * S)
    slos = [slo for _, slo in policy.slos]
    assert [slo for slo, before in zip(slos[1:], slos, strict=False) if slo != before] == [
        200 * MS,  # the first alone
        20 * MS,  # both
        200 * MS,  # the second has ended
    ]
    assert slos[0] is None
    assert policy.ranks["candidate", 1] > 0
    assert policy.ranks["running", 1] > 0
    assert policy.ranks["running", 0] > 0
    server.check_whole()


def test_a_swap_puts_everybody_into_classes_of_the_new_policy() -> None:
    before = Spied(FAST, SLOW)
    server = VirtualServer(before, calibrate=False, kv_tokens=512)
    server.submit(S, "row", **STREAM, max_tokens=300, request_class="slow")
    long = STREAM | {"prompt_token_ids": [66] * 470, "max_tokens": 5}
    server.submit(S + 500 * MS, "waits", **long, request_class="fast")
    server.submit(S + 500 * MS, "own", **long, request_class="slow", deadline=7.0)
    server.run_until(S + 600 * MS)
    assert waiting(server)["fast"].deadline_ns == S + 800 * MS
    after = Spied(
        RequestClass("slow", 0, 70 * MS, 1 * S), RequestClass("rest", 1, 90 * MS, 2 * S), name="after"
    )
    server.swap(S + 700 * MS, after)
    server.run_until(S + 720 * MS)
    found = waiting(server)
    assert (found["fast"].in_class, found["fast"].deadline_ns) == (after.named["slow"], S + 1500 * MS)
    assert found["slow"].deadline_ns == S + 7500 * MS
    # The row that decodes has the new SLO by its next step.
    assert after.slos[-1][1] == 70 * MS
    assert sum(slo == 200 * MS for _, slo in after.slos) <= 3
    server.run_until(30 * S)
    assert server.outcome("row").tokens == expected_tokens([65] * 30, 300)
    server.check_whole()


def test_a_swap_ranks_a_batch_anew_that_runs() -> None:
    server = VirtualServer(Spied(FAST, SLOW, base="muxwise"), calibrate=False, costs=SLOW_PREFILL)
    long = STREAM | {"prompt_token_ids": [66] * 2000, "max_tokens": 2}
    server.submit(S, "batch", **long, request_class="slow")
    server.run_until(S + 20 * MS)
    after = Spied(RequestClass("slow", 0, S, S), RequestClass("rest", 1, S, S), base="muxwise", name="after")
    server.swap(S + 20 * MS, after)
    server.run_until(30 * S)
    assert after.ranks["running", 0] > 0
    assert after.ranks["running", 1] <= 2
    server.check_whole()


# --- shares ---

TENANTS = """
  extends: muxwise
  classes:
    - {name: a, when: request.class == 'a', share: 3}
    - {name: b, share: 1}
  order: {by: request.arrival}
  form: {requests: 1, tokens: 1}
"""


def prefill_tokens_by_class(server: VirtualServer) -> list[tuple[int, str, int]]:
    """(when, class, tokens) of every prefill that begins from now on; classes are told by the first token."""
    found: list[tuple[int, str, int]] = []
    launch = server.device.launch

    def spy(lane: Lane, item: Item, after: Any) -> None:
        if isinstance(item.work, PrefillWork) and item.first_layer == 0:
            name = chr(item.work.tokens[0]).lower()
            found.append((server.runtime.now_ns(), name, item.last_token - item.first_token))
        launch(lane, item, after)

    server.device.launch = spy  # type: ignore[method-assign]
    return found


def prompt(name: str, index: int, tokens: int) -> list[int]:
    """One that shares no page with others."""
    return [ord(name), 97 + index % 26, 97 + index // 26 % 26] + [98] * (tokens - 3)


def flood(server: VirtualServer, name: str, requests: int, tokens: int, from_ns: int, every_ns: int) -> None:
    for index in range(requests):
        ids = prompt(name, index, tokens)
        server.submit(
            from_ns + index * every_ns,
            f"{name}{index}",
            prompt_token_ids=ids,
            max_tokens=1,
            request_class=name,
        )


def test_two_tenants_that_compete_get_prefill_tokens_by_their_shares(tmp_path: Path) -> None:
    # More than the device can do, of each; the requests of one are four times as long as those of the other.
    server = VirtualServer(policy_of(tmp_path, TENANTS), costs=SLOW_PREFILL, calibrate=False)
    found = prefill_tokens_by_class(server)
    flood(server, "a", 240, 200, S, 10 * MS)
    flood(server, "b", 480, 50, S, 5 * MS)
    server.run_until(S + 2400 * MS)
    classes = server.describe("admission")["classes"]
    assert classes["a"]["waiting"] > 10
    assert classes["b"]["waiting"] > 10
    got = Counter[str]()
    for at_ns, name, tokens in found:
        if at_ns >= S + 100 * MS:
            got[name] += tokens
    assert sum(got.values()) > 16_000
    assert 3 * 0.95 < got["a"] / got["b"] < 3 * 1.05, got


def test_a_tenant_that_was_idle_gets_its_share_from_now_on_and_no_more(tmp_path: Path) -> None:
    server = VirtualServer(policy_of(tmp_path, TENANTS), costs=SLOW_PREFILL, calibrate=False)
    found = prefill_tokens_by_class(server)
    flood(server, "b", 300, 50, S, 4 * MS)
    flood(server, "a", 100, 150, S + 400 * MS, 8 * MS)
    server.run_until(S + 1200 * MS)
    got = Counter[str]()
    for at_ns, name, tokens in found:
        if S + 450 * MS < at_ns < S + 1150 * MS:
            got[name] += tokens
    assert server.describe("admission")["classes"]["a"]["waiting"] > 1
    assert sum(got.values()) > 5_000
    assert 3 * 0.95 < got["a"] / got["b"] < 3 * 1.05, got


def test_without_shares_the_keys_of_the_order_alone_decide(tmp_path: Path) -> None:
    spec = TENANTS.replace(", share: 3", "").replace(", share: 1", "")
    server = VirtualServer(policy_of(tmp_path, spec), costs=SLOW_PREFILL, calibrate=False)
    found = prefill_tokens_by_class(server)
    flood(server, "b", 40, 50, S, 0)
    flood(server, "a", 40, 50, S + 1, 0)
    server.run_until(5 * S)
    assert [name for _, name, _ in found] == ["b"] * 40 + ["a"] * 40


# --- the longest wait ---

MAX_WAIT = """
  extends: muxwise
  classes:
    - {name: chat, when: request.class == 'c'}
    - {name: batch, max_wait: 300ms}
  order: {by: [class.rank, request.arrival]}
  form: {requests: 1, tokens: 1}
"""


@pytest.mark.parametrize("bounded", [True, False])
def test_a_request_is_never_older_than_max_wait_and_one_batch_when_it_starts(
    tmp_path: Path, bounded: bool
) -> None:
    spec = MAX_WAIT if bounded else MAX_WAIT.replace(", max_wait: 300ms", "")
    server = VirtualServer(policy_of(tmp_path, spec), costs=SLOW_PREFILL, calibrate=False)
    found = prefill_tokens_by_class(server)
    # Interactive load without end, more than the device can do: a prompt of 50 tokens takes 4 ms at best.
    flood(server, "c", 300, 50, S, 3 * MS)
    sent_ns = [S + 100 * MS + index * 40 * MS for index in range(6)]
    for index, at_ns in enumerate(sent_ns):
        server.submit(at_ns, f"x{index}", prompt_token_ids=prompt("x", index, 100), max_tokens=1)
    server.run_until(S + 900 * MS)
    starts_ns = [at_ns for at_ns, name, _ in found if name == "x"]
    if not bounded:
        assert starts_ns == []
        return
    ages_ms = [(begun - sent) / MS for begun, sent in zip(starts_ns, sent_ns, strict=True)]
    assert min(ages_ms) >= 300
    # A batch that runs is not stopped for it: one of 50 tokens takes 4 ms on all units, 8 ms on half.
    assert max(ages_ms) <= 300 + 10


def test_a_head_that_time_moved_forward_is_looked_for_without_any_other_event(tmp_path: Path) -> None:
    """Nothing happens in admission while one long batch runs, and the order changes with time alone."""
    server = VirtualServer(policy_of(tmp_path, MAX_WAIT), costs=SLOW_PREFILL, calibrate=False, layers=16)
    server.submit(S, "first", prompt_token_ids=prompt("f", 0, 4000), max_tokens=1, request_class="c")
    server.submit(S + MS, "batch", prompt_token_ids=prompt("x", 0, 16), max_tokens=1)
    chat = {"prompt_token_ids": prompt("c", 0, 16), "max_tokens": 1, "request_class": "c"}
    server.submit(S + 50 * MS, "chat", **chat)
    arbiter = server.runtime.actor("arbiter")
    assert isinstance(arbiter, Arbiter)
    server.run_until(S + 300 * MS)
    before = arbiter.state.head
    server.run_until(S + 302 * MS)
    assert arbiter.state.running is not None, "nothing else happened meanwhile"
    assert before is not None
    assert arbiter.state.head == before - 1
    server.run_until(20 * S)
    server.check_whole()


def test_devices_say_what_a_parked_token_takes() -> None:
    assert SimDevice().parked_bytes_per_token == 8192
    assert SimDevice(parked_bytes_per_token=100).parked_bytes_per_token == 100


def test_form_sees_what_waits_of_the_class_of_the_head(tmp_path: Path) -> None:
    """Six prompts of two classes wait, one runs: batches are as large as what waits of the head's class."""
    spec = """
  classes:
    - {name: chat, when: request.class == 'chat'}
    - {name: batch}
  order: {by: class.rank}
  form: {requests: class.requests, tokens: class.tokens}
  slice: {layers: all}
"""
    spied = SpiedForms(policy_of(tmp_path, spec))
    server = VirtualServer(spied, calibrate=False, kv_tokens=4096, costs=SLOW_PREFILL)
    server.submit(S, "first", prompt_token_ids=[65] * 300, max_tokens=1)
    for index, name in enumerate(("batch", "chat", "batch", "chat", "batch", "batch")):
        prompt = [66 + index] * (100 + index)
        server.submit(S + MS, f"{name}{index}", prompt_token_ids=prompt, max_tokens=1, request_class=name)
    server.run_until(10 * S)
    assert spied.asked == [("batch", 1, 300), ("chat", 2, 204), ("batch", 4, 411)]
    assert all(server.outcome(f"{name}{i}").tokens for i, name in ((0, "batch"), (1, "chat"), (5, "batch")))
