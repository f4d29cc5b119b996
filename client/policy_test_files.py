"""Which files `muxk test` reads, and the tests in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from muxk.policies.engine import shipped_policies
from muxk.policies.policy_choice import PolicyChoice, read_text, split_documents
from muxk.policies.policy_test import KIND, read_tests
from muxk.policies.policy_test_spec import PolicyTest
from muxk.policies.problems import PolicyError, Problem, Report, did_you_mean

SUFFIX = ".test.yaml"
SKIPPED = ("node_modules", "__pycache__", "build", "dist")
"""Folders that are not looked into, besides hidden ones."""


@dataclass(frozen=True)
class Collected:
    """One test and the file it is in."""

    file: str
    test: PolicyTest

    @property
    def id(self) -> str:
        return f"{self.file}::{self.test.name}"


@dataclass
class Collection:
    """All tests that were found, and files that are wrong."""

    tests: list[Collected] = field(default_factory=list)
    errors: list[PolicyError] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    deselected: int = 0


@dataclass(frozen=True)
class _File:
    label: str
    path: Path | None
    """None for a test that ships."""
    asked: bool
    """It was named itself, so that it must hold tests."""


def collect(targets: Sequence[str], instead: PolicyChoice | None = None) -> Collection:
    """The tests of files, of folders with all below them, and of shipped policies by name."""
    collection = Collection()
    for file in _files(targets or (".",), collection):
        try:
            _read(file, instead, collection)
        except PolicyError as error:
            collection.errors.append(error)
    return collection


def _files(targets: Sequence[str], collection: Collection) -> list[_File]:
    found: dict[str, _File] = {}
    for target in targets:
        try:
            for file in _files_of(target):
                found.setdefault(file.label, file)
        except PolicyError as error:
            collection.errors.append(error)
    return list(found.values())


def _files_of(target: str) -> list[_File]:
    shipped = shipped_policies()
    path = Path(target)
    if target in shipped:
        return [_File(f"{target}{SUFFIX}", None, asked=True)]
    if path.is_dir():
        return [_File(os.path.normpath(file), file, asked=False) for file in _walk(path)]
    if path.is_file():
        return [_beside(path)]
    hint = did_you_mean(target, shipped, f"shipped policies: {', '.join(shipped)}")
    raise _problem(target, "there is no such file, folder or shipped policy", hint)


def _beside(path: Path) -> _File:
    """The file, or for a policy without tests the file with its tests."""
    neighbour = path.with_name(path.name.removesuffix(".yaml") + SUFFIX)
    if not path.name.endswith(SUFFIX) and neighbour.is_file() and not _holds_tests(path):
        path = neighbour
    return _File(os.path.normpath(path), path, asked=True)


def _holds_tests(path: Path) -> bool:
    documents = split_documents(read_text(path), str(path), Report())
    return any(document.kind == KIND for document in documents)


def _walk(folder: Path) -> list[Path]:
    """Test files below a folder, in the order of their names; links to folders are not followed."""
    found: list[Path] = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED)
        found += [Path(root, name) for name in sorted(files) if name.endswith(SUFFIX)]
    return found


def _read(file: _File, instead: PolicyChoice | None, collection: Collection) -> None:
    collection.files.append(file.label)
    directory = None if file.path is None else file.path.parent
    tests = read_tests(_text(file), file.label, directory, instead)
    if file.asked and not tests:
        hint = f"write kind: {KIND}, or name a folder with {SUFFIX} files"
        raise _problem(file.label, "there is no test in this file", hint)
    collection.tests += [Collected(file.label, test) for test in tests]


def _text(file: _File) -> str:
    if file.path is not None:
        return read_text(file.path)
    shipped = resources.files("muxk.policies").joinpath(file.label)
    if not shipped.is_file():
        raise _problem(file.label, "this policy ships without tests", "")
    return shipped.read_text(encoding="utf-8")


def _problem(file: str, message: str, hint: str) -> PolicyError:
    return PolicyError([Problem(file, 1, 1, message, hint, "")])


def select(collection: Collection, words: str) -> None:
    """Keep the tests whose id holds the words: `tbt`, `not long`, `chat and tbt or ttft`."""
    kept = [test for test in collection.tests if matches(test.id, words)]
    collection.deselected = len(collection.tests) - len(kept)
    collection.tests = kept


def matches(name: str, words: str) -> bool:
    """Whether a name holds words that `and`, `or` and `not` join; `and` binds tighter than `or`."""
    name = name.casefold()

    def holds(part: str) -> bool:
        word = part.strip().casefold()
        if word.startswith("not "):
            return not holds(word[4:])
        return word in name

    return any(all(holds(part) for part in side.split(" and ")) for side in words.split(" or "))
