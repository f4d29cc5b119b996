"""The cookbook shows the policies of examples/policies, and each does what its recipe says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from muxk.actors.policy_tests import Outcome, run_test
from muxk.client.policy_test_files import SUFFIX, Collected, collect
from muxk.client.test_report import failure_text
from muxk.policies.checking import check_file
from muxk.policies.policy_choice import PolicyChoice, open_choice

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "policies"
COOKBOOK = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
RECIPES = re.split(r"^## ", COOKBOOK, flags=re.MULTILINE)[1:]
BLOCK = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
NAME = re.compile(r"^  name: (\S+)$", re.MULTILINE)
PLAIN = re.compile(r"tests? fails? under `(\w+)`")
FILES = sorted(FOLDER.glob("*.yaml"))
POLICIES = [file for file in FILES if not file.name.endswith(SUFFIX)]


def names(recipe: str) -> list[str]:
    """Policies of a recipe."""
    return [name for block in BLOCK.findall(recipe) for name in NAME.findall(block)]


def recipe_tests(recipe: str, instead: PolicyChoice | None = None) -> list[Collected]:
    files = [FOLDER / f"{name}{SUFFIX}" for name in names(recipe)]
    collection = collect([str(file) for file in files if file.is_file()], instead)
    assert not collection.errors, "\n".join(map(str, collection.errors))
    assert collection.tests, "a recipe has a test"
    return collection.tests


def broken(outcome: Outcome) -> list[str]:
    """What does not hold of the requests; that a rule of another policy never fired proves nothing."""
    return [failure.text for failure in outcome.failures if not failure.about.startswith("of rule")]


def title(recipe: str) -> str:
    return recipe.partition("\n")[0]


def test_the_cookbook_shows_every_policy_of_the_folder_as_it_is() -> None:
    shown = {name: block for block in BLOCK.findall(COOKBOOK) for name in NAME.findall(block)}
    assert sorted(shown) == [file.stem for file in POLICIES]
    for file in POLICIES:
        assert shown[file.stem] == file.read_text(encoding="utf-8"), f"{file.name} differs from the cookbook"


def test_every_test_of_the_folder_is_of_a_recipe() -> None:
    tests = [file.name.removesuffix(SUFFIX) for file in FILES if file.name.endswith(SUFFIX)]
    shown = [name for recipe in RECIPES for name in names(recipe)]
    assert set(tests) <= set(shown)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_of_the_folder_passes_the_check_without_a_warning(file: Path) -> None:
    checked = check_file(file.read_text(encoding="utf-8"), str(file), directory=FOLDER)
    assert checked.problems == ()


@pytest.mark.parametrize("recipe", RECIPES, ids=title)
def test_a_recipe_has_its_defining_property(recipe: str) -> None:
    for collected in recipe_tests(recipe):
        outcome = run_test(collected.test)
        assert outcome.passed, "\n\n".join(map(failure_text, outcome.failures))
        assert outcome.warnings == ()


@pytest.mark.parametrize("recipe", RECIPES, ids=title)
def test_its_tests_fail_under_the_plain_policy_that_it_names(recipe: str) -> None:
    (plain,) = PLAIN.findall(recipe)
    for collected in recipe_tests(recipe, open_choice(plain, {})):
        assert broken(run_test(collected.test)), f"{collected.id} holds under {plain}"
