"""The policy reference says what the language is now, and everything in it can be found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from muxk.policies import reference_names
from muxk.policies.markdown import anchor
from muxk.policies.names import ASKED, PLACES
from muxk.policies.reference import reference

FILE = Path(__file__).parents[2] / "docs" / "policy-reference.md"


def test_the_reference_is_up_to_date() -> None:
    if FILE.read_text(encoding="utf-8") != reference():
        pytest.fail(f"docs/{FILE.name} is out of date: run `make reference` and commit it")


def test_the_command_writes_the_file_that_it_is_given(tmp_path: Path) -> None:
    written = tmp_path / "reference.md"
    command = [sys.executable, "-m", "muxk.policies.reference"]
    subprocess.run([*command, str(written)], check=True, timeout=60)
    assert written.read_text(encoding="utf-8") == reference()


@pytest.mark.parametrize("place", [place for place in PLACES if PLACES[place]])
def test_every_name_of_a_place_is_in_a_table(place: str) -> None:
    tables = set(re.findall(r"`([^`]+)`", reference_names.names_section()))
    for name in PLACES[place]:
        field = f".{name.partition('.')[2]}"
        assert name in tables or field in tables, name


def test_every_function_is_in_a_table() -> None:
    text = reference()
    for name in (name for asked in ASKED.values() for name in asked.functions):
        assert f"`{name}(" in text


def test_every_link_of_the_reference_leads_to_one_heading() -> None:
    text = re.sub(r"^```.*?^```$", "", reference(), flags=re.DOTALL | re.MULTILINE)
    anchors = [anchor(title) for title in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)]
    for target in re.findall(r"\]\(#([^)]*)\)", text):
        assert anchors.count(target) == 1, target


def test_a_name_that_no_group_explains_stops_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_names, "GROUPS", reference_names.GROUPS[1:])
    with pytest.raises(AssertionError, match="now"):
        reference_names.names_section()
