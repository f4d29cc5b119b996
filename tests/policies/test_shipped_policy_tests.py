"""Every shipped policy has tests of its defining property, which hold for it and not for another policy."""

from __future__ import annotations

import pytest
from muxk.actors.policy_tests import run_test
from muxk.client.policy_test_files import Collected, collect
from muxk.client.test_report import failure_text
from muxk.policies.engine import shipped_policies
from muxk.policies.policy_choice import open_choice

OTHER = {
    "inflight": "muxwise",
    "chunked": "inflight",
    "static_split": "muxwise",
    "temporal": "muxwise",
    "muxwise": "inflight",
    "splitwise": "loongserve",
    "loongserve": "splitwise",
}
"""A policy that does not have the property."""


def shipped_tests() -> list[Collected]:
    collection = collect(shipped_policies())
    assert not collection.errors, "\n".join(map(str, collection.errors))
    return collection.tests


TESTS = shipped_tests()


@pytest.mark.parametrize("collected", TESTS, ids=[collected.id for collected in TESTS])
def test_a_shipped_policy_has_its_defining_property(collected: Collected) -> None:
    outcome = run_test(collected.test)
    assert outcome.passed, "\n\n".join(map(failure_text, outcome.failures))
    assert outcome.warnings == ()


@pytest.mark.parametrize("policy", shipped_policies())
def test_its_tests_fail_under_another_policy(policy: str) -> None:
    tests = collect([policy], open_choice(OTHER[policy], {})).tests
    assert tests
    for collected in tests:
        assert not run_test(collected.test).passed, collected.id


def test_tests_of_policies_are_not_listed_as_policies() -> None:
    assert not [name for name in shipped_policies() if "test" in name]
