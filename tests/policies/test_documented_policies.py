"""The policies and tests that documents show are policies and tests."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
from muxk.policies import policy_test, schema
from muxk.policies.engine import compile_policy
from muxk.policies.loader import load
from muxk.policies.marks import MappingNode
from muxk.policies.policy_test import read_tests
from muxk.policies.problems import Report

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
TUTORIAL = ROOT / "examples" / "tutorial"
BLOCKS = [
    pytest.param(page, textwrap.dedent(block), id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(
            r"^ *```yaml\n(.*?)^ *```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
    )
    if page != "docs/tutorial.md" or "apiVersion" in block
]
"""Parts of files that the tutorial shows are compared with those files, see test_tutorial.py."""
REST_OF_A_TEST: Mapping[str, str] = {
    "policy": "  policy: muxwise\n",
    "arrivals": "  arrivals: [{name: chat, prompt: 10, output: 2}, {name: long, prompt: 10, output: 2}]\n",
    "expect": "  expect: [finished > 0]\n",
}


def keys_of(text: str) -> tuple[str, ...]:
    report = Report()
    root = load(text, "block", report)
    assert not report, "\n".join(map(str, report.problems))
    assert isinstance(root, MappingNode), "a mapping"
    return tuple(entry.key.text for entry in root)


def whole_policy(sections: str) -> str:
    """Sections of a policy as a policy."""
    head = "apiVersion: muxk/v1beta1\nkind: SchedulingPolicy\nmetadata: {name: mine}\nspec:\n"
    return head + textwrap.indent(sections, "  ")


def whole_test(sections: str) -> str:
    """Sections of a test as a test."""
    head = "apiVersion: muxk/v1beta1\nkind: PolicyTest\nmetadata: {name: mine}\nspec:\n"
    rest = [text for key, text in REST_OF_A_TEST.items() if key not in keys_of(sections)]
    return head + "".join(rest) + textwrap.indent(sections, "  ")


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_what_a_document_shows_is_right(page: str, block: str) -> None:
    text = block
    if "apiVersion" not in text:
        is_test = set(keys_of(text)) <= set(policy_test.SPEC)
        assert is_test or set(keys_of(text)) <= set(schema.SPEC), "sections of a policy or of a test"
        text = whole_test(text) if is_test else whole_policy(text)
    if policy_test.KIND in text:
        assert read_tests(text, page, TUTORIAL)
    else:
        assert compile_policy(text, page).name
