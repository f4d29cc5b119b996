"""Policies that come and go while the server runs: what is kept of them, and who still answers for them."""

from __future__ import annotations

from typing import Any

from muxk.actors import protocol as wire
from muxk.actors.gateway_explain import EXPLAINS_MAX
from muxk.actors.messages import PagesReserved
from muxk.kernel.actor import Ref
from muxk.kernel.devices.sim import SimCosts
from muxk.kernel.fronts import ADMIN_PREFIX
from muxk.kernel.policy import BOOK_POLICIES
from muxk.policies.engine import compile_policy
from virtual_server import MS, S, VirtualServer, expected_tokens

OPERATOR = ADMIN_PREFIX + b"operator"
POISON = PagesReserved((77,), (), (5,))
"""Breaks an invariant of admission: nobody asked for these pages."""
FIELDS: dict[str, Any] = {"prompt_token_ids": [65] * 30, "temperature": 0.0, "ignore_eos": True}


def text(name: str, base: str = "muxwise") -> str:
    return (
        f"{{apiVersion: muxk/v1beta1, kind: SchedulingPolicy, metadata: {{name: {name}}}, "
        f"spec: {{extends: {base}}}}}"
    )


def test_the_policy_in_force_survives_a_crash_after_many_shadows() -> None:
    server = VirtualServer(calibrate=False)
    server.send(1 * S, wire.SwapPolicy(text("second", "chunked"), "second.yaml"))
    for number in range(BOOK_POLICIES + 4):
        shadow = wire.SetShadow(text(f"shadow{number}"), "shadow.yaml")
        server.send((2 + number) * S, shadow, OPERATOR)
    server.runtime.inject(Ref("admission"), POISON, 60 * S)
    server.submit(70 * S, "next", max_tokens=5, **FIELDS)
    server.run_until(80 * S)
    assert server.outcome("next").tokens == expected_tokens([65] * 30, 5)
    assert server.describe("arbiter")["policy"] == "second"


def explained(server: VirtualServer) -> list[int]:
    return [event.ticket for _, _, event in server.events if isinstance(event, wire.Explained)]


def test_a_question_about_all_requests_is_answered_though_an_actor_crashes_meanwhile() -> None:
    """With no request live too: a question that is never answered takes one of a few places for good."""
    server = VirtualServer(calibrate=False)
    for ticket in range(1, EXPLAINS_MAX + 1):
        server.send(2 * S, wire.Explain("requests", ticket=ticket), OPERATOR)
    server.runtime.inject(Ref("admission"), POISON, 2 * S)
    server.run_until(2 * S + 500 * MS)
    server.send(3 * S, wire.Explain("requests", ticket=100), OPERATOR)
    server.run_until(4 * S)
    assert sorted(explained(server)) == [*range(1, EXPLAINS_MAX + 1), 100]
    assert server.events[-1][2].error == ""


WAITS = """
apiVersion: muxk/v1beta1
kind: SchedulingPolicy
metadata: {name: waits}
spec:
  extends: muxwise
  classes: [{name: all, max_wait: 1s}]
"""


def test_a_long_queue_is_not_sorted_again_for_each_request_that_becomes_overdue() -> None:
    """All wait for one that holds the lane; its successor is overdue first, and so goes first."""
    slow = SimCosts(prefill_token_ns=100 * MS)
    server = VirtualServer(compile_policy(WAITS, "waits.yaml", {}), costs=slow, calibrate=False)
    for number in range(200):
        server.submit(1 * S + 5 * number * MS, f"r{number}", max_tokens=1, **FIELDS)
    server.run_until(2 * S)
    sorted_before = sum_of_orders(server)
    server.run_until(3 * S + 500 * MS)
    assert server.describe("admission")["waiting"] == 199
    assert sum_of_orders(server) - sorted_before < 5


def sum_of_orders(server: VirtualServer) -> int:
    rules = server.describe("admission")["rules"]
    return sum(count for rule, count in rules.items() if rule.startswith("order/"))
