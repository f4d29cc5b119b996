"""Policies of a few rules as text, and what the analysis tells of them."""

from __future__ import annotations

from muxk.policies.checking import check_policy

HEAD = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: test}\nspec:\n"
LAST = "{name: last, then: {prefill: all}}"


def policy(spec: str) -> str:
    return HEAD + "".join(f"  {line}\n" for line in spec.splitlines())


def split(*conditions: str, more: str = "") -> str:
    """A policy whose split asks conditions in turn; rule i is on line 6 + i."""
    rules = [
        f'  - {{name: r{i}, when: "{when}", then: {{prefill: all}}}}' for i, when in enumerate(conditions)
    ]
    return policy("\n".join(["split:", *rules, f"  - {LAST}", more]).rstrip())


def told(text: str) -> list[tuple[int, int, str]]:
    """Line, column and code of every problem; the text has no errors."""
    checked = check_policy(text)
    assert checked.policy is not None, "\n".join(map(str, checked.problems))
    return [(problem.line, problem.column, problem.code) for problem in checked.problems]


def codes(text: str) -> list[str]:
    return [code for _, _, code in told(text)]
