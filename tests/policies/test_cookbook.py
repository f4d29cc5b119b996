"""The cookbook shows the policies of examples/policies, and each does what its recipe says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from muxk.actors.policy_tests import Outcome, judge, show, simulate
from muxk.client.policy_test_files import SUFFIX, Collected, collect
from muxk.client.test_report import failure_text
from muxk.policies.checking import check_file
from muxk.policies.expectations import OF_REQUESTS, PLACES, RequestsScope
from muxk.policies.policy_choice import PolicyChoice, open_choice
from muxk.policies.run_records import RunRecord

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "policies"
FILE = ROOT / "docs" / "cookbook.md"
COOKBOOK = FILE.read_text(encoding="utf-8")
RECIPES = re.split(r"^## ", COOKBOOK, flags=re.MULTILINE)[1:]
BLOCK = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
NAME = re.compile(r"^  name: (\S+)$", re.MULTILINE)
PLAIN = re.compile(r"tests? fails? under `(\w+)`")
FIGURES = re.compile(r"^\| (\S+) \| \S+ \| \S+ \|\n\|---\|---\|---\|\n((?:\|.*\|\n)+)", re.MULTILINE)
FILES = sorted(FOLDER.glob("*.yaml"))
POLICIES = [file for file in FILES if not file.name.endswith(SUFFIX)]


def names(recipe: str) -> list[str]:
    """Policies of a recipe."""
    return [name for block in BLOCK.findall(recipe) for name in NAME.findall(block)]


def recipe_tests(recipe: str, instead: PolicyChoice | None) -> list[Collected]:
    files = [FOLDER / f"{name}{SUFFIX}" for name in names(recipe)]
    collection = collect([str(file) for file in files if file.is_file()], instead)
    assert not collection.errors, "\n".join(map(str, collection.errors))
    assert collection.tests, "a recipe has a test"
    return collection.tests


@cache
def runs(recipe: str, plain: str | None = None) -> list[tuple[Collected, RunRecord]]:
    """The tests of a recipe, each with its run: under its policy, or under the plain one that is named."""
    instead = None if plain is None else open_choice(plain, {})
    return [(collected, simulate(collected.test)) for collected in recipe_tests(recipe, instead)]


@pytest.fixture(scope="module", autouse=True)
def _runs_are_let_go() -> Iterator[None]:
    yield
    runs.cache_clear()


def broken(outcome: Outcome) -> list[str]:
    """What does not hold of the requests; that a rule of another policy never fired proves nothing."""
    return [failure.text for failure in outcome.failures if not failure.about.startswith("of rule")]


def figure(run: RunRecord, text: str) -> str:
    """`ttft.max`, or `chat: ttft.max` of groups or single requests, as a test would show it."""
    who, _, name = text.rpartition(": ")
    wanted = who.split(", ")
    chosen = [request for request in run.requests if not who or {request.group, request.name} & set(wanted)]
    declared = PLACES[OF_REQUESTS][name]
    return show(declared.read(RequestsScope(run, chosen, who)), declared.type)


def with_figures(recipe: str) -> str:
    """A recipe with the tables that its tests give, under its policy and under the plain one."""
    (plain,) = PLAIN.findall(recipe)
    both = zip(runs(recipe), runs(recipe, plain), strict=True)
    for (own, other), (name, rows) in zip(both, FIGURES.findall(recipe), strict=True):
        assert own[0].test.name == name
        texts = [row[2:].partition(" | ")[0] for row in rows.splitlines()]
        table = "".join(f"| {text} | {figure(own[1], text)} | {figure(other[1], text)} |\n" for text in texts)
        before, heading, after = recipe.partition(f"| {name} |")
        recipe = before + heading + after.replace(rows, table, 1)
    return recipe


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
    for collected, run in runs(recipe):
        outcome = judge(collected.test, run)
        assert outcome.passed, "\n\n".join(map(failure_text, outcome.failures))
        assert outcome.warnings == ()


@pytest.mark.parametrize("recipe", RECIPES, ids=title)
def test_its_tests_fail_under_the_plain_policy_that_it_names(recipe: str) -> None:
    (plain,) = PLAIN.findall(recipe)
    for collected, run in runs(recipe, plain):
        assert broken(judge(collected.test, run)), f"{collected.id} holds under {plain}"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=title)
def test_the_figures_of_a_recipe_are_those_of_its_tests(recipe: str) -> None:
    assert recipe == with_figures(recipe), "`python tests/policies/test_cookbook.py` writes them anew"


if __name__ == "__main__":
    for found in RECIPES:
        COOKBOOK = COOKBOOK.replace(found, with_figures(found))
    FILE.write_text(COOKBOOK, encoding="utf-8")
